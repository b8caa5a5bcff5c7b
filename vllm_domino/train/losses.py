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
            grads = None
            if (
                code is not None and book is not None and grad_code is not None
            ):  # before the base loss, which overwrites the base logits
                c = code[rows].to(compute)
                final = (base + c @ book.T).float()
                loss, grads, hits[1, rows] = _softmax_loss(final, target, final_weights[rows])
                sums[1] += loss
                narrow = grads.to(compute)
                grad_code[rows] = (narrow @ book).to(code.dtype)
                grad_book += (narrow.T @ c).float()
            loss, base_grads, hits[0, rows] = _softmax_loss(base.float(), target, base_weights[rows])
            sums[0] += loss
            grads = base_grads if grads is None else base_grads.add_(grads)
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


def _softmax_loss(logits: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy and its gradient, in as few passes over the logits as there can be.

    Args:
        logits: [n, V] fp32, overwritten. target: [n, 1] int64. weights: [n] fp32.

    Returns:
        The sum of the losses (scalar), its gradient [n, V] (the memory of `logits`), and [n] bool: argmax is right.
    """
    maximum, best = logits.max(dim=1, keepdim=True)
    picked = logits.gather(1, target) - maximum
    exponents = logits.sub_(maximum).exp_()
    total = exponents.sum(dim=1, keepdim=True)
    losses = (total.log() - picked).squeeze(1)
    share = weights.unsqueeze(1)
    gradient = exponents.mul_(share / total).scatter_add_(1, target, -share)
    return (losses * weights).sum(), gradient, (best == target).squeeze(1)


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
