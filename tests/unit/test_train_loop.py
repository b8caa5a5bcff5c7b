"""Whole runs on a toy target: resuming, several processes, refusals, and the files that come out."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_drafters import small_config
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.model.drafter import Drafter
from vllm_domino.train.data import Sample, StepBatches, read_samples
from vllm_domino.train.loop import LoopOptions, train_drafter
from vllm_domino.train.recipe import DrafterRecipe, spaced_layer_ids
from vllm_domino.train.replay import block_drafts, replay
from vllm_domino.train.target import TargetRecipe, build_target, save_target
from vllm_domino.train.target_features import FrozenTarget
from vllm_domino.train.tasks import copy_target_layers
from vllm_domino.train.tokenizer import train_tokenizer

VOCABULARY = 300
SMALL = {
    "num_hidden_layers": 1,
    "block_size": 4,
    "gru_hidden_dim": 8,
    "emb_dim": 4,
    "target_layer_ids": (0, 1),
    "num_anchors": 4,
    "batch_size": 2,
    "steps": 6,
    "max_length": 64,
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    words = ["".join(random.Random(n).choices("abcdefgh", k=6)) for n in range(200)]
    tokenizer = train_tokenizer([" ".join(words)] * 2, vocab_size=VOCABULARY)
    recipe = TargetRecipe(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    save_target(build_target(recipe, tokenizer), tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [
        {
            "prompt_token_ids": [rng.randrange(290) for _ in range(5)],
            "response_token_ids": [rng.randrange(290) for _ in range(rng.randrange(8, 20))],
        }
        for _ in range(24)
    ]
    rows[0]["prompt_token_ids"] = list(range(60, 70))  # among them the id of "a"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(target, data, out, options=None, **changes):
    return train_drafter(
        str(target),
        [data],
        out,
        DrafterRecipe(**(SMALL | changes)),
        options or LoopOptions(log_every=1, save_every=3),
    )


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(out).weights


def losses_of(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_equals_one_that_was_not_stopped(target, data, tmp_path, optimizer):
    run(target, data, tmp_path / "whole", optimizer=optimizer)
    stopped = LoopOptions(
        log_every=1, save_every=3, stop_after=4
    )  # one step after the checkpoint: it is lost
    run(target, data, tmp_path / "parts", stopped, optimizer=optimizer)
    run(
        target,
        data,
        tmp_path / "parts",
        LoopOptions(log_every=1, save_every=3, resume=True),
        optimizer=optimizer,
    )
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert losses_of(tmp_path / "whole")[3:] == losses_of(tmp_path / "parts")[4:]


def test_two_processes_equal_one_with_twice_the_accumulation(target, data, tmp_path):
    run(target, data, tmp_path / "one", accumulation=2, steps=20)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "worker.py"
    script.write_text(
        "from pathlib import Path\n"
        "from vllm_domino.train.loop import LoopOptions, train_drafter\n"
        "from vllm_domino.train.recipe import DrafterRecipe\n"
        f"train_drafter({str(target)!r}, [Path({str(data)!r})], Path({str(tmp_path / 'two')!r}),\n"
        f"    DrafterRecipe(**{SMALL | {'steps': 20}!r}), LoopOptions(log_every=1, save_every=100))\n"
    )
    workers = []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_PORT": str(port),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        workers.append(subprocess.Popen([sys.executable, str(script)], env=env))
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    one, two = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert len(one) == len(two) == 20
    assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "dflash", "shift_label": False},
        {"prefixes": "self"},
        {"curriculum": False},
        {"init_from_target": True},
        {"gradient_checkpointing": True},
    ],
)
def test_every_option_trains_and_writes_a_loadable_checkpoint(target, data, tmp_path, changes):
    facts = run(target, data, tmp_path / "out", steps=2, **changes)
    drafter = Drafter.from_checkpoint(read_checkpoint(tmp_path / "out"))
    assert (drafter.head is None) == (changes.get("method") == "dflash")
    assert facts["steps"] == 2
    assert all(value == value for value in losses_of(tmp_path / "out"))
    assert list((tmp_path / "out" / "tensorboard").iterdir())


@pytest.mark.parametrize("family", [Qwen3ForCausalLM, LlamaForCausalLM])
def test_draft_layers_start_as_the_targets_last_ones(family):
    """Every weight that the target has; a Llama has no norms of queries and keys, so the drafter's stay ones."""
    draft = small_config(num_hidden_layers=2)
    sizes = {
        name: getattr(draft, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
    }
    target = family(family.config_class(vocab_size=draft.vocab_size, num_hidden_layers=3, **sizes))
    drafter = Drafter(draft)
    copy_target_layers(drafter, target)
    for mine, theirs in zip(drafter.backbone.layers, target.model.layers[1:], strict=True):
        state = theirs.state_dict()
        for name, weight in mine.state_dict().items():
            want = state.get(name, torch.ones(draft.head_dim))
            assert torch.equal(weight, want), name
        assert ("self_attn.q_norm.weight" in state) == (family is Qwen3ForCausalLM)


def test_a_run_may_start_from_another_ones_checkpoint(target, data, tmp_path):
    run(target, data, tmp_path / "first", steps=2)
    start = str(tmp_path / "first")
    run(target, data, tmp_path / "second", steps=1, learning_rate=0.0, start_from=start)
    first, second = weights_of(tmp_path / "first"), weights_of(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match="another drafter"):
        run(target, data, tmp_path / "third", emb_dim=8, start_from=start)


def test_drafters_that_share_the_targets_features_come_out_as_without(target, data, tmp_path, monkeypatch):
    """One fills the store and is stopped on the way, the other two read; within an epoch every bit is the same."""
    shared = LoopOptions(features=tmp_path / "features", save_every=3, stop_after=3)
    resumed = LoopOptions(features=tmp_path / "features", resume=True)
    for method in ("domino", "dflash"):
        run(target, data, tmp_path / method, method=method)
        if method == "domino":
            run(target, data, tmp_path / f"{method}-shared", shared, method=method)
        else:
            monkeypatch.setattr(FrozenTarget, "features", None)  # all 6 steps are in the store
        run(target, data, tmp_path / f"{method}-shared", resumed, method=method)
        plain, stored = weights_of(tmp_path / method), weights_of(tmp_path / f"{method}-shared")
        assert all(torch.equal(plain[name], stored[name]) for name in plain)
    (folder,) = (tmp_path / "features").iterdir()
    assert sum((folder / "done").read_bytes()) == 12  # of 24 samples, 6 steps of 2


def test_eagle3_writes_what_vllm_reads(target, data, tmp_path):
    from safetensors.torch import load_file

    run(target, data, tmp_path / "out", method="eagle3", eagle_steps=3)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLMEagle3"]
    assert settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (16, 32)
    assert weights["fc.weight"].shape == (16, 32)


def test_training_learns(target, tmp_path):
    """Counting responses: what comes next is certain, so the loss must fall well below chance."""
    counting = tmp_path / "counting.jsonl"
    rows = [
        {"prompt_token_ids": [n], "response_token_ids": [(n + i) % 12 for i in range(20)]} for n in range(12)
    ]
    counting.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(target, counting, tmp_path / "out", steps=60, learning_rate=2e-2)
    losses = losses_of(tmp_path / "out")
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": (0, 2)}, ["target_layer_ids contains 2", "--set target_layer_ids="]),
        ({"mask_token": "<|nothing|>"}, ["<|nothing|>", "tokenizer"]),
        ({"block_size": 40}, ["19 tokens", "40", "--set block_size"]),
        ({"mask_token": "a"}, ["occurs in the text", "--set mask_token"]),
        ({"batch_size": 50}, ["24 samples", "50", "--set batch_size"]),
    ],
)
def test_recipes_that_do_not_fit_are_refused(target, data, tmp_path, changes, words):
    with pytest.raises(ValueError) as error:
        run(target, data, tmp_path / "out", **changes)
    for word in words:
        assert word in str(error.value)


def test_empty_data_and_broken_lines(target, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match="vllm-domino train data"):
        run(target, empty, tmp_path / "out")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt_token_ids": [1], "response_token_ids": [2, 3]}\nnot json\n')
    samples, counts = read_samples([broken], 2)
    assert (len(samples), counts.cut) == (1, 1)
    assert "broken.jsonl:2" in counts.broken[0]
    with pytest.raises(ValueError, match=r"broken\.jsonl:2"):
        read_samples([broken], 2, strict=True)


def test_token_ids_of_another_target_are_refused(target, tmp_path):
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text(json.dumps({"prompt_token_ids": [5000], "response_token_ids": [1] * 8}) + "\n")
    with pytest.raises(ValueError, match=r"5000 is outside .* 300"):
        run(target, foreign, tmp_path / "out")


def test_the_directory_of_another_run_is_refused(target, data, tmp_path):
    run(target, data, tmp_path / "out", steps=2)
    with pytest.raises(ValueError, match=r"recipe.seed is 0, this one has 1"):
        run(target, data, tmp_path / "out", steps=2, seed=1)
    with pytest.raises(ValueError, match="--resume"):
        run(target, data, tmp_path / "out", steps=2)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="choose another --out"):
        run(target, data, foreign)


def test_unknown_recipe_fields_are_refused():
    with pytest.raises(ValueError, match="unknown field 'lr'"):
        DrafterRecipe.read(None, {"lr": 1})
    with pytest.raises(ValueError, match="domino, dflash, eagle3"):
        DrafterRecipe(method="medusa")


def test_default_layer_ids_are_the_published_ones():
    assert spaced_layer_ids(36, 5) == (1, 9, 17, 25, 33)


def test_micro_batches_do_not_depend_on_the_number_of_processes():
    samples = [Sample(ids=tuple(range(n % 7 + 3)), prompt_length=1) for n in range(40)]
    one, two = StepBatches(samples, 2, 4, seed=3), StepBatches(samples, 2, 4, seed=3)
    assert [one.step(step) for step in range(12)] == [two.step(step) for step in reversed(range(12))][::-1]
    epoch = [index for step in range(5) for group in one.step(step)[1] for index in group]
    assert sorted(epoch) == list(range(40))


def greedy_samples(target: Path, prompts: list[list[int]], tokens: int) -> list[Sample]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    samples = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
        samples.append(Sample(ids=tuple(ids[0].tolist()), prompt_length=len(prompt)))
    return samples


@pytest.mark.parametrize("method", ["domino", "dflash"])
def test_replayed_rounds_are_those_of_the_reference_loop(target, data, tmp_path, method):
    """Trained on the toy target's own greedy answers, so that some drafts are right."""
    from transformers import AutoModelForCausalLM

    from vllm_domino.model.decode import speculative_decode

    prompts = [[n, n + 7, 3 * n] for n in range(1, 13)]
    samples = greedy_samples(target, prompts, 30)
    own = tmp_path / "own.jsonl"
    own.write_text(
        "".join(
            json.dumps({"prompt_token_ids": s.ids[:3], "response_token_ids": s.ids[3:]}) + "\n"
            for s in samples
        )
    )
    run(target, own, tmp_path / "out", method=method, steps=60, learning_rate=2e-2)
    drafter = Drafter.from_checkpoint(read_checkpoint(tmp_path / "out"), dtype=torch.float32)
    frozen = FrozenTarget(str(target), (0, 1), torch.float32, torch.device("cpu"))
    replayed = replay(frozen, block_drafts(drafter), samples, drafter.config.num_draft_tokens, [])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    accepted = []
    for sample in samples:
        result = speculative_decode(model, drafter, sample.ids[:3], max_new_tokens=30)
        assert tuple(result.token_ids) == sample.ids[3:]
        accepted += result.accepted
    assert replayed["acceptance_length"] > 1.2
    assert replayed["rounds"] == len(accepted)
    assert replayed["acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted), abs=1e-3)
