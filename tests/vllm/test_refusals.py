"""What cannot be served is refused at start, naming what is wrong, what would be right, and what to do about it."""

import json
import os
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
from harness import (
    BLOCK,
    DFLASH,
    DOMINO,
    OPTIONS,
    SERVER_ENVIRONMENT,
    TARGET,
    Counters,
    Trace,
    capture_log,
    environment_before_vllm,
    generate,
    open_llm,
    proposer_of,
    runner_of,
    speculative,
    tokens,
    untied_target,
)
from reference import check_drafts
from vllm import SamplingParams

from vllm_domino.bench.server import ServerError, ServerSpec, VllmServer
from vllm_domino.config.checkpoint import read_checkpoint

BUILD = "vllm-domino build"
SHAPE = json.loads((TARGET / "config.json").read_text())  # of the target
# one engine start each: as little as vLLM starts with
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 512}


@pytest.fixture
def copied(engine, tmp_path):
    """A copy of the engine directory to break."""
    folder = tmp_path / "engine"
    shutil.copytree(engine, folder)
    return folder


def _edit(folder: Path, name: str = "engine.json", **changes) -> None:
    """Change fields of a JSON file; `a__b` is field b of a."""
    raw = json.loads((folder / name).read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = raw
        for part in path:
            inner = inner[part]
        inner[last] = value
    (folder / name).write_text(json.dumps(raw))


def _refused(model: Path, *parts: str, num_tokens: int = BLOCK, **options) -> str:
    """Start vLLM with this drafter; it must refuse in words that hold all of `parts`."""
    with (
        pytest.raises((ValueError, RuntimeError)) as caught,
        open_llm(speculative(model, num_tokens), **(SMALL | options)),
    ):
        pytest.fail("vLLM started")
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def test_a_directory_without_a_manifest(copied):
    (copied / "engine.json").unlink()
    _refused(copied, str(copied), "engine.json", BUILD)


def test_a_truncated_graph(copied):
    data = copied / "block.onnx.data"
    size = data.stat().st_size
    os.truncate(data, size - 4096)
    _refused(copied, "block.onnx.data", str(size - 4096), str(size), BUILD)


def test_one_changed_byte(copied):
    data = copied / "context.onnx.data"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    _refused(copied, "context.onnx.data", "SHA-256", BUILD)


def test_an_unknown_manifest_version(copied):
    _edit(copied, schema_version=99)
    _refused(copied, "manifest version 99", "reads 1", BUILD)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"target__hidden_size": 512, "draft__target_hidden_size": 512},
            (f"hidden size is {SHAPE['hidden_size']}", "for 512"),
        ),
        ({"target__vocab_size": 5000, "draft__vocab_size": 5000}, ("vocabulary is 4096", "for 5000")),
        ({"target__num_layers": 9}, (f"number of layers is {SHAPE['num_hidden_layers']}", "for 9")),
        ({"target__tokenizer_sha256": "0" * 64}, ("tokenizer", "0" * 12)),
    ],
)
def test_an_engine_for_another_target(copied, changes, parts):
    _edit(copied, **changes)
    _refused(copied, str(copied), *parts)


def test_layer_ids_that_the_target_does_not_have(tmp_path):
    layers, (*ids, _) = SHAPE["num_hidden_layers"], read_checkpoint(DOMINO).config.target_layer_ids
    wrong = [*ids, layers - 1]
    folder = _checkpoint(tmp_path, num_target_layers=None, dflash_config__target_layer_ids=wrong)
    _refused(folder, f"target_layer_ids {wrong}", "out of range", f"has {layers} layers")


def test_more_draft_tokens_than_the_block_has(engine, reference):
    most = reference.drafter.config.num_draft_tokens
    _refused(engine, f"num_speculative_tokens is {most + 1}", f"1 to {most}", num_tokens=most + 1)


def test_lora(engine):
    _refused(engine, "LoRA", "--enable-lora", enable_lora=True)


def test_a_quantized_lm_head(engine, tmp_path):
    """The tiny target with its LM head in int8, which vLLM serves on a CPU."""
    target = _with_int8_head(tmp_path / "target")
    with open_llm(target=target, **SMALL) as llm:
        head = runner_of(llm).model.lm_head
        assert type(head.quant_method).__name__ == "CompressedTensorsLinearMethod"
        assert len(tokens(generate(llm, [[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True)))[0]) == 2
    size = f"{SHAPE['vocab_size']} x {SHAPE['hidden_size']}"
    parts = ("LM head must be a plain matrix of " + size, "CompressedTensorsLinearMethod", "without Domino")
    _refused(engine, *parts, target=target)


@pytest.mark.parametrize(
    "weight",
    [
        None,  # packed and dropped, or under another name
        torch.zeros(64, 16, dtype=torch.int8),
        torch.zeros(
            64, 16, dtype=torch.float8_e4m3fn
        ),  # in blocks: shaped like a plain one, and floating point
        torch.zeros(16, 64),
        torch.zeros(60, 16),
    ],
)
def test_a_head_that_is_no_plain_matrix(weight):
    from vllm_domino.plugin.checks import target_weights

    model = torch.nn.Module()
    model.embed_tokens, model.lm_head = torch.nn.Embedding(64, 16), torch.nn.Module()
    model.lm_head.register_buffer("weight", weight)
    with pytest.raises(ValueError, match="LM head must be a plain matrix of 64 x 16"):
        target_weights(model, 64, 16)
    model.embed_tokens, model.lm_head = model.lm_head, model.embed_tokens
    with pytest.raises(ValueError, match="embedding must be a plain matrix of 64 x 16"):
        target_weights(model, 64, 16)


def test_a_target_that_cannot_give_hidden_states(engine, tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=4096,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
    )
    OPTForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, tmp_path / name)
    _refused(engine, "OPTForCausalLM", "hidden states", "without --speculative-config", target=tmp_path)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"tensor_parallel_size": 2}, ("tensor parallel size is 2", "--tensor-parallel-size 1")),
        ({"pipeline_parallel_size": 2}, ("pipeline parallel size is 2", "--pipeline-parallel-size 1")),
    ],
)
def test_more_than_one_device(engine, sizes, parts):
    """On vLLM's own config of such a server; the last test of this file starts one, whose workers are processes."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_domino.plugin.checks import refuse_unsupported

    options = {k: v for k, v in (OPTIONS | SMALL).items() if k != "distributed_executor_backend"}
    arguments = EngineArgs(model=str(TARGET), speculative_config=speculative(engine), **options, **sizes)
    config = arguments.create_engine_config()
    with pytest.raises(ValueError) as caught:
        refuse_unsupported(config, torch.nn.Module())
    for part in parts:
        assert part in str(caught.value)


def test_a_vllm_outside_the_window(monkeypatch):
    from vllm_domino.plugin.register import SKIP_VERSION_CHECK, register

    monkeypatch.setattr(metadata, "version", lambda name: "0.99.1")
    with pytest.raises(RuntimeError) as caught:
        register()
    message = str(caught.value)
    for part in ("0.32 to 0.33", "found 0.99.1", "pip install 'vllm>=0.32,<0.34'", SKIP_VERSION_CHECK):
        assert part in message
    monkeypatch.setenv(SKIP_VERSION_CHECK, "1")
    register()


def test_a_drafter_shorter_than_the_target(tmp_path, plain, chats):
    """Served, with one warning; past its length a request goes on without drafts."""
    folder = _checkpoint(tmp_path, max_position_embeddings=160)
    text = [token for chat in chats for token in chat]
    prompts = [text[:60], text[100:230], text[300:480]]  # before the end, across it, and past it
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = tokens(generate(plain, prompts, params))
    with capture_log() as records, open_llm(speculative(folder)) as llm:
        drafts = []
        for prompt, answer in zip(prompts, expected, strict=True):
            before = Counters.of(llm)
            assert tokens(generate(llm, [prompt], params)) == [answer]
            drafts.append(Counters.of(llm).since(before).drafts)
    warnings = [r.getMessage() for r in records if r.levelname == "WARNING" and "positions" in r.getMessage()]
    assert len(warnings) == 1
    assert "160" in warnings[0]
    assert "512" in warnings[0]
    last = 160 - 16  # an anchor from which a whole block still lies inside
    assert drafts[0] > 0
    assert 0 < drafts[1] <= last - len(prompts[1]) + 1
    assert drafts[2] == 0


def test_a_plain_checkpoint_is_served_by_pytorch(tmp_path, reference, runs):
    trace = Trace(tmp_path / "trace")
    runs = runs[:4]
    with capture_log() as records, open_llm(speculative(DOMINO), trace=trace.path) as llm:
        trace.take()
        params = SamplingParams(temperature=0, max_tokens=runs[0].num_tokens, ignore_eos=True)
        assert tokens(generate(llm, [run.prompt for run in runs], params)) == [run.output for run in runs]
        assert proposer_of(llm).model.session.backend == "pytorch"
    assert check_drafts(trace.take(), reference, runs) > 0
    lines = [record.getMessage() for record in records if BUILD in record.getMessage()]
    assert len(lines) == 1, lines


def test_a_dflash_checkpoint_is_left_to_vllm():
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
    from vllm.v1.spec_decode.dflash import DFlashProposer

    with open_llm(speculative(DFLASH)) as llm:
        assert type(proposer_of(llm)) is DFlashProposer
        assert type(proposer_of(llm).model) is DFlashQwen3ForCausalLM
        assert runner_of(llm).effective_drafter_max_model_len <= 1 << 30


# Through a real `vllm serve`: the process ends by itself, with an exit code that is not 0.


def _serve_fails(tmp_path, model, *parts, args=(), env=None):
    arguments = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager", *args)
    spec = ServerSpec(
        model=str(TARGET),
        speculative=speculative(model),
        args=arguments,
        env=SERVER_ENVIRONMENT | (env or {}),
    )
    server = VllmServer(spec, tmp_path / "server.log")
    with environment_before_vllm():
        server.start()
    try:
        with pytest.raises(ServerError, match=r"ended with exit code [1-9]"):
            server.wait_ready()
    finally:
        server.stop()
    log = (tmp_path / "server.log").read_text().partition("\n")[2]  # the first line is the command
    for part in parts:
        assert part in log, f"{part!r} is not in the log:\n{server.tail()}"


def test_vllm_serve_ends_on_a_missing_or_empty_directory(tmp_path):
    missing = tmp_path / "nothing-here"
    missing.mkdir()
    _serve_fails(tmp_path, missing, str(missing), "config.json")


def test_vllm_serve_ends_on_a_changed_manifest(tmp_path, copied):
    _edit(copied, schema_version=99)
    _serve_fails(tmp_path, copied, "manifest version 99", BUILD)


def test_vllm_serve_ends_on_two_devices(tmp_path, engine):
    _serve_fails(tmp_path, engine, "tensor parallel size is 2", args=("--tensor-parallel-size", "2"))


def _with_int8_head(folder: Path) -> Path:
    """The tiny target with its head quantized by output channel, as compressed-tensors has it."""

    def quantized(tied: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = tied.float().abs().amax(1, keepdim=True) / 127
        return {
            "lm_head.weight": (tied.float() / scale).round().to(torch.int8),
            "lm_head.weight_scale": scale,
        }

    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["lm_head"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    return untied_target(folder, quantized, quantization_config=config)


def _checkpoint(tmp_path: Path, **changes) -> Path:
    """The tiny drafter's checkpoint with another config."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(DOMINO, folder)
    _edit(folder, "config.json", **changes)
    return folder
