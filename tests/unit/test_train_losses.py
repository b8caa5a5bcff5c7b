"""Losses, masks, weights and lambda against values worked out by hand."""

import math

import pytest
import torch
from torch.nn import functional

from vllm_domino.config.draft import DraftConfig
from vllm_domino.train.blocks import attention_mask, build_blocks, position_weights, sample_anchors
from vllm_domino.train.losses import block_losses, lambda_base
from vllm_domino.train.optim import learning_rate_factor


def config(**changes) -> DraftConfig:
    values = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "vocab_size": 32,
        "block_size": 4,
        "mask_token_id": 31,
        "target_layer_ids": (0,),
        "num_target_layers": 2,
        "emb_dim": 4,
        "gru_hidden_dim": 4,
        "shift_label": True,
        "pure_draft_prefix_len": 1,
    }
    return DraftConfig(**(values | changes))


def test_lambda_falls_linearly_from_one_to_zero():
    assert [lambda_base(step, 4) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [lambda_base(step, 4, decay_ratio=0.5) for step in range(4)] == [1.0, 0.5, 0.0, 0.0]


def test_position_weights_are_exponential_with_gamma():
    expected = [1.0, math.exp(-1 / 7), math.exp(-2 / 7), math.exp(-3 / 7)]
    assert position_weights(4, 7.0).tolist() == pytest.approx(expected)


def test_learning_rate_warms_up_then_follows_a_cosine():
    factors = [learning_rate_factor(step, 100, 0.04) for step in (0, 3, 4, 52, 99)]
    assert factors == pytest.approx([0.25, 1.0, 1.0, 0.5, 0.5 * (1 + math.cos(math.pi * 95 / 96))])


def test_blocks_by_hand_with_shifted_labels():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
    mask = torch.tensor([[False, False, True, True, True, True, True]])
    blocks = build_blocks(config(), ids, mask, torch.tensor([[4]]), torch.tensor([[True]]), 7.0)
    assert blocks.ids.tolist() == [[[14, 31, 31, 31]]]
    assert blocks.positions.tolist() == [[[4, 5, 6, 7]]]
    assert blocks.previous[0, 0, :2].tolist() == [14, 15]
    assert blocks.labels[0, 0, :2].tolist() == [15, 16]
    # Drafts 2 and 3 lie behind the end of the sequence.
    assert blocks.weights[0, 0].tolist() == pytest.approx([1.0, math.exp(-1 / 7), 0.0, 0.0])


def test_blocks_by_hand_with_dflash_labels():
    """Slot 0 predicts nothing, slot k the token at anchor + k: three drafts for a block of four."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
    mask = torch.tensor([[False, False, True, True, True, True, True]])
    blocks = build_blocks(
        config(shift_label=False), ids, mask, torch.tensor([[2]]), torch.tensor([[True]]), 7.0
    )
    assert blocks.ids.tolist() == [[[12, 31, 31, 31]]]
    assert blocks.previous.tolist() == [[[12, 13, 14]]]
    assert blocks.labels.tolist() == [[[13, 14, 15]]]
    assert blocks.weights[0, 0].tolist() == pytest.approx([1.0, math.exp(-1 / 7), math.exp(-2 / 7)])


def test_attention_sees_context_below_the_anchor_and_its_own_block_only():
    mask = attention_mask(torch.tensor([[1, 3]]), torch.tensor([[True, True]]), 4, 2, torch.tensor([4]))[
        0, 0
    ].int()
    assert mask.tolist() == [
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]


def test_anchors_have_a_supervised_token_and_a_supervised_next_one():
    mask = torch.tensor([[False, True, True, True, False], [False, False, False, True, False]])
    generators = [torch.Generator().manual_seed(n) for n in (1, 2)]
    anchors, used = sample_anchors(mask, 8, generators)
    assert anchors[0, :2].tolist() == [1, 2]
    assert used.sum(1).tolist() == [2, 0]


def reference_losses(hidden, code, head, book, labels, base_weights, final_weights):
    base = hidden @ head.T
    total = (functional.cross_entropy(base, labels, reduction="none") * base_weights).sum()
    if code is not None:
        losses = functional.cross_entropy(base + code @ book.T, labels, reduction="none")
        total = total + (losses * final_weights).sum()
    return total


@pytest.mark.parametrize("with_head", [True, False])
def test_chunked_losses_and_gradients_equal_the_plain_ones(with_head):
    torch.manual_seed(0)
    rows, vocabulary = 11, 13
    hidden = torch.randn(rows, 6, requires_grad=True)
    code = torch.randn(rows, 3, requires_grad=True) if with_head else None
    head, book = (
        torch.randn(vocabulary, 6),
        torch.randn(vocabulary, 3, requires_grad=True) if with_head else None,
    )
    labels = torch.randint(vocabulary, (rows,))
    base_weights, final_weights = torch.rand(rows), torch.rand(rows)
    leaves = [leaf for leaf in (hidden, code, book) if leaf is not None]
    expected = reference_losses(hidden, code, head, book, labels, base_weights, final_weights)
    wanted = torch.autograd.grad(expected, leaves)
    loss, sums, hits = block_losses(hidden, code, head, book, labels, base_weights, final_weights, chunk=4)
    got = torch.autograd.grad(loss * 2.0, leaves)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums.sum(), expected.detach())
    for grad, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(grad, 2.0 * want)
    assert torch.equal(hits[0], (hidden @ head.T).argmax(1) == labels)
    assert head.grad is None


def test_loss_of_uniform_logits_is_log_of_the_vocabulary():
    """Two rows, zero logits, weights 1/2 each at lambda 0.25: both terms are log 5 times their share."""
    weights = torch.full((2,), 0.5)
    loss, sums, _ = block_losses(
        torch.zeros(2, 3),
        torch.zeros(2, 2),
        torch.ones(5, 3),
        torch.ones(5, 2),
        torch.tensor([0, 4]),
        0.25 * weights,
        0.75 * weights,
    )
    assert loss.item() == pytest.approx(math.log(5))
    assert sums.tolist() == pytest.approx([0.25 * math.log(5), 0.75 * math.log(5)])
