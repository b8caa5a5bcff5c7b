"""What a request may ask for works with speculation as it does without."""

import json

import pytest
from harness import BLOCK, MAX_LEN, Counters, generate, open_llm, tokens
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

GREEDY = {"temperature": 0, "max_tokens": 40}


@pytest.fixture
def both(plain, domino):
    """Ask both servers the same; nothing is compared before something was drafted."""

    def ask(prompts, params):
        before = Counters.of(domino)
        answers = generate(plain, prompts, params), generate(domino, prompts, params)
        assert Counters.of(domino).since(before).drafts > 0
        return answers

    return ask


@pytest.fixture(scope="module")
def prompts(chats):
    return chats[:6]


@pytest.fixture(scope="module")
def usual(plain, prompts):
    """Texts and ids that stop conditions are taken from."""
    return generate(plain, prompts, SamplingParams(**GREEDY, ignore_eos=True))


def _same(outputs):
    without, with_domino = outputs
    for a, b in zip(without, with_domino, strict=True):
        for one, other in zip(a.outputs, b.outputs, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            assert (one.text, one.finish_reason, one.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )
    return with_domino


def test_stop_strings(both, prompts, usual):
    stops = [output.outputs[0].text[n : n + 3] for n, output in zip(range(8, 32), usual, strict=False)]
    found = _same(both(prompts, [SamplingParams(**GREEDY, ignore_eos=True, stop=[stop]) for stop in stops]))
    assert {output.outputs[0].finish_reason for output in found} == {"stop"}
    assert [output.outputs[0].stop_reason for output in found] == stops


def test_stop_strings_kept_in_the_text(both, prompts, usual):
    stop = usual[0].outputs[0].text[12:15]
    params = SamplingParams(**GREEDY, ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
    found = _same(both(prompts, params))
    assert stop in found[0].outputs[0].text


def test_min_tokens(both, prompts, usual):
    """The token that would end an answer early is kept out until the minimum is reached."""
    early = [int(output.outputs[0].token_ids[4]) for output in usual]
    params = [SamplingParams(**GREEDY, min_tokens=20, stop_token_ids=[token]) for token in early]
    found = _same(both(prompts, params))
    assert all(len(output.outputs[0].token_ids) >= 20 for output in found)


def test_ignore_eos(both, plain, chats, tokenizer):
    """Continue answers that are complete: the first token is the end, and only `ignore_eos` goes past it."""
    complete = [[*chat, tokenizer.eos_token_id] for chat in chats[:3]]
    forced = {"temperature": 0, "max_tokens": 12, "allowed_token_ids": [tokenizer.eos_token_id]}
    ended = _same(both([*complete, chats[0]], [SamplingParams(**forced)] * 3 + [SamplingParams(**GREEDY)]))
    assert [output.outputs[0].finish_reason for output in ended[:3]] == ["stop"] * 3
    found = _same(both(complete, SamplingParams(**forced, ignore_eos=True)))
    assert tokens(found) == [[tokenizer.eos_token_id] * 12] * 3


def test_logprobs(both, prompts):
    without, with_domino = both(prompts, SamplingParams(**GREEDY, logprobs=5, prompt_logprobs=2))
    _same((without, with_domino))
    for a, b in zip(without, with_domino, strict=True):
        mine, theirs = b.outputs[0].logprobs, a.outputs[0].logprobs
        assert len(mine) == len(theirs) == len(b.outputs[0].token_ids)
        for one, other in zip(mine, theirs, strict=True):
            assert one.keys() == other.keys()
            for token in one:
                assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
        assert len(b.prompt_logprobs) == len(b.prompt_token_ids)


def test_four_answers_to_one_prompt(plain, domino, prompts):
    """Four samples of a seed differ and come again; their first tokens are those without speculation (see `test_seeds`
    for the later ones)."""
    params = SamplingParams(temperature=2, max_tokens=24, n=4, seed=11)
    first, again, without = (generate(llm, [prompts[0]], params)[0] for llm in (domino, domino, plain))
    answers = [tuple(sample.token_ids) for sample in first.outputs]
    assert len(set(answers)) == 4
    assert answers == [tuple(sample.token_ids) for sample in again.outputs]
    assert [answer[0] for answer in answers] == [sample.token_ids[0] for sample in without.outputs]


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1.5}, {"frequency_penalty": 0.9}, {"repetition_penalty": 1.4}]
)
def test_penalties(both, prompts, usual, penalty):
    found = _same(both(prompts, SamplingParams(**GREEDY, **penalty)))
    assert tokens(found) != tokens(usual), "the penalty changed nothing, so nothing was tested"


def test_json_schema(both, prompts):
    schema = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["dollars", "eggs", "hours"]},
            "digits": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4},
            "sure": {"type": "boolean"},
        },
        "required": ["unit", "digits", "sure"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        temperature=0, max_tokens=100, structured_outputs=StructuredOutputsParams(json=schema)
    )
    for output in _same(both(prompts, params)):
        answer = json.loads(output.outputs[0].text)
        assert set(answer) == {"unit", "digits", "sure"}
        assert answer["unit"] in {"dollars", "eggs", "hours"}


def test_seeds(plain, domino, prompts):
    """A seed gives the same answer again, whatever else is in the batch. Its first token is that without speculation;
    later ones need not be, since drafts that are verified use up the seed's random numbers differently: vLLM's own
    speculation does the same."""
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=50, max_tokens=24, seed=seed) for seed in range(6)
    ]
    together = tokens(generate(domino, prompts, params))
    alone = tokens(generate(domino, prompts, params, concurrency=1))
    assert together == alone
    without = tokens(generate(plain, prompts, params))
    assert [answer[0] for answer in together] == [answer[0] for answer in without]
    other = [SamplingParams(temperature=0.9, max_tokens=24, seed=seed) for seed in range(100, 106)]
    assert tokens(generate(domino, prompts, other)) != together


def test_abort_in_mid_stream(domino, prompts, usual):
    """Requests that go away take nothing with them: the others' answers, and those of later requests, are the same."""
    llm_engine = domino.llm_engine
    params = SamplingParams(**GREEDY, ignore_eos=True)
    for name, prompt in zip("abcdef", prompts, strict=True):
        llm_engine.add_request(f"abort-{name}", {"prompt_token_ids": prompt}, params)
    partial, done = {}, {}
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            held = list(output.outputs[0].token_ids)
            partial[output.request_id] = held
            if output.finished:
                done[output.request_id] = held
        for name in "bd":
            if partial.get(f"abort-{name}") and f"abort-{name}" not in done:
                llm_engine.abort_request([f"abort-{name}"])
    expected = dict(zip((f"abort-{name}" for name in "abcdef"), tokens(usual), strict=True))
    for name in "acef":
        assert done[f"abort-{name}"] == expected[f"abort-{name}"]
    for name in "bd":
        held = partial[f"abort-{name}"]
        assert held == expected[f"abort-{name}"][: len(held)]
    assert tokens(generate(domino, prompts, params)) == tokens(usual)


def test_a_prompt_that_fills_the_length(both, plain, domino, chats):
    text = [token for chat in chats for token in chat]
    full = [text[: MAX_LEN - 1], text[100 : 100 + MAX_LEN - 2], text[200 : 200 + MAX_LEN - 9]]
    found = _same(both(full, SamplingParams(temperature=0, max_tokens=99, ignore_eos=True)))
    assert [len(tokens_) for tokens_ in tokens(found)] == [1, 2, 9]
    assert [output.outputs[0].finish_reason for output in found] == ["length"] * 3
    for llm in (plain, domino):
        with pytest.raises(VLLMValidationError, match=f"maximum context length is {MAX_LEN}"):
            generate(llm, [text[: MAX_LEN + 1]], SamplingParams(max_tokens=1))


def test_bfloat16_target_with_the_fp32_engine(engine, reference, runs):
    """ONNX Runtime has no bf16 kernels on a CPU: features and tables are cast at the edge."""
    from harness import speculative
    from reference import mean_acceptance

    with open_llm(speculative(engine, BLOCK), dtype="bfloat16") as llm:
        before = Counters.of(llm)
        answers = generate(
            llm,
            [run.prompt for run in runs[:16]],
            SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
        )
        counted = Counters.of(llm).since(before)
    assert all(len(ids) == 48 for ids in tokens(answers))
    assert counted.failures == 0
    assert counted.acceptance_length > 0.85 * mean_acceptance(runs[:16])
