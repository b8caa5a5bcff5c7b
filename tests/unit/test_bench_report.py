"""Reports of a hand-made result; the page in a real browser where one is installed."""

import csv
import io
import re
import shutil
import subprocess

import pytest
from bench_results import TOY, make_result

from vllm_domino.bench.report import to_csv, to_html, to_markdown
from vllm_domino.bench.result import Failure

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def result():
    failure = Failure(
        variant="eagle3", repeat=0, phase="start", message="log\nRuntimeError: <no> such kernel"
    )
    made = make_result(TOY, failures=[failure])
    made.suite["variant"].append({"name": "eagle3"})
    return made


@pytest.fixture(scope="module")
def page(result) -> str:
    pytest.importorskip("matplotlib")
    return to_html(result, "toy.json")


def test_markdown_names_leader_crossover_and_failure(result):
    text = to_markdown(result, "toy.json")
    assert "Concurrency 1: domino-engine leads with 250.5 tokens/s, 2.48 × plain." in text
    assert re.search(r"domino-engine no longer pays from concurrency 1\d\.\d on", text)
    assert "eagle3, repeat 1 (start): RuntimeError: <no> such kernel" in text
    assert "c0ffee" in text
    assert "over the plain server's 100 MB, in MB: dflash +0, domino-engine +0." in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith(("| none", "| variant"))}
    assert len(widths) == 2  # the two tables


def test_csv_has_a_line_per_cell(result):
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert len(rows) == 9
    assert {"variant", "concurrency", "output_tokens_per_s", "acceptance_length", "ttft_ms_p99"} <= rows[
        0
    ].keys()


def test_the_page_holds_everything_itself(page):
    assert page.count("<svg") == 5
    assert "<script" not in page
    assert "default-src 'none'" in page
    # names of SVG's own XML vocabularies are identifiers, not addresses that a browser asks
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", page))
    assert all(address.startswith("http://www.w3.org/") for address in addresses)
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page)
    assert "RuntimeError: &lt;no&gt; such kernel" in page


def test_ids_of_plots_do_not_collide(page):
    ids = re.findall(r'<clipPath id="([^"]+)"', page)
    assert ids
    assert len(ids) == len(set(ids))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install it to look at the page in a browser")
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)], ids=["phone", "desktop"])
def test_the_page_in_a_browser(page, tmp_path, width, height):
    """Nothing is wider than the window, nothing is fetched, and the picture is not blank."""
    # Headless Chromium has no window narrower than 500 px: a frame of the wanted width stands in for the phone.
    probe = (
        "<script>addEventListener('load',()=>{const d=document.documentElement;"
        "const svg=[...document.querySelectorAll('figure svg')].map(s=>Math.round(s.getBoundingClientRect().width));"
        "parent.postMessage(JSON.stringify([d.scrollWidth,d.clientWidth,svg,"
        "performance.getEntriesByType('resource').length]),'*')})</script>"
    )
    allowed = page.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    (tmp_path / "page.html").write_text(allowed.replace("</body>", probe + "</body>"))
    (tmp_path / "frame.html").write_text(
        f"<body style='margin:0'><iframe src='page.html' style='border:0' width={width} height={height}></iframe>"
        "<pre id=out></pre><script>addEventListener('message',e=>{document.getElementById('out').textContent="
        "'FOUND'+e.data+'END'})</script>"
    )
    base = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    base += ["--virtual-time-budget=5000", f"--window-size={max(width, 500)},{height}"]
    address = (tmp_path / "frame.html").as_uri()
    dump = subprocess.run(
        [*base, "--dump-dom", address], capture_output=True, text=True, timeout=180, check=True
    )
    found = re.search(r"FOUND\[(\d+),(\d+),\[([\d,]*)\],(\d+)\]END", dump.stdout)
    assert found, dump.stdout[-500:]
    scroll, client, resources = int(found[1]), int(found[2]), int(found[4])
    widths = [int(w) for w in found[3].split(",")]
    assert scroll <= client <= width
    assert resources == 0
    assert len(widths) == 5
    assert all(250 < w <= width for w in widths)
    shot = tmp_path / "shot.png"
    subprocess.run([*base, f"--screenshot={shot}", address], capture_output=True, timeout=180, check=True)
    pixels = pytest.importorskip("PIL.Image").open(shot).convert("L").getcolors()
    assert pixels is not None
    assert len(pixels) > 20
