"""Every public layout of a draft checkpoint gives the same drafter; anything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_drafters import random_weights, small_config, write_small_checkpoint

from vllm_domino.config.checkpoint import read_checkpoint, write_checkpoint
from vllm_domino.config.draft import DraftConfig, is_domino
from vllm_domino.model.drafter import Drafter


def _write(folder: Path, raw: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")
    return folder


def _assert_same_drafter(folder: Path, config: DraftConfig, weights: dict[str, torch.Tensor]) -> None:
    read = read_checkpoint(folder)
    assert read.config == config
    assert read.weights.keys() == weights.keys()
    assert all(torch.equal(read.weights[name], weights[name]) for name in weights)
    Drafter.from_checkpoint(read)


def test_public_layout_round_trip(tmp_path):
    config, weights = small_config(), random_weights(small_config())
    write_checkpoint(tmp_path / "c", config, weights)
    _assert_same_drafter(tmp_path / "c", config, weights)


def test_sharded_checkpoint_is_read_through_its_index(tmp_path):
    config, weights = small_config(), random_weights(small_config())
    write_checkpoint(tmp_path, config, weights, shard_bytes=8_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    _assert_same_drafter(tmp_path, config, weights)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(
        ValueError, match=r"weight file model-00002-of-\d+\.safetensors of the index is missing"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("architecture", ["DominoDraftModel", "DFlashDraftModel"])
@pytest.mark.parametrize("projector", ["domino", "causal_v5"])
@pytest.mark.parametrize("emb_dim_on_top", [False, True])
def test_config_variants(tmp_path, architecture, projector, emb_dim_on_top):
    config, weights = small_config(), random_weights(small_config())
    raw = config.to_dict() | {"architectures": [architecture]}
    raw["dflash_config"]["projector_type"] = projector
    if emb_dim_on_top:
        raw["emb_dim"] = raw["dflash_config"].pop("emb_dim")
    assert is_domino(raw)
    _assert_same_drafter(_write(tmp_path, raw, weights), config, weights)


@pytest.mark.parametrize("prefix", ["model.", "logit_head.", "model.logit_head."])
def test_tensor_prefixes(tmp_path, prefix):
    config, weights = small_config(), random_weights(small_config())
    heads = ("prefix_gru.", "embed_proj.")
    renamed = {
        (prefix + name if "logit" not in prefix or name.startswith(heads) else name): tensor
        for name, tensor in weights.items()
    }
    _assert_same_drafter(_write(tmp_path, config.to_dict(), renamed), config, weights)


def test_plain_dflash_has_no_head(tmp_path):
    folder = write_small_checkpoint(
        tmp_path, emb_dim=0, gru_hidden_dim=0, shift_label=False, pure_draft_prefix_len=0
    )
    read = read_checkpoint(folder)
    assert not read.config.has_head
    assert read.config.num_draft_tokens == 4  # block of 5, the anchor's slot predicts nothing
    assert not is_domino(json.loads((folder / "config.json").read_text()))


def test_missing_keys_take_the_training_codes_defaults():
    raw = small_config().to_dict()
    for key in ("shift_label", "pure_draft_prefix_len"):
        del raw["dflash_config"][key]
    config = DraftConfig.from_dict(raw)
    assert (config.shift_label, config.pure_draft_prefix_len) == (False, 0)


def test_speculators_format_with_reduced_vocabulary(tmp_path):
    """Fields at the top level, decoder fields nested, layer ids one higher, d2t as offsets, own LM head rows."""
    config = small_config(draft_vocab_size=10)
    weights = random_weights(config)
    ids = torch.tensor([0, 3, 5, 9, 20, 21, 40, 60, 80, 95])
    lm_head = torch.randn(10, 32)
    flat = small_config().to_dict()
    decoder = {k: flat.pop(k) for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                                        "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size",
                                        "max_position_embeddings", "rope_theta")}  # fmt: skip
    raw = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": decoder,
        "aux_hidden_state_layer_ids": [1, 3],
        "draft_vocab_size": 10,
        "block_size": 5,
        "num_target_layers": 4,
        **{k: v for k, v in flat["dflash_config"].items() if k != "target_layer_ids"},
    }
    extra = {
        "d2t": ids - torch.arange(10),
        "t2d": torch.zeros(97, dtype=torch.bool),
        "lm_head.weight": lm_head,
    }
    read = read_checkpoint(_write(tmp_path, raw, weights | extra))
    assert read.config == config
    assert read.vocab_ids.tolist() == ids.tolist()
    assert torch.equal(read.lm_head, lm_head)
    drafter = Drafter.from_checkpoint(read)
    drafts = drafter.draft(
        torch.tensor([4]), torch.tensor([7]), torch.randn(1, 3, *config.context_row_shape), torch.tensor([3]),
        torch.randn(97, 32), lm_head,
    )[0]  # fmt: skip
    assert set(drafts.flatten().tolist()) <= set(ids.tolist())


def test_d2t_outside_the_vocabulary(tmp_path):
    config = small_config(draft_vocab_size=10)
    weights = random_weights(config) | {"d2t": torch.full((10,), 90)}
    with pytest.raises(ValueError, match="d2t maps to ids 90…99, outside the vocabulary of 97"):
        read_checkpoint(_write(tmp_path, config.to_dict(), weights))
    with pytest.raises(ValueError, match="needs a tensor d2t of that length; it is missing"):
        read_checkpoint(_write(tmp_path, config.to_dict(), random_weights(config)))


def test_loading_is_strict(tmp_path):
    config, weights = small_config(), random_weights(small_config())
    gone = {k: v for k, v in weights.items() if k != "layers.1.mlp.up_proj.weight"}
    wrong = weights | {"fc.weight": torch.zeros(32, 65), "surprise": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"missing tensor layers\.1\.mlp\.up_proj\.weight"):
        Drafter.from_checkpoint(read_checkpoint(_write(tmp_path, config.to_dict(), gone)))
    with pytest.raises(ValueError, match=r"unknown tensor surprise; tensor fc\.weight has shape \[32, 65\]"):
        Drafter.from_checkpoint(read_checkpoint(_write(tmp_path, config.to_dict(), wrong)))


def test_one_tensor_under_two_names(tmp_path):
    weights = random_weights(small_config())
    weights["model.norm.weight"] = weights["norm.weight"].clone()
    with pytest.raises(ValueError, match=r"appears twice \(as norm\.weight\)"):
        read_checkpoint(_write(tmp_path, small_config().to_dict(), weights))


def test_broken_folders(tmp_path):
    with pytest.raises(ValueError, match="no such folder, and not a Hugging Face id"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_dict()))
    (tmp_path / "weights.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"weights\.bin is a pickle, which is never read"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no drafter"),
        ({"dflash_config": {"projector_type": "causal_v4"}}, "projector_type 'causal_v4'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only full_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "is not supported"),
        ({"block_size": None}, "missing block_size"),
        ({"num_key_value_heads": 3}, "is not a multiple of"),
        ({"vocab_size": 96}, "mask_token_id 96 is outside the vocabulary of 96"),
    ],
)
def test_configs_that_are_refused(change, message):
    raw = small_config().to_dict()
    nested = change.pop("dflash_config", None)
    raw |= change
    raw["dflash_config"] |= nested or {}
    with pytest.raises(ValueError, match=message):
        DraftConfig.from_dict(raw)


def test_fingerprint_follows_the_bytes(tmp_path):
    one = read_checkpoint(write_small_checkpoint(tmp_path / "a")).fingerprint
    assert read_checkpoint(write_small_checkpoint(tmp_path / "b")).fingerprint == one
    weights = load_file(tmp_path / "b/model.safetensors")
    weights["norm.weight"][0] += 1
    save_file(weights, tmp_path / "b/model.safetensors", metadata={"format": "pt"})
    assert read_checkpoint(tmp_path / "b").fingerprint != one
