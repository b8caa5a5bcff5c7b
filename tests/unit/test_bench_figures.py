"""Figures by closed form: acceptance from counters, speedups, intervals, crossover, memory, comparison."""

import math

import pytest
from bench_results import TOY, make_result, make_run

from vllm_domino.bench.compare import caveats, compare_results, to_markdown, verdict
from vllm_domino.bench.memory import tree_file_bytes, tree_memory
from vllm_domino.bench.result import Counters, load_result, save_result
from vllm_domino.bench.server import Metrics
from vllm_domino.bench.statistics import Ratio, crossover, half_width, percentile, ratio
from vllm_domino.bench.summary import equal_share, pooled_acceptance, summarize

BEFORE = """
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0.0
vllm:generation_tokens_total{engine="0"} 19.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 7.0
vllm:iteration_tokens_total_count{engine="0"} 11.0
"""
AFTER = (
    BEFORE.replace(" 10.0", " 110.0").replace(" 30.0", " 330.0").replace(" 9.0\n", " 159.0\n")
    .replace('position="0"} 6.0', 'position="0"} 86.0').replace('position="1"} 3.0', 'position="1"} 53.0')
    .replace('position="2"} 0.0', 'position="2"} 20.0').replace(" 19.0", " 269.0").replace(" 11.0", " 121.0")
)  # fmt: skip


def test_acceptance_comes_from_the_difference_of_counters():
    counters = Counters.of(Metrics.parse(AFTER).since(Metrics.parse(BEFORE)), None)
    assert counters.drafts == 100
    assert counters.acceptance_length == 1 + 150 / 100
    assert counters.accepted_per_position == [80, 50, 20]
    assert sum(counters.accepted_per_position) == counters.accepted
    assert (counters.generated, counters.steps) == (250, 110)
    run = make_run("dflash", 1, 10.0, counters=counters)
    length, shares = pooled_acceptance([run, run])
    assert length == 2.5
    assert shares == [0.8, 0.5, 0.2]


def test_pooling_weighs_by_steps_not_by_runs():
    runs = [make_run("dflash", 1, 10.0, drafts=0), make_run("dflash", 1, 10.0, drafts=8)]
    assert pooled_acceptance(runs)[0] == 3.0
    assert pooled_acceptance(runs[:1]) == (None, [])


def test_a_cell_from_two_repeats():
    cells = {(c.variant, c.concurrency): c for c in make_result(TOY).cells}
    cell = cells["domino-engine", 1]
    assert cell.samples == [250.0, 251.0]
    assert cell.speedup == pytest.approx(250.5 / 101)
    assert cell.speedup_low < cell.speedup < cell.speedup_high
    assert cell.acceptance_length == 3.0
    assert cell.draft_ms == pytest.approx(1.0)
    assert cell.output_lengths.model_dump() == {"mean": 20.0, "min": 10, "max": 30}
    assert (cell.equal_outputs, cell.accuracy, cell.tokens_match) == (1.0, 0.5, True)
    assert cells["none", 4].speedup is None
    assert cells["dflash", 1].draft_ms is None


def test_client_and_server_must_count_alike():
    result = make_result(TOY)
    result.runs[0].client_output_tokens = 39
    assert not summarize(result)[0].tokens_match


def test_outputs_that_differ_are_counted():
    plain, other = make_run("none", 1, 10.0), make_run("dflash", 1, 10.0)
    other.requests.text_sha[1] = "cc"
    assert equal_share([other], plain) == 0.5


def test_percentiles_and_intervals():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([5], 99) == 5
    assert half_width([10.0]) is None
    assert half_width([9.0, 10.0, 11.0]) == pytest.approx(4.303 / math.sqrt(3))


def test_noise_rule():
    assert ratio([100, 101, 99], [100, 102, 98]).within_noise
    assert not ratio([120, 121, 119], [100, 102, 98]).within_noise
    assert ratio([120], [100]).within_noise is None
    assert "cannot say" in verdict(Ratio(1.2, None, None))
    assert verdict(Ratio(1.01, 0.99, 1.03)).endswith("within the noise")
    assert "noise" not in verdict(Ratio(1.2, 1.1, 1.3))


def test_crossover_lies_between_the_rungs():
    assert crossover({1: 2.0, 4: 0.5}) == pytest.approx(2.0)
    assert crossover({1: 2.0, 4: 1.5}) is None
    assert crossover({1: 0.9, 4: 0.8}) == 1
    assert crossover({1: 0.9, 4: 1.2}) is None


def test_compare_says_what_is_noise(tmp_path):
    first = make_result(TOY)
    second = make_result({**TOY, "domino-engine": {1: [300.0, 303.0], 4: [598.0, 611.0], 16: [700.0, 703.0]}})
    second.provenance.versions["vllm"] = "0.33.0"
    found = {c.key[2:]: c for c in compare_results(first, second)}
    assert found["domino-engine", 1].throughput.within_noise is False
    assert found["domino-engine", 4].throughput.within_noise is True
    assert all(c.throughput.value == 1 for key, c in found.items() if key[0] == "none")
    assert caveats(first, second) == ["version of vllm differs: 0.32.0 and 0.33.0"]
    text = to_markdown(list(found.values()), ("a.json", "b.json"), caveats(first, second))
    assert "+20.4 %" in text
    assert "within the noise" in text


def test_results_without_a_common_cell_are_refused():
    with pytest.raises(ValueError, match="no cell in common"):
        compare_results(make_result({"none": {1: [1.0]}}), make_result({"none": {2: [1.0]}}))


def test_a_result_survives_the_disk_and_others_are_refused(tmp_path):
    result = make_result(TOY)
    save_result(result, tmp_path / "toy.json")
    assert load_result(tmp_path / "toy.json") == result
    assert list(tmp_path.iterdir()) == [tmp_path / "toy.json"]
    for text, words in (
        ("{", "not valid JSON"),
        ('{"schema_version": 9}', "schema version 9"),
        ('{"schema_version": 1, "kind": "step"}', "needed is 'suite'"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            load_result(tmp_path / "bad.json")


def test_memory_follows_the_tree(tmp_path):
    for pid, parent, name, rss in (
        (1, 0, "init", 10),
        (50, 1, "serve", 100),
        (51, 50, "core", 200),
        (60, 1, "other", 7),
    ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "status").write_text(
            f"Name:\t{name}\nPPid:\t{parent}\nVmHWM:\t {2 * rss} kB\nVmRSS:\t {rss} kB\n"
        )
    found = tree_memory(50, proc=tmp_path)
    assert [(p.name, p.rss, p.peak) for p in found] == [
        ("serve", 100 * 1024, 200 * 1024),
        ("core", 200 * 1024, 400 * 1024),
    ]
    assert tree_memory(99, proc=tmp_path) == []


def test_a_file_that_a_tree_maps_twice_counts_once(tmp_path):
    library = "7f00-7f09 r--p 00001000 fe:00 77    /lib/x.so\nRss: {} kB\nAnonymous: {} kB\n"
    heap = "8f00-8f09 rw-p 00000000 00:00 0    [heap]\nRss: 999 kB\nAnonymous: 999 kB\n"
    for pid, parent, resident, anonymous in ((50, 1, 100, 10), (51, 50, 70, 0), (60, 1, 500, 0)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "status").write_text(f"Name:\tx\nPPid:\t{parent}\n")
        (folder / "smaps").write_text(library.format(resident, anonymous) + heap)
    assert tree_file_bytes(50, proc=tmp_path) == 90 * 1024
