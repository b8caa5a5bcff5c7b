"""Suites, prompts and grading: what is read, and what is refused with which words."""

import json
import tomllib
from pathlib import Path

import pytest

from vllm_domino.bench.datasets import KNOWN, load_prompts, prompts_digest
from vllm_domino.bench.grading import is_right, last_boxed
from vllm_domino.bench.preflight import flag, prepare
from vllm_domino.bench.suite import DataSettings, load_suite

SUITES = Path(__file__).parents[2] / "benchmarks" / "suites"
SMALL = """
concurrency = [1, 4]
[server]
model = "target"
[[data]]
source = "questions.jsonl"
prompts = 2
[[variant]]
name = "none"
[[variant]]
name = "domino-engine"
speculative = { method = "dflash", model = "engine", num_speculative_tokens = 4 }
build = ["a.toml", "b.toml"]
"""


class Template:
    """A tokenizer, as far as prompts need one."""

    chat_template = "there"

    def apply_chat_template(self, messages, *, tools, tokenize, add_generation_prompt, enable_thinking):
        assert not tokenize
        assert add_generation_prompt
        return "|".join(m["content"] for m in messages) + ("|think" if enable_thinking else "")


def write(folder: Path, text: str) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_suites_are_read_and_say_what_they_need(path):
    suite = load_suite(path)
    assert suite.name == path.stem
    assert suite.needs
    assert suite.variant[0].name == "none"
    assert "{" not in json.dumps(
        [v.speculative for v in suite.variant if v.speculative], default=str
    ).replace('{"', "")
    assert "--no-enable-prefix-caching" in suite.server.args


def test_the_device_names_engine_and_recipe():
    suite = load_suite(SUITES / "qwen3-8b.toml", device="l40s")
    engine = next(v for v in suite.variant if v.name == "domino-engine")
    assert engine.drafter.endswith("qwen3-8b-l40s")
    assert engine.build[1].endswith("l40s.toml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("concurrency", "concurency"), "did you mean 'concurrency'"),
        (("[1, 4]", "[4, 1]"), "ascending"),
        (("prompts = 2", "prompts = [1, 2, 3]"), "prompts has 3 numbers, concurrency has 2"),
        (("prompts = 2", "prompts = 0"), "at least 1 prompt"),
        (('name = "domino-engine"', 'name = "none"'), "none"),
        (("build =", "bild ="), "did you mean 'build'"),
        (('model = "target"', 'modle = "target"'), "did you mean 'model'"),
    ],
)
def test_wrong_suites_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=r"small\.toml") as caught:
        load_suite(write(tmp_path, SMALL.replace(*change)))
    assert words in str(caught.value)


def test_repeats_can_grow_without_a_new_fingerprint(tmp_path):
    first = load_suite(write(tmp_path, SMALL)).fingerprint
    assert load_suite(write(tmp_path, "repeats = 5\n" + SMALL)).fingerprint == first
    assert load_suite(write(tmp_path, "seed = 1\n" + SMALL)).fingerprint != first


def test_a_model_that_is_not_there_is_refused(tmp_path):
    path = write(tmp_path, SMALL.replace('"target"', '"./target"'))
    with pytest.raises(ValueError, match=r"server\.model: \./target \(no such folder"):
        prepare(load_suite(path), path)


def test_an_engine_that_is_not_there_is_refused_with_the_command_that_builds_it(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    path = write(tmp_path, SMALL.replace('"engine"', '"./engine"'))
    with pytest.raises(ValueError, match="no such folder") as caught:
        prepare(load_suite(path), path)
    assert "vllm-domino build" in str(caught.value)
    assert "--build" in str(caught.value)


def test_an_unknown_variant_is_refused(tmp_path):
    path = write(tmp_path, SMALL)
    with pytest.raises(ValueError, match="it has none, domino-engine"):
        prepare(load_suite(path), path, only=["eagle"])


def test_flags_are_found_in_both_forms():
    assert flag(("--dtype", "float32", "--max-num-seqs=4"), "--max-num-seqs") == "4"
    assert flag(("--dtype", "float32"), "--dtype") == "float32"
    assert flag((), "--dtype") is None


def test_every_form_of_line_becomes_a_prompt(tmp_path):
    lines = [
        {"question": "q", "answer": "3"},
        {"prompt": "p"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "max_tokens": 7},
        {"custom_id": "1", "body": {"messages": [{"role": "user", "content": "batch"}]}},
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = DataSettings(source="own.jsonl", max_tokens=50, instruction="Think.")
    prompts = load_prompts(settings, tmp_path, Template(), 10)
    assert [p.text for p in prompts] == ["q\nThink.", "p\nThink.", "s|u", "batch"]
    assert [p.max_tokens for p in prompts] == [50, 50, 7, 50]
    assert prompts[0].answer == "3"
    assert load_prompts(settings, tmp_path, Template(), 2) == prompts[:2]
    assert prompts_digest(prompts) != prompts_digest(prompts[:2])
    thinking = load_prompts(settings.model_copy(update={"thinking": True}), tmp_path, Template(), 1)
    assert thinking[0].text.endswith("|think")


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "has no prompts"), ("{}\n", "line needs"), ("{\n", "not valid JSON"), (None, "cannot be read")],
)
def test_a_data_set_without_prompts_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "own.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_prompts(DataSettings(source="own.jsonl"), tmp_path, Template(), 4)


def test_known_sets_have_whole_revisions():
    assert len(KNOWN) == 8
    assert all(len(known.revision) == 40 for known in KNOWN.values())


@pytest.mark.parametrize(
    ("kind", "text", "answer", "right"),
    [
        ("gsm8k", "so 3 + 4 = 7\n#### 7", "7", True),
        ("gsm8k", "the answer is $1,200.", "1200", True),
        ("gsm8k", "\\boxed{18} dollars, in 3 days", "18", True),
        ("gsm8k", "#### 8", "7", False),
        ("gsm8k", "no idea", "7", False),
        ("boxed", "thus \\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", True),
        ("boxed", "\\boxed{070}", "70", True),
        ("boxed", "70", "70", False),
    ],
)
def test_grading(kind, text, answer, right):
    assert is_right(kind, text, answer) is right


def test_the_last_box_with_its_inner_braces():
    assert last_boxed("\\boxed{1} and \\boxed{a{b}c} end") == "a{b}c"
    assert last_boxed("\\boxed{open") is None


def test_the_committed_questions_are_whole():
    data = Path(__file__).parents[2] / "benchmarks" / "data"
    rows = [json.loads(line) for line in (data / "gsm8k-80.jsonl").read_text().splitlines()]
    assert len(rows) == 80
    assert all(row["question"] and float(row["answer"].replace(",", "")) is not None for row in rows)
    assert "MIT License" in (data / "LICENSE").read_text()
    assert tomllib.loads((SUITES / "tiny-cpu.toml").read_text())["data"][0]["source"].endswith(
        "gsm8k-80.jsonl"
    )


def test_an_engine_of_other_weights_is_stale(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from small_drafters import write_small_checkpoint

    from vllm_domino.bench import preflight
    from vllm_domino.config.checkpoint import read_checkpoint
    from vllm_domino.engine import manifest

    write_small_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "a.toml").write_text('checkpoint = "checkpoint"\n')
    variant = load_suite(write(tmp_path, SMALL)).variant[1]
    recorded = SimpleNamespace(fingerprint=read_checkpoint(tmp_path / "checkpoint").fingerprint)
    monkeypatch.setattr(manifest, "read_manifest", lambda _: recorded)
    assert not preflight._stale(variant, tmp_path / "engine", tmp_path)
    write_small_checkpoint(tmp_path / "checkpoint", seed=1)
    assert preflight._stale(variant, tmp_path / "engine", tmp_path)
    (tmp_path / "a.toml").unlink()
    assert not preflight._stale(variant, tmp_path / "engine", tmp_path)
