"""Pruned vocabularies: which tokens are kept, the same drafts as the whole head masked to them, and refusals."""

from __future__ import annotations

import json

import pytest
import torch
from small_drafters import small_config, write_small_checkpoint

from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.config.recipes import ExportRecipe, load_export_recipe
from vllm_domino.config.vocabulary import most_frequent, prune, read_frequencies, read_recipe_checkpoint
from vllm_domino.model.drafter import Drafter, HeadOptions
from vllm_domino.runtime.torch_session import TorchSession
from vllm_domino.train.data import count_tokens

KEPT = torch.arange(0, 97, 3)
DFLASH = {"emb_dim": 0, "gru_hidden_dim": 0, "shift_label": False, "pure_draft_prefix_len": 0}


def masked_drafts(drafter, case, embedding, lm_head, kept, pool=None):
    """Draft by draft from the whole vocabulary's logits, with those outside `kept` at minus infinity."""
    config = drafter.config
    hidden = drafter.block_hidden(*case, embedding)
    mask = torch.full((config.vocab_size,), float("-inf"))
    mask[kept] = 0
    base = hidden @ lm_head.T + mask
    if pool is not None:
        leading = base.amax(dim=1).topk(pool).indices  # [B, C]
        pool_mask = torch.full_like(base[:, 0], float("-inf")).scatter(1, leading, 0)
    tokens = [case[0]]
    for i in range(drafter.num_draft_tokens):
        logits = base[:, i]
        if drafter.head is not None and i >= config.pure_draft_prefix_len:
            before = torch.stack(tokens, dim=1)
            logits = logits + drafter.head(hidden[:, : i + 1], embedding[before])[:, i]
            logits = logits if pool is None else logits + pool_mask
        tokens.append(logits.argmax(dim=-1))
    return torch.stack(tokens[1:], dim=1)


def random_case(config, batch=6, context=11):
    return (
        torch.randint(config.vocab_size, (batch,)),
        torch.arange(batch) + context,
        torch.randn(batch, context, *config.context_row_shape),
        torch.randint(context + 1, (batch,)),
    )


@pytest.mark.parametrize(("changes", "pool"), [({}, None), ({}, 7), (DFLASH, None)])
def test_drafts_are_those_of_the_masked_vocabulary(tmp_path, changes, pool):
    torch.manual_seed(0)
    checkpoint = read_checkpoint(write_small_checkpoint(tmp_path, **changes))
    options = HeadOptions(candidate_pool=pool)
    whole = Drafter.from_checkpoint(checkpoint, options).eval()
    pruned = prune(checkpoint, KEPT)
    session = TorchSession(Drafter.from_checkpoint(pruned, options), torch.device("cpu"), torch.float32)
    embedding, lm_head = torch.randn(97, 32), torch.randn(97, 32) * 0.3
    session.bind_target(embedding, lm_head)
    case = random_case(checkpoint.config, batch=64)
    out = torch.full((64, checkpoint.config.num_draft_tokens), -1)
    session.draft(*case, out)
    assert torch.equal(out, masked_drafts(whole, case, embedding, lm_head, KEPT, pool))
    assert set(out.flatten().tolist()) <= set(KEPT.tolist())
    assert not torch.equal(
        out, whole.draft(*case, embedding, lm_head)[0]
    )  # the whole vocabulary drafts others
    assert checkpoint.config.draft_vocab_size is None  # and is left as it was


def test_the_most_frequent_and_of_equal_ones_the_smaller():
    counts = torch.tensor([0, 5, 2, 9, 2, 2, 0])
    assert most_frequent(counts, 3).tolist() == [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"size is 6, .* counts 5 different tokens; set draft_vocab_size = 5"
    ):
        most_frequent(counts, 6)
    with pytest.raises(ValueError, match="size is 7, the target has 7 tokens; set a smaller one"):
        most_frequent(counts, 7)


def test_from_answers_to_a_pruned_checkpoint(tmp_path):
    """Only responses count; the mask never gets in, though it is the most frequent here."""
    data, mask = tmp_path / "data.jsonl", small_config().mask_token_id
    rows = [([1, 1, 1, 1], [7, 8, mask, mask, mask]), ([2], [8, 9, 8])]
    data.write_text(
        "".join(json.dumps({"prompt_token_ids": p, "response_token_ids": r}) + "\n" for p, r in rows)
    )
    counts, read = count_tokens([data])
    assert (counts, read.read) == ({8: 3, mask: 3, 7: 1, 9: 1}, 2)
    (tmp_path / "frequencies.json").write_text(json.dumps(counts))
    write_small_checkpoint(tmp_path / "draft")
    recipe = tmp_path / "r.toml"
    recipe.write_text('checkpoint = "draft"\ndraft_vocab_size = 2\ntoken_frequencies = "frequencies.json"\n')
    loaded = load_export_recipe(recipe)
    assert loaded.build_name == "r-fp32-v2"
    read = read_recipe_checkpoint(loaded)
    assert read.vocab_ids.tolist() == [7, 8]
    assert read.config.draft_vocab_size == 2
    assert read.weights["embed_proj.2.weight"].shape == (2, 12)
    assert read.fingerprint == read_checkpoint(tmp_path / "draft").fingerprint
    assert len(read.token_frequencies) == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("3", "found int; it must be an object from token id to count"),
        ('{"97": 1}', "token id '97'; ids of this target are 0 to 96"),
        ('{"the": 1}', "token id 'the'; ids of this target are 0 to 96"),
        ("[1, -2]", "token 1 has count -2"),
        ('{"3": 0.5}', "token 3 has count 0.5"),
        (None, "cannot be read .*; make it with `vllm-domino train frequencies"),
    ],
)
def test_refused_files(tmp_path, content, message):
    path = tmp_path / "frequencies.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_frequencies(path, 97)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("draft_vocab_size = 8\n", "missing key 'token_frequencies': draft_vocab_size = 8 needs the file"),
        (
            'token_frequencies = "f.json"\n',
            "missing key 'draft_vocab_size': token_frequencies alone prunes nothing",
        ),
        ('draft_vocab = 8\ntoken_frequencies = "f"\n', "'draft_vocab'; did you mean 'draft_vocab_size'"),
    ],
)
def test_refused_recipes(tmp_path, keys, message):
    path = tmp_path / "r.toml"
    path.write_text('checkpoint = "owner/name"\n' + keys)
    with pytest.raises(ValueError, match=message):
        load_export_recipe(path)


def test_a_reduced_checkpoint_is_not_pruned_again(tmp_path):
    checkpoint = read_checkpoint(write_small_checkpoint(tmp_path / "draft"))
    with pytest.raises(
        ValueError, match="it was trained with a draft vocabulary of 33; leave draft_vocab_size"
    ):
        prune(prune(checkpoint, KEPT), KEPT)


def test_a_list_counts_by_position(tmp_path):
    path = tmp_path / "f.json"
    path.write_text("[0, 4, 1]")
    assert read_frequencies(path, 97)[:4].tolist() == [0, 4, 1, 0]
    assert ExportRecipe(name="r", checkpoint="c").draft_vocab_size == 0
