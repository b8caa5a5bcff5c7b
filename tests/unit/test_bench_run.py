"""A suite from start to end on a stand-in for `vllm`: order, resumption, failures, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_domino.bench import client, preflight, server
from vllm_domino.bench.client import Load, client_command
from vllm_domino.bench.datasets import Prompt
from vllm_domino.bench.provenance import command_line
from vllm_domino.bench.result import load_result
from vllm_domino.bench.run import SuiteRun, rotated
from vllm_domino.bench.suite import load_suite

# Serves what the harness asks a server for; `bench serve` answers every prompt with its own text and counts them.
FAKE = """\
#!{python}
import http.server, json, os, sys, time, urllib.request
from pathlib import Path
argv = sys.argv
option = lambda name: argv[argv.index(name) + 1]
if argv[1] == "serve":
    with open({journal!r}, "a") as journal:
        journal.write(("plain" if "--speculative-config" not in argv else option("--speculative-config")) + "\\n")
    if "broken" in " ".join(argv):
        sys.exit("RuntimeError: this variant cannot start")
    state = {{"tokens": 0, "drafts": 0}}
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = json.dumps({{"data": [{{"id": "m"}}]}})
            if self.path == "/metrics":
                text = "vllm:generation_tokens_total %d\\nvllm:spec_decode_num_drafts_total %d\\n" % (
                    state["tokens"], state["drafts"])
                text += "vllm:spec_decode_num_accepted_tokens_total %d\\n" % (2 * state["drafts"])
            self.reply(text)
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state["tokens"] += 5
            state["drafts"] += 1 if "--speculative-config" in argv else 0
            self.reply(json.dumps({{"text": body["prompt"]}}))
        def reply(self, text):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())
        def log_message(self, *args):
            pass
    http.server.ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
assert argv[1:3] == ["bench", "serve"]
time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
prompts = [json.loads(line)["prompt"] for line in Path(option("--dataset-path")).read_text().splitlines()]
for prompt in prompts:
    body = json.dumps({{"prompt": prompt}}).encode()
    urllib.request.urlopen(urllib.request.Request(option("--base-url") + "/v1/completions", body)).read()
n = len(prompts)
result = dict(duration=0.5, total_output_tokens=5 * n, errors=[""] * n, generated_texts=["#### 18"] * n,
              input_lens=[3] * n, output_lens=[5] * n,
              ttfts=[0.01] * n, latencies=[0.1] * n, start_times=[float(i) for i in range(n)])
Path(option("--result-dir"), option("--result-filename")).write_text(json.dumps(result))
"""
SUITE = """
concurrency = [1, 2]
repeats = 2
warmup = 1
[server]
model = "./target"
[[data]]
source = "questions.jsonl"
prompts = 2
grade = "gsm8k"
[[variant]]
name = "none"
[[variant]]
name = "ngram"
speculative = { method = "ngram", num_speculative_tokens = 3 }
[[variant]]
name = "broken"
speculative = { method = "broken", num_speculative_tokens = 3 }
"""


class Template:
    chat_template = "there"

    def apply_chat_template(self, messages, **_):
        return messages[0]["content"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """A folder with a suite, and `vllm` replaced."""
    fake = tmp_path / "vllm"
    fake.write_text(FAKE.format(python=sys.executable, journal=str(tmp_path / "journal")))
    fake.chmod(0o755)
    for module in (server, client):
        monkeypatch.setattr(module, "find_vllm", lambda: str(fake))
    monkeypatch.setattr(server, "preloads", dict, raising=False)
    monkeypatch.setattr(preflight, "_tokenizer", lambda *_: Template())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    rows = [{"question": f"q{i}", "answer": "18"} for i in range(4)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "toy.toml").write_text(SUITE)
    return tmp_path


def open_run(place: Path, only=(), **changes) -> SuiteRun:
    path = place / "toy.toml"
    said: list[str] = []
    plan = preflight.prepare(load_suite(path), path, only)
    run = SuiteRun.open(plan, place / "results", place / "work", say=said.append, **changes)
    run.said = said
    return run


def started(place: Path) -> int:
    return len((place / "journal").read_text().splitlines())


def test_all_cells_are_measured_and_a_broken_variant_is_reported(place):
    run = open_run(place)
    result = run.execute()
    assert result.finished
    assert [(c.variant, c.concurrency, c.repeats) for c in result.cells] == [
        ("none", 1, 2), ("none", 2, 2), ("ngram", 1, 2), ("ngram", 2, 2),
    ]  # fmt: skip
    assert {f.variant: f.phase for f in result.failures} == {"broken": "start"}
    assert "this variant cannot start" in result.failures[0].message
    assert started(place) == 5  # a server that did not start is not tried again
    cell = result.cells[2]
    assert (cell.acceptance_length, cell.equal_outputs, cell.accuracy, cell.tokens_match) == (
        3.0,
        1.0,
        1.0,
        True,
    )
    assert cell.rss_bytes > 0
    assert load_result(run.path).cells == result.cells


def test_warm_up_is_not_counted(place):
    result = open_run(place, only=["ngram"], repeats=1).execute()
    assert all(r.counters.drafts == 2 and r.counters.generated == 10 for r in result.runs)


def test_finished_cells_are_kept(place):
    first = open_run(place, only=["none"], repeats=1)
    result = first.execute()
    assert not result.finished
    assert started(place) == 1
    again = open_run(place, repeats=1)
    assert again.path == first.path
    whole = again.execute()
    assert whole.finished
    assert started(place) == 3
    assert whole.runs[:2] == result.runs
    more = open_run(place)  # the suite's two repeats
    assert more.path == first.path
    assert len(more.execute().runs) == 8
    assert open_run(place).path != first.path  # nothing is missing any more


def test_other_prompts_start_a_new_result(place):
    first = open_run(place, only=["none"], repeats=1)
    first.execute()
    (place / "questions.jsonl").write_text('{"question": "other"}\n')
    assert open_run(place, repeats=1).path != first.path
    assert open_run(place, repeats=1, fresh=True).path != first.path


def test_a_taken_port_is_replaced(place):
    port = server.free_port()
    (place / "toy.toml").write_text(SUITE.replace('model = "./target"', f'model = "./target"\nport = {port}'))
    blocker = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], cwd=place
    )
    try:
        time.sleep(2)
        run = open_run(place, only=["none"], repeats=1)
        assert len(run.execute().cells) == 2
        assert any(f"port {port} is taken" in line for line in run.said)
    finally:
        blocker.kill()
        blocker.wait()


def test_ctrl_c_leaves_no_server_and_keeps_cells(place, monkeypatch):
    run = open_run(place, only=["none"], repeats=2)
    measured = []

    def interrupted(*arguments):
        if measured:
            raise KeyboardInterrupt
        measured.append(real(*arguments))
        return measured[0]

    from vllm_domino.bench import run as module

    real = module.run_client
    monkeypatch.setattr(module, "run_client", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.execute()
    assert len(load_result(run.path).runs) == 1
    found = subprocess.run(["pgrep", "-f", f"{place}/vllm serve"], capture_output=True, text=True)
    assert found.stdout == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_client_gets_the_same_requests_in_the_same_order():
    load = Load([Prompt("a", 4)] * 3, 2, 0.0, 0, "tok")
    command = client_command("http://127.0.0.1:1", "m", load, Path("/p.jsonl"), Path("/out/r.json"))
    assert command[1:3] == ["bench", "serve"]
    assert {"--disable-shuffle", "--skip-chat-template", "--no-oversample", "--save-detailed"} <= set(command)
    assert command[command.index("--max-concurrency") + 1] == "2"
    assert json.loads(command[command.index("--extra-body") + 1]) == {"add_special_tokens": False}
    seeded = client_command("u", "m", Load(load.prompts, 2, 1.0, 7, "tok"), Path("/p"), Path("/r"))
    assert json.loads(seeded[seeded.index("--extra-body") + 1])["seed"] == 7


def test_the_order_of_variants_rotates():
    assert [rotated(["a", "b", "c"], repeat) for repeat in range(4)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip


def test_a_recorded_command_names_no_folder_of_its_machine(monkeypatch):
    typed = [
        "/home/me/bin/vllm-domino",
        "bench",
        "run",
        "suites/a.toml",
        "--results",
        "/home/me/r",
        "--work=/tmp/w",
    ]
    monkeypatch.setattr("sys.argv", typed)
    assert command_line() == "vllm-domino bench run suites/a.toml --results r --work=w"
