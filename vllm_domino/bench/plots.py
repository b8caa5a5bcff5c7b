"""The report's plots as inline SVG: text stays text, no file is written and nothing is fetched."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from vllm_domino.bench.result import Cell
from vllm_domino.bench.statistics import crossover
from vllm_domino.bench.suite import BASELINE

# Okabe and Ito's palette: told apart by readers with any colour vision, and each variant keeps its colour in all plots.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#8A7500")
_MARKERS = "osv^DPX*"
# Small, so that a phone shows it at nearly its own size and letters stay readable.
_SIZE = (4.4, 3.3)
_SETTINGS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 5,
}


def draw_plots(cells: Sequence[Cell], variants: Sequence[str]) -> list[tuple[str, str]]:
    """(caption, SVG) of every plot that these cells (of one data set and temperature) have figures for.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib; install it with `pip install 'vllm-domino[bench]'`"
        ) from error
    plots: list[tuple[str, Callable[[Any, _Look], bool]]] = [
        (
            "Output tokens/s against concurrency; bars: 95 % interval",
            lambda ax, look: _throughput(ax, look, cells),
        ),
        (
            "Speedup over the plain server; a cross marks where it no longer pays",
            lambda ax, look: _speedup(ax, look, cells),
        ),
        ("Latency against throughput, one point per concurrency", lambda ax, look: _latency(ax, look, cells)),
        ("Share of steps in which draft i was accepted", lambda ax, look: _positions(ax, look, cells)),
        ("Time of one engine step by part, lowest concurrency", lambda ax, look: _steps(ax, look, cells)),
    ]
    look = _Look(variants)
    drawn = []
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": f"{cells[0].data}{cells[0].temperature}"}):
        for number, (caption, draw) in enumerate(plots):
            mpl.rcParams["svg.hashsalt"] += str(number)  # ids in one page must differ between plots
            figure = Figure(figsize=_SIZE, layout="constrained")
            if draw(figure.add_subplot(), look):
                drawn.append((caption, _svg(figure, caption)))
    return drawn


class _Look:
    """Colour and marker by variant."""

    def __init__(self, variants: Sequence[str]):
        self._places = {name: index for index, name in enumerate(variants)}

    def __call__(self, variant: str) -> dict[str, Any]:
        place = self._places.get(variant, 0)
        return {
            "color": _COLOURS[place % len(_COLOURS)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "label": variant,
        }

    def colour(self, variant: str) -> str:
        return str(self(variant)["color"])


def _throughput(ax: Any, look: _Look, cells: Sequence[Cell]) -> bool:
    for variant, line in _lines(cells).items():
        ax.errorbar(
            [c.concurrency for c in line],
            [c.output_tokens_per_s for c in line],
            yerr=[c.half_width or 0 for c in line],
            capsize=2,
            **look(variant),
        )
    _concurrency_axis(ax, cells)
    ax.set_ylabel("output tokens/s")
    ax.set_ylim(bottom=0)
    ax.legend()
    return True


def _speedup(ax: Any, look: _Look, cells: Sequence[Cell]) -> bool:
    lines = {v: [c for c in line if c.speedup] for v, line in _lines(cells).items() if v != BASELINE}
    lines = {variant: line for variant, line in lines.items() if line}
    for variant, line in lines.items():
        ladder = {c.concurrency: c.speedup or 0.0 for c in line}
        ax.plot(list(ladder), list(ladder.values()), **look(variant))
        crossing = crossover(ladder)
        if crossing is not None and len(ladder) > 1 and crossing > min(ladder):
            ax.plot(crossing, 1.0, "x", color=look.colour(variant), markersize=11, markeredgewidth=2)
            ax.annotate(
                f"{crossing:.1f}", (crossing, 1.0), xytext=(3, 6), textcoords="offset points", fontsize=8
            )
    ax.axhline(1.0, color="#000000", linewidth=1, linestyle="--")
    _concurrency_axis(ax, cells)
    ax.set_ylabel("speedup")
    ax.set_ylim(bottom=0)
    if lines:
        ax.legend()
    return bool(lines)


def _latency(ax: Any, look: _Look, cells: Sequence[Cell]) -> bool:
    for variant, line in _lines(cells).items():
        ax.plot([c.output_tokens_per_s for c in line], [c.tpot_ms.median for c in line], **look(variant))
        for cell in line:
            where = (cell.output_tokens_per_s, cell.tpot_ms.median)
            ax.annotate(str(cell.concurrency), where, xytext=(3, 3), textcoords="offset points", fontsize=7)
    ax.set_xlabel("output tokens/s (all requests)")
    ax.set_ylabel("median ms per output token")
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    ax.legend()
    return True


def _positions(ax: Any, look: _Look, cells: Sequence[Cell]) -> bool:
    first = [line[0] for line in _lines(cells).values() if line[0].per_position]
    for cell in first:
        style = look(cell.variant)
        style["label"] = f"{cell.variant} ({cell.acceptance_length:.2f})"
        ax.plot(range(1, len(cell.per_position) + 1), cell.per_position, **style)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("draft position i")
    ax.set_ylabel("accepted")
    ax.set_ylim(0, 1)
    if first:
        ax.legend(title="acceptance length", title_fontsize=8.5)
    return bool(first)


def _steps(ax: Any, look: _Look, cells: Sequence[Cell]) -> bool:
    first = [line[0] for line in _lines(cells).values() if line[0].step_ms]
    for row, cell in enumerate(first):
        assert cell.step_ms is not None
        draft = cell.draft_ms or 0.0
        ax.barh(row, cell.step_ms - draft, color=look.colour(cell.variant), alpha=0.55)
        ax.barh(
            row,
            draft,
            left=cell.step_ms - draft,
            color=look.colour(cell.variant),
            hatch="//",
            edgecolor="#ffffff",
        )
        text = f"{cell.step_ms:.1f} ms" + (f", drafter {draft:.1f}" if draft else "")
        ax.annotate(text, (cell.step_ms, row), xytext=(3, -3), textcoords="offset points", fontsize=8)
    ax.set_yticks(range(len(first)), [cell.variant for cell in first])
    ax.invert_yaxis()
    ax.set_xlabel("ms (hatched: our drafter)")
    if first:
        ax.set_xlim(right=1.45 * max(cell.step_ms or 0 for cell in first))
    return bool(first)


def _lines(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by variant, ascending in concurrency."""
    lines: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: c.concurrency):
        lines.setdefault(cell.variant, []).append(cell)
    order = list(dict.fromkeys(cell.variant for cell in cells))
    return {variant: lines[variant] for variant in order}


def _concurrency_axis(ax: Any, cells: Sequence[Cell]) -> None:
    rungs = sorted({cell.concurrency for cell in cells})
    ax.set_xscale("log", base=2)
    ax.set_xticks(rungs, [str(rung) for rung in rungs])
    ax.minorticks_off()
    ax.set_xlabel("concurrency")


def _svg(figure: Any, caption: str) -> str:
    """The drawing as an element of the page: no XML header, no fixed size, a name for screen readers."""
    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = sink.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
