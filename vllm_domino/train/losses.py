"""The two-term loss and its schedule, without ever holding the logits of a whole batch.

L = (1 - lambda) * L_final + lambda * L_base, both cross-entropy on data tokens, position-weighted and
normalised by the sum of weights (paper §4). lambda goes from 1 to 0 linearly over training: the backbone
learns to stand alone first.

At 150k vocabulary rows, logits of 256 anchors x 16 slots take 2.5 GB per sequence and per term.
`block_losses` walks over the rows in chunks and computes the gradients in the forward pass, so that a
chunk's logits are all that exists.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lambda_base(step: int, total_steps: int, *, start: float = 1.0, decay_ratio: float = 1.0) -> float:
    """Weight of the base loss at `step` (0-based): `start` falling linearly to 0 at `decay_ratio` of the
    run.
    """
    return max(0.0, start * (1.0 - min(step / max(1.0, total_steps * decay_ratio), 1.0)))


class _BlockLosses(torch.autograd.Function):
    """Weighted sums of the base and final cross-entropies of N draft rows; gradients are made in
    `forward`.
    """

    @staticmethod
    def forward(ctx, hidden, code, lm_head, codebook, labels, base_weights, final_weights, chunk):
        compute = torch.bfloat16 if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
        head, book = lm_head.to(compute), None if code is None else codebook.to(compute)
        grad_hidden = torch.empty_like(hidden)
        grad_code = None if code is None else torch.empty_like(code)
        grad_book = (
            None if code is None else torch.zeros(codebook.shape, dtype=torch.float32, device=hidden.device)
        )
        sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        hits = torch.zeros(2, len(labels), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(labels), chunk):
            rows = slice(start, start + chunk)
            target = labels[rows].unsqueeze(1)
            base = hidden[rows].to(compute) @ head.T  # [n, V]
            grads = torch.zeros((), device=hidden.device)
            if code is not None:  # before the base loss, which overwrites the base logits
                c = code[rows].to(compute)
                final_losses, grads, hits[1, rows] = _softmax_loss((base + c @ book.T).float(), target)
                sums[1] += (final_losses * final_weights[rows]).sum()
                grads *= final_weights[rows].unsqueeze(1)
                narrow = grads.to(compute)
                grad_code[rows] = (narrow @ book).to(code.dtype)
                grad_book += (narrow.T @ c).float()
            losses, base_grads, hits[0, rows] = _softmax_loss(base.float(), target)
            sums[0] += (losses * base_weights[rows]).sum()
            grads = base_grads.mul_(base_weights[rows].unsqueeze(1)).add_(grads)
            grad_hidden[rows] = (grads.to(compute) @ head).to(hidden.dtype)
        ctx.save_for_backward(
            grad_hidden, grad_code, None if grad_book is None else grad_book.to(codebook.dtype)
        )
        ctx.mark_non_differentiable(sums, hits)
        return sums.sum(), sums, hits

    @staticmethod
    def backward(ctx, grad_loss, _sums, _hits):
        grad_hidden, grad_code, grad_book = ctx.saved_tensors
        scaled = [None if grad is None else grad * grad_loss for grad in (grad_hidden, grad_code)]
        return *scaled, None, None if grad_book is None else grad_book * grad_loss, None, None, None, None


def _softmax_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy [n], its gradient [n, V] (in the memory of `logits`) and whether the argmax is right
    [n].
    """
    right = logits.argmax(dim=1, keepdim=True) == target
    maximum = logits.amax(dim=1, keepdim=True)
    picked = logits.gather(1, target) - maximum
    probabilities = logits.sub_(maximum).exp_()
    total = probabilities.sum(dim=1, keepdim=True)
    losses = total.log() - picked
    gradient = probabilities.div_(total)
    gradient.scatter_add_(1, target, torch.full_like(picked, -1.0))
    return losses.squeeze(1), gradient, right.squeeze(1)


def block_losses(
    hidden: Tensor,
    code: Tensor | None,
    lm_head: Tensor,
    codebook: Tensor | None,
    labels: Tensor,
    base_weights: Tensor,
    final_weights: Tensor,
    chunk: int = 512,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over rows of base_weights * CE(base) + final_weights * CE(base + correction).

    Args:
        hidden: [N, H] of the slots that predict. lm_head: [V, H], frozen: it gets no gradient.
        code: [N, R] or None without a head; the correction is `code @ codebook.T`, codebook [V, R].
        labels: [N] int64. base_weights, final_weights: [N] fp32, lambda and normalisation included.

    Returns:
        loss: scalar that may be differentiated.
        sums: [2] fp32, the base and the final part of it.
        hits: [2, N] bool, where the argmax of base and of base + correction is the label.
    """
    return _BlockLosses.apply(hidden, code, lm_head, codebook, labels, base_weights, final_weights, chunk)
