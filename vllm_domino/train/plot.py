"""What training gave, drawn from a result of `vllm-domino train results` or `train smollm2`: acceptance by draft
position on each data set, and the learning curves.
"""

from __future__ import annotations

import json
from pathlib import Path

# row of the result -> label, colour (Okabe and Ito: told apart with any colour vision) and marker
LOOKS = {
    "domino": ("Domino", "#0072B2", "o"),
    "head_removed": ("Domino without head", "#56B4E9", "s"),
    "dflash": ("DFlash", "#009E73", "v"),
    "eagle3": ("EAGLE-3", "#D55E00", "^"),
}


def acceptance_rows(result: dict) -> dict[str, dict[str, dict]]:
    """Data set -> row -> `acceptance_length`, `per_position` and `steps`, for every row of the plots that the
    result has. A result with one data set calls it "".
    """
    steps = {method: run["steps"] for method, run in result.get("runs", {}).items()}
    steps["head_removed"] = steps.get("domino")
    sets = result.get("datasets", {"": result.get("acceptance", {})})
    found = {}
    for name, rows in sets.items():
        found[name] = {
            method: rows[method] | {"steps": steps.get(method)}
            for method in LOOKS
            if "per_position" in rows.get(method, {})
        }
    return {name: rows for name, rows in found.items() if rows}


def plot_training(path: Path) -> Path:
    """Draw a result file; returns the PNG's path, beside the JSON.

    Raises:
        ValueError: matplotlib is not installed, or the file has no acceptance by position.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib; install it with `pip install 'vllm-domino[bench]'`"
        ) from error
    result = json.loads(path.read_text())
    sets = acceptance_rows(result)
    if not sets:
        raise ValueError(
            f"{path}: no acceptance by position; name a JSON that `vllm-domino train results` wrote"
        )
    curves = {name: run["curve"] for name, run in result.get("runs", {}).items() if run.get("curve")}
    panels = len(sets) + bool(curves)
    figure = Figure(figsize=(6.4, 4 * panels), layout="constrained")
    axes = figure.subplots(panels, squeeze=False)[:, 0]
    for axis, (name, rows) in zip(axes, sets.items(), strict=False):
        _draw_positions(axis, name, rows)
    if curves:
        _draw_curves(axes[-1], curves)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    drawn = path.with_suffix(".png")
    figure.savefig(drawn, dpi=100, metadata={"Software": None})
    return drawn


def _draw_positions(axis, name: str, rows: dict[str, dict]) -> None:
    from matplotlib.ticker import MaxNLocator

    for method, row in rows.items():
        label, colour, marker = LOOKS[method]
        trained = f", {row['steps']:,} steps" if row["steps"] else ""
        axis.plot(
            range(1, len(row["per_position"]) + 1),
            row["per_position"],
            color=colour,
            marker=marker,
            markersize=5,
            label=f"{label}{trained}: {row['acceptance_length']:.2f}",
        )
    axis.set(xlabel="draft position i", ylabel="share of rounds that accept draft i", ylim=(0, 1), title=name)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(title="acceptance length", frameon=False)


def _draw_curves(axis, curves: dict[str, list[dict]]) -> None:
    """Teacher-forced acceptance of the training batches: methods that look at other prefixes of them, as EAGLE-3
    does, are to be compared by the panels above.
    """
    for method, curve in curves.items():
        label, colour, _ = LOOKS[method]
        steps = [point["step"] for point in curve]
        axis.plot(steps, [point["teacher_forced_acceptance"] for point in curve], color=colour, label=label)
    axis.set(
        xlabel="training step", ylabel="acceptance length in training,\ngiven the true prefix", ylim=(1, None)
    )
    axis.legend(frameon=False)
