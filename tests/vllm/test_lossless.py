"""Speculation must not change what the target says: greedy token for token, sampled in distribution."""

import pytest
import torch
from harness import (
    MAX_LEN,
    V2,
    Counters,
    Trace,
    chi_square_p,
    generate,
    open_llm,
    proposer_of,
    speculative,
    tokens,
)
from prompts import sized_prompts
from vllm import SamplingParams

MAX_TOKENS = 24
ALPHA = 1e-3  # chance that a right sampler fails one of the chi-square tests; the seed is fixed, so it is drawn once
SAMPLES = 20_480


@pytest.fixture(scope="module")
def prompts(chats):
    return sized_prompts(chats)


@pytest.fixture(scope="module")
def params(prompts):
    return [
        SamplingParams(temperature=0, max_tokens=min(MAX_TOKENS, MAX_LEN - len(prompt)), ignore_eos=True)
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def expected(plain, prompts, params):
    return tokens(generate(plain, prompts, params))


@pytest.mark.parametrize("num_tokens", [15, 4, 1])
def test_greedy_output_is_the_target_s_at_every_concurrency(served, prompts, params, expected, num_tokens):
    llm = served(num_tokens)
    assert {len(p) for p in prompts} >= {1, MAX_LEN - 1}
    for concurrency in (1, 8, 32):
        llm.reset_prefix_cache()
        before = Counters.of(llm)
        found = tokens(generate(llm, prompts, params, concurrency=concurrency))
        counted = Counters.of(llm).since(before)
        different = [i for i in range(len(prompts)) if found[i] != expected[i]]
        assert not different, f"concurrency {concurrency}: {len(different)} of {len(prompts)} outputs differ"
        assert counted.drafts > len(prompts)
        assert counted.failures == 0


@pytest.mark.v2
def test_draft_tokens_by_load(engine, plain, prompts, params, tmp_path):
    """vLLM's own schedule: a step asks for the draft tokens of its batch size and gets just as many, or none."""
    if V2:
        prompts, params = prompts[::8], params[::8]
    expected = tokens(generate(plain, prompts, params))
    trace = Trace(tmp_path / "drafts.jsonl")
    schedule = [[1, 1, 15], [2, 4, 7], [5, 7, 3], [8, 32, 0]]
    spec = speculative(engine) | {"num_speculative_tokens_per_batch_size": schedule}
    with open_llm(spec, trace=trace.path) as llm:
        before = Counters.of(llm)
        assert tokens(generate(llm, prompts, params, concurrency=8)) == expected
        assert tokens(generate(llm, prompts[-1:], params[-1:])) == expected[-1:]
        counted = Counters.of(llm).since(before)
    assert {len(drafts) for _, _, drafts in trace.take()} == {3, 7, 15}
    assert counted.failures == 0
    assert counted.acceptance_length > 1


class Remembering:
    """A session that drafts once for every anchor that follows the prompt: all samples share that context. After the
    second token, where every request ends, it drafts nothing of use."""

    def __init__(self, session, position):
        self._session, self._position = session, position
        self.known = {}

    def __getattr__(self, name):
        return getattr(self._session, name)

    def draft(self, anchor_ids, anchor_positions, context_kv, context_lengths, out):
        out.zero_()
        for row, (anchor, position) in enumerate(
            zip(anchor_ids.tolist(), anchor_positions.tolist(), strict=True)
        ):
            if position != self._position:
                continue
            if anchor not in self.known:
                one = slice(row, row + 1)
                inputs = (anchor_ids[one], anchor_positions[one], context_kv[one], context_lengths[one])
                self.known[anchor] = torch.zeros_like(out[one])
                self._session.draft(*inputs, self.known[anchor])
            out[row] = self.known[anchor][0]


def test_sampled_tokens_follow_the_target_s_distribution(served, reference, chats, monkeypatch):
    """First and second token at temperature 1 against probabilities from Transformers.

    The first token comes from the prefill, the second from verifying drafts: accepted where it equals the draft,
    else drawn from what is left. Given the most frequent first token, the second is tested alone too, since there the
    draft is one and the same, so that an error of its acceptance cannot average out.
    """
    # two full pages and a token: all but the last token come from the prefix cache
    llm, prompt, each = served(4), chats[0][:65], 512
    step = proposer_of(llm).model.step
    monkeypatch.setattr(step, "session", Remembering(step.session, len(prompt)))
    torch.manual_seed(1)  # requests without a seed draw from torch's own generator, that of this process
    before = Counters.of(llm)
    outputs = generate(
        llm,
        [prompt] * (SAMPLES // each),
        SamplingParams(temperature=1, max_tokens=2, n=each, ignore_eos=True),
    )
    assert Counters.of(llm).since(before).drafts >= SAMPLES
    pairs = torch.tensor([list(sample.token_ids) for output in outputs for sample in output.outputs])
    assert pairs.shape == (SAMPLES, 2)

    first = reference.probabilities(prompt)
    size = len(first)
    assert chi_square_p(torch.bincount(pairs[:, 0], minlength=size), first) > ALPHA
    after = _next_probabilities(
        reference.target, prompt, size
    )  # [V, V]: row t is the distribution after token t
    assert chi_square_p(torch.bincount(pairs[:, 1], minlength=size), first @ after) > ALPHA
    common = int(first.argmax())
    given = pairs[pairs[:, 0] == common, 1]
    assert chi_square_p(torch.bincount(given, minlength=size), after[common]) > ALPHA


@torch.inference_mode()
def _next_probabilities(target, prompt, size, chunk=512):
    rows = []
    for start in range(0, size, chunk):
        ids = torch.arange(start, min(start + chunk, size)).unsqueeze(1)
        cache = target(torch.tensor([prompt]), use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(ids))
        logits = target(ids, past_key_values=cache, use_cache=True).logits[:, -1]
        rows.append(torch.softmax(logits.double(), -1))
    return torch.cat(rows)
