"""A real `vllm serve` with a real HTTP client: what a user of the engine sees."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from harness import MAX_LEN, SERVER_ENVIRONMENT, TARGET, environment_before_vllm, generate, speculative
from prompts import questions
from vllm import SamplingParams

from vllm_domino.bench.server import ServerSpec, VllmServer

MAX_TOKENS = 40
BODY = {"model": "tiny", "max_tokens": MAX_TOKENS, "temperature": 0}


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    spec = ServerSpec(
        model=str(TARGET),
        speculative=speculative(engine, 15),
        args=(
            *("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", str(MAX_LEN)),
            *("--max-num-seqs", "32", "--enforce-eager", "--disable-uvicorn-access-log"),
        ),
        env=SERVER_ENVIRONMENT,
    )
    running = VllmServer(spec, tmp_path_factory.mktemp("serve") / "server.log")
    with environment_before_vllm():
        running.start()
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=300.0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(plain, chats):
    """Text and number of tokens of every answer, without speculation and without HTTP."""
    outputs = generate(plain, chats, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    return [(output.outputs[0].text, len(output.outputs[0].token_ids)) for output in outputs]


def _messages(question):
    return [{"role": "user", "content": question}]


def _chat(client, question):
    reply = (
        client.post("/v1/chat/completions", json=BODY | {"messages": _messages(question)})
        .raise_for_status()
        .json()
    )
    return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]


def _stream(client, path, body):
    """Pieces of a streamed answer, and its usage."""
    pieces, usage = [], None
    body = BODY | body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            pieces += [c.get("text") or (c.get("delta") or {}).get("content") or "" for c in event["choices"]]
    return [piece for piece in pieces if piece], usage


@pytest.mark.parametrize("at_once", [1, 4, 32])
def test_chats_at_once(server, client, expected, at_once):
    before = server.metrics()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda question: _chat(client, question), questions()[: max(8, at_once)]))
    assert answers == expected[: len(answers)]
    counted = server.metrics().since(before)
    assert counted.drafts > 0
    assert counted.accepted > 0
    assert counted["vllm:generation_tokens_total"] == sum(tokens for _, tokens in answers)
    assert counted.acceptance_length > 1


def test_streamed_chat(client, expected):
    pieces, usage = _stream(client, "/v1/chat/completions", {"messages": _messages(questions()[0])})
    assert "".join(pieces) == expected[0][0]
    assert usage["completion_tokens"] == expected[0][1]
    assert len(pieces) > 1


def test_completion_and_its_stream(client, expected, chats):
    body = {"prompt": chats[1]}
    reply = client.post("/v1/completions", json=BODY | body).raise_for_status().json()
    assert reply["choices"][0]["text"] == expected[1][0]
    pieces, usage = _stream(client, "/v1/completions", body)
    assert "".join(pieces) == expected[1][0]
    assert usage["completion_tokens"] == expected[1][1]


def test_metrics_show_drafts_by_position(server, client, expected):
    _chat(client, questions()[2])
    counted = server.metrics()
    assert sorted(counted.accepted_per_position) == list(range(15))
    assert sum(counted.accepted_per_position.values()) == counted.accepted
    assert counted["vllm:spec_decode_num_draft_tokens_total"] <= 15 * counted.drafts


def test_a_client_that_hangs_up(server, client, expected):
    """Its request ends, and the answers of others are what they were."""
    body = BODY | {
        "messages": _messages(questions()[3]),
        "stream": True,
        "max_tokens": 400,
        "ignore_eos": True,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    answers = [_chat(client, question) for question in questions()[:2]]
    assert answers == expected[:2]
    for _ in range(100):
        now = server.metrics()
        if now["vllm:num_requests_running"] == 0:
            break
    assert now["vllm:num_requests_running"] == 0
    server.check_alive()
