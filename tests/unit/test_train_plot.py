"""The plot of acceptance by draft position, from the committed result and from a small one."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_domino.cli.main import app
from vllm_domino.train.plot import LOOKS, acceptance_rows, plot_training

RESULT = Path(__file__).parents[2] / "benchmarks/results/training-tiny.json"


def test_the_committed_result_has_every_row_of_the_plot():
    rows = acceptance_rows(json.loads(RESULT.read_text()))[""]
    assert list(rows) == ["domino", "head_removed", "dflash", "eagle3"]
    for row in rows.values():
        # the mean of accepted drafts is the sum over positions of the share of rounds that accept each
        assert 1 + sum(row["per_position"]) == pytest.approx(row["acceptance_length"], abs=2e-3)
        assert row["steps"]


def test_the_command_draws_a_small_picture_beside_the_result(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    shutil.copy(RESULT, tmp_path / "result.json")
    done = CliRunner().invoke(app, ["train", "plot", str(tmp_path / "result.json")])
    drawn = tmp_path / "result.png"
    assert done.exit_code == 0
    assert done.stdout.strip() == str(drawn)
    assert drawn.stat().st_size < 150_000
    pixels = (imread(drawn)[:, :, :3] * 255).round().astype(int).reshape(-1, 3).tolist()
    seen = {"#{:02X}{:02X}{:02X}".format(*pixel) for pixel in pixels}
    assert {colour for _, colour, _ in LOOKS.values()} <= seen  # every line is there


def test_a_result_with_only_some_drafters_is_drawn_and_another_json_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    figures = {"acceptance_length": 1.7, "per_position": [0.5, 0.2]}
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"acceptance": {"dflash": figures}, "runs": {"dflash": {"steps": 3}}}))
    assert plot_training(path).exists()
    path.write_text(json.dumps({"acceptance": {"dflash": {"acceptance_length": 1.7}}}))
    with pytest.raises(ValueError, match=r"one\.json: no acceptance by position.*train results"):
        plot_training(path)


def test_every_data_set_and_the_learning_curves_have_a_panel_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    figures = {"dflash": {"acceptance_length": 1.7, "per_position": [0.5, 0.2]}}
    curve = [{"step": 20, "loss": 4.0, "teacher_forced_acceptance": 1.2}]
    heights = []
    for datasets, runs in (
        ({"math": figures}, {}),
        ({"math": figures, "code": figures}, {}),
        ({"math": figures, "code": figures}, {"dflash": {"steps": 20, "curve": curve}}),
    ):
        path = tmp_path / "result.json"
        path.write_text(json.dumps({"datasets": datasets, "runs": runs}))
        heights.append(imread(plot_training(path)).shape[0])
    assert heights == [heights[0], 2 * heights[0], 3 * heights[0]]
