"""Acceptance by draft position of the trained drafters, drawn from a result of `vllm-domino train results`."""

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


def acceptance_rows(result: dict) -> dict[str, dict]:
    """Row -> `acceptance_length`, `per_position` and `steps`, for every row of the plot that the result has."""
    steps = {method: run["steps"] for method, run in result.get("runs", {}).items()}
    steps["head_removed"] = steps.get("domino")
    rows = result.get("ablation", {}) | {
        method: figures | {"steps": steps.get(method)}
        for method, figures in result.get("acceptance", {}).items()
    }
    return {name: rows[name] for name in LOOKS if "per_position" in rows.get(name, {})}


def plot_acceptance(path: Path) -> Path:
    """Draw a result file; returns the PNG's path, beside the JSON.

    Raises:
        ValueError: matplotlib is not installed, or the file has no acceptance by position.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib; install it with `pip install 'vllm-domino[bench]'`"
        ) from error
    rows = acceptance_rows(json.loads(path.read_text()))
    if not rows:
        raise ValueError(
            f"{path}: no acceptance by position; name a JSON that `vllm-domino train results` wrote"
        )
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.add_subplot()
    for name, row in rows.items():
        label, colour, marker = LOOKS[name]
        trained = f", {row['steps']:,} steps" if row["steps"] else ""
        axis.plot(
            range(1, len(row["per_position"]) + 1),
            row["per_position"],
            color=colour,
            marker=marker,
            markersize=5,
            label=f"{label}{trained}: {row['acceptance_length']:.2f}",
        )
    axis.set(xlabel="draft position i", ylabel="share of rounds that accept draft i", ylim=(0, 1))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(title="acceptance length", frameon=False)
    drawn = path.with_suffix(".png")
    figure.savefig(drawn, dpi=100, metadata={"Software": None})
    return drawn
