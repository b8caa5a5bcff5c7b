"""Where gradients flow, what the curriculum does, and the prefixes of test-time training."""

import pytest
import torch
from torch.nn import functional

from vllm_domino.config.draft import DraftConfig
from vllm_domino.model.drafter import Drafter
from vllm_domino.train.blocks import build_blocks
from vllm_domino.train.objective import DraftObjective, accepted_lengths
from vllm_domino.train.recipe import DrafterRecipe


def config(**changes) -> DraftConfig:
    values = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "vocab_size": 32,
        "block_size": 4,
        "mask_token_id": 31,
        "target_layer_ids": (0, 1),
        "num_target_layers": 3,
        "emb_dim": 4,
        "gru_hidden_dim": 4,
        "shift_label": True,
        "pure_draft_prefix_len": 1,
    }
    return DraftConfig(**(values | changes))


def make(recipe: DrafterRecipe | None = None, **changes):
    torch.manual_seed(0)
    cfg = config(**changes)
    embedding = torch.randn(cfg.vocab_size, cfg.hidden_size, requires_grad=True)
    objective = DraftObjective(Drafter(cfg), recipe or DrafterRecipe(), embedding, embedding)
    ids = torch.randint(0, 30, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, :3] = False
    anchors = torch.tensor([[3, 6], [4, 9]])
    blocks = build_blocks(cfg, ids, mask, anchors, torch.ones(2, 2, dtype=torch.bool), 7.0)
    features = torch.randn(2, 12, cfg.feature_size)
    return objective, features, blocks, embedding


def gradients(objective, features, blocks, share):
    objective.zero_grad(set_to_none=True)
    terms = objective(features, blocks, share, float(blocks.weights.sum()))
    terms.loss.backward()
    return {
        name: 0.0 if p.grad is None else p.grad.abs().sum().item() for name, p in objective.named_parameters()
    }


def test_lambda_one_trains_the_backbone_alone():
    objective, features, blocks, embedding = make()
    found = gradients(objective, features, blocks, 1.0)
    assert all(value > 0 for name, value in found.items() if "backbone" in name)
    assert all(value == 0 for name, value in found.items() if ".head." in name)
    assert embedding.grad is None


def test_lambda_half_trains_both_parts_and_not_the_target():
    objective, features, blocks, embedding = make()
    found = gradients(objective, features, blocks, 0.5)
    assert all(value > 0 for value in found.values())
    assert embedding.grad is None
    assert all(p is not embedding for p in objective.parameters())


@pytest.mark.parametrize("shift", [True, False])
def test_loss_equals_the_reference_drafter_under_teacher_forcing(shift):
    """Block by block with `Drafter.block_hidden` and `DominoHead.forward`, the path that is served."""
    objective, features, blocks, embedding = make(shift_label=shift)
    drafter, cfg = objective.drafter, objective.drafter.config
    context = drafter.context_kv(features.flatten(0, 1), torch.arange(12).repeat(2)).unflatten(0, (2, 12))
    total, share = 0.0, 0.3
    for row in range(2):
        for block in range(2):
            anchor = blocks.ids[row, block, :1]
            position = blocks.positions[row, block, :1]
            hidden = drafter.block_hidden(anchor, position, context[row : row + 1], position, embedding)
            base = hidden @ embedding.T
            correction = drafter.head(
                hidden, functional.embedding(blocks.previous[row, block], embedding)[None]
            )
            correction[:, : cfg.pure_draft_prefix_len] = 0.0
            labels, weights = blocks.labels[row, block], blocks.weights[row, block]
            for logits, part in ((base, share), (base + correction, 1 - share)):
                total += (
                    part * (functional.cross_entropy(logits[0], labels, reduction="none") * weights).sum()
                )
    weight_sum = float(blocks.weights.sum())
    loss = objective(features, blocks, share, weight_sum).loss
    torch.testing.assert_close(loss, total / weight_sum)


def test_own_prefixes_are_what_the_drafter_drafts():
    objective, features, blocks, embedding = make(DrafterRecipe(prefixes="self"))
    drafter = objective.drafter
    context = drafter.context_kv(features[0], torch.arange(12)).unsqueeze(0)
    anchor, position = blocks.ids[0, 0, :1], blocks.positions[0, 0, :1]
    drafts = drafter.draft(anchor, position, context, position, embedding, embedding)[0]
    hidden = objective.backbone_pass(features, blocks, embedding)[0, :1]
    prefixes = objective.own_prefixes(hidden, anchor, embedding)
    assert prefixes.tolist() == [[int(anchor), *drafts[0, :-1].tolist()]]


def test_blocks_do_not_see_each_other():
    objective, features, blocks, embedding = make()
    together = objective.backbone_pass(features, blocks, embedding)
    blocks.ids[:, 1, 0] = 0
    apart = objective.backbone_pass(features, blocks, embedding)
    torch.testing.assert_close(together[:, 0], apart[:, 0])
    assert not torch.allclose(together[:, 1], apart[:, 1])


def test_gradient_checkpointing_changes_nothing():
    plain = make()
    careful = make(DrafterRecipe(gradient_checkpointing=True))
    assert gradients(*plain[:3], 0.5) == pytest.approx(gradients(*careful[:3], 0.5))


def test_accepted_lengths_stop_at_the_first_miss():
    hits = torch.tensor([[[True, False, True], [True, True, True], [False, False, False]]])
    weights = torch.tensor([[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]])
    total, blocks = accepted_lengths(hits, weights)
    assert (total.item(), blocks.item()) == (2 + 4, 2)
