"""Prompts, regenerated data and batches: what is read, what is refused, what a killed run leaves behind."""

import gzip
import json
import random
import re

import pytest
import torch

from vllm_domino.plugin.generate import read_done
from vllm_domino.train.data import Sample, pad_batch
from vllm_domino.train.eagle3 import step_weights
from vllm_domino.train.evaluate import summarize
from vllm_domino.train.recipe import DrafterRecipe, parse_changes
from vllm_domino.train.regenerate import messages_of, read_prompts
from vllm_domino.train.replay import replay_rounds
from vllm_domino.train.smollm2 import code_questions
from vllm_domino.train.tiny import METHODS, card, other_numbers, recipe_of
from vllm_domino.train.tokenizer import MASK, train_tokenizer


@pytest.mark.parametrize(
    "row",
    [
        {"question": "How many?", "answer": "3"},
        {"prompt": "How many?"},
        {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "3"}]},
        {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "3"}]},
    ],
)
def test_every_prompt_layout_gives_the_same_messages(row):
    assert messages_of(row) == [{"role": "user", "content": "How many?"}]


def test_broken_prompt_lines_are_named_and_skipped_or_stop(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "a"}\n{"nothing": 1}\n[1, 2\n{"prompt": "b"}\n')
    prompts, broken = read_prompts(path)
    assert [prompt[0]["content"] for prompt in prompts] == ["a", "b"]
    assert "prompts.jsonl:2" in broken[0]
    assert "prompts.jsonl:3" in broken[1]
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2.*--strict"):
        read_prompts(path, strict=True)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no usable line"):
        read_prompts(tmp_path / "empty.jsonl")


def test_a_line_cut_short_by_a_kill_is_asked_again(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "r0", "response_token_ids": [1]}\n{"id": "r1", "respo')
    assert read_done(path) == {"r0"}
    assert path.read_text() == '{"id": "r0", "response_token_ids": [1]}\n'


def test_padding_and_loss_mask():
    ids, mask = pad_batch(
        [Sample(ids=(5, 6, 7), prompt_length=2), Sample(ids=(8, 9), prompt_length=1)], pad=0
    )
    assert ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert mask.int().tolist() == [[0, 0, 1], [0, 1, 0]]


def test_replayed_rounds_by_hand():
    """Prompt of 1, answer 10 11 12 13 14; drafts right at anchor 1 (two of two), wrong at anchor 4."""
    tokens = [9, 10, 11, 12, 13, 14]
    drafts = torch.tensor([[11, 12], [0, 0], [0, 0], [0, 14]])
    assert replay_rounds(drafts, tokens, 1, stop_ids=[14]) == [2, 0]
    figures = summarize([2, 0], 2)
    assert figures == {"acceptance_length": 2.0, "per_position": [0.5, 0.5], "rounds": 2}


def test_the_last_token_of_a_cut_answer_is_a_bonus_and_a_stop_token_a_draft():
    tokens, drafts = [9, 10, 11], torch.tensor([[11, 12]])
    assert replay_rounds(drafts, tokens, 1, stop_ids=[11]) == [1]
    assert replay_rounds(drafts, tokens, 1, stop_ids=[]) == [0]


def test_eagle_weights_by_hand():
    """Step j at index t reads token t+1 and predicts token t+2+j; both ends must be response tokens."""
    mask = torch.tensor([[False, False, True, True, True]])
    weights = step_weights(mask, 2)[0]
    assert weights[:, 0].tolist() == pytest.approx([0, 1, 1, 0, 0])
    assert weights[:, 1].tolist() == pytest.approx([0, 0.8, 0, 0, 0])


def test_changes_are_typed_and_bare_words_are_text():
    values = parse_changes(
        ["steps=5", "learning_rate=6e-4", "target_layer_ids=[0, 1]", "method=dflash", "curriculum=false"]
    )
    assert values == {
        "steps": 5,
        "learning_rate": 6e-4,
        "target_layer_ids": [0, 1],
        "method": "dflash",
        "curriculum": False,
    }
    recipe = DrafterRecipe.read(None, values)
    assert (recipe.target_layer_ids, recipe.has_head) == ((0, 1), False)
    with pytest.raises(ValueError, match="--set field=value"):
        parse_changes(["steps"])


def test_recipe_files_are_toml(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('method = "domino"\nsteps = 7\n')
    assert DrafterRecipe.read(path, {"seed": 3}).steps == 7
    assert DrafterRecipe.read(path, {"seed": 3}).fingerprint() != DrafterRecipe.read(path).fingerprint()


def test_the_tokenizer_has_its_size_its_template_and_single_digits():
    words = ["".join(random.Random(n).choices("abcdefgh", k=6)) for n in range(200)]
    text = " ".join(f"{word} 48/2 = <<48/2=24>>24" for word in words)
    tokenizer = train_tokenizer([text], vocab_size=290)
    assert len(tokenizer) == 290
    assert tokenizer.mask_token == MASK
    assert tokenizer.mask_token_id == 289
    assert tokenizer.decode(tokenizer("48/2 = <<48/2=24>>24")["input_ids"]) == "48/2 = <<48/2=24>>24"
    assert len(tokenizer("4826")["input_ids"]) == 4
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="--vocab-size"):
        train_tokenizer(["too little text"], vocab_size=4096)


def test_the_shipped_recipes_differ_in_the_drafter_alone():
    recipes = {method: recipe_of(method) for method in METHODS}
    assert recipes["domino"].steps == recipes["dflash"].steps == recipes["eagle3"].steps
    assert recipes["domino"].seed == recipes["dflash"].seed
    assert recipes["domino"].num_hidden_layers == recipes["dflash"].num_hidden_layers


def test_a_variation_of_a_question_differs_in_its_digits_alone():
    question = [{"role": "user", "content": "Ann has 48 pens and 5 boxes of 120. How many pens has she?"}]
    found = other_numbers(question)
    assert found == other_numbers(question)  # the same in every run
    assert found != question
    (text,) = (message["content"] for message in found)
    assert re.sub(r"\d", "0", text) == re.sub(r"\d", "0", question[0]["content"])
    assert all(number[0] != "0" for number in re.findall(r"\d+", text))


def test_humaneval_prompts_become_requests(tmp_path):
    line = json.dumps({"task_id": "HumanEval/0", "prompt": "def one():\n    pass\n"}) + "\n"
    (tmp_path / "code.jsonl").write_text(line)
    (tmp_path / "code.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    expected = ["Complete this Python function:\n```python\ndef one():\n    pass\n```"]
    assert code_questions(tmp_path / "code.jsonl") == expected
    assert code_questions(tmp_path / "code.jsonl.gz") == expected


def test_cards_name_steps_seed_and_hash(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    facts = {"steps": 5, "seconds": 2.0, "tokens_per_s": 10.0}
    text = card("domino", tmp_path, facts, json.loads('{"seed": 4}'), "abc")
    assert "| steps | 5 |" in text
    assert "| seed | 4 |" in text
    assert "SHA-256 abc" in text
