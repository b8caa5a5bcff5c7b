"""A result as Markdown, CSV, and one HTML page that needs nothing but itself."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from html import escape

from vllm_domino.bench.plots import draw_plots
from vllm_domino.bench.result import BenchResult, Cell
from vllm_domino.bench.suite import BASELINE
from vllm_domino.bench.summary import crossovers

Column = tuple[str, Callable[[Cell], str]]


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _tokens_per_s(cell: Cell) -> str:
    spread = "" if cell.half_width is None else f" ± {cell.half_width:.1f}"
    return f"{cell.output_tokens_per_s:.1f}{spread}"


def _speedup(cell: Cell) -> str:
    if cell.speedup is None:
        return "1" if cell.variant == BASELINE else "–"
    bounds = "" if cell.speedup_low is None else f" ({cell.speedup_low:.2f}…{cell.speedup_high:.2f})"
    return f"{cell.speedup:.2f}{bounds}"


SPEED: tuple[Column, ...] = (
    ("variant", lambda c: c.variant),
    ("concurrency", lambda c: str(c.concurrency)),
    ("tokens/s", _tokens_per_s),
    ("speedup", _speedup),
    ("acceptance length", lambda c: _number(c.acceptance_length, 2)),
    (
        "TTFT ms, median / p90 / p99",
        lambda c: f"{c.ttft_ms.median:.0f} / {c.ttft_ms.p90:.0f} / {c.ttft_ms.p99:.0f}",
    ),
    (
        "TPOT ms, median / p90 / p99",
        lambda c: f"{c.tpot_ms.median:.2f} / {c.tpot_ms.p90:.2f} / {c.tpot_ms.p99:.2f}",
    ),
    (
        "end to end ms, median / p90 / p99",
        lambda c: f"{c.e2e_ms.median:.0f} / {c.e2e_ms.p90:.0f} / {c.e2e_ms.p99:.0f}",
    ),
)
CHECKS: tuple[Column, ...] = (
    ("variant", lambda c: c.variant),
    ("concurrency", lambda c: str(c.concurrency)),
    ("outputs as plain", lambda c: _share(c.equal_outputs)),
    ("accuracy", lambda c: _share(c.accuracy)),
    (
        "output tokens, mean / min / max",
        lambda c: f"{c.output_lengths.mean:.1f} / {c.output_lengths.min} / {c.output_lengths.max}",
    ),
    ("client = server tokens", lambda c: "yes" if c.tokens_match else "NO"),
    ("failed requests", lambda c: f"{c.failed_requests} of {c.requests}"),
    ("step ms", lambda c: _number(c.step_ms, 2)),
    ("drafter ms per step", lambda c: _number(c.draft_ms, 2)),
    ("failed draft steps", lambda c: _number(c.draft_failures, 0)),
    ("memory MB, now / peak", lambda c: f"{c.rss_bytes / 1e6:.0f} / {c.peak_rss_bytes / 1e6:.0f}"),
)
NOTES = (
    "Acceptance length counts the bonus token and is pooled over all verified steps (vLLM's counters). Intervals are "
    "95 % over repeats, each on a server of its own. Drafter time is the plugin's own, so only drafters that it runs "
    "have one. Memory is resident memory summed over the server's processes, shared pages counted in each."
)


def groups(result: BenchResult) -> Iterator[tuple[str, list[Cell]]]:
    """Cells of one data set and temperature, with a title."""
    keys = dict.fromkeys((cell.data, cell.temperature) for cell in result.cells)
    for data, temperature in keys:
        cells = [cell for cell in result.cells if (cell.data, cell.temperature) == (data, temperature)]
        yield f"{data}, temperature {temperature:g}", cells


def findings(cells: Sequence[Cell]) -> list[str]:
    """Sentences: best variant by concurrency, and from which load each variant no longer pays."""
    said = []
    for concurrency in sorted({cell.concurrency for cell in cells}):
        best = max((c for c in cells if c.concurrency == concurrency), key=lambda c: c.output_tokens_per_s)
        gain = "" if best.speedup is None else f", {best.speedup:.2f} × plain"
        said.append(
            f"Concurrency {concurrency}: {best.variant} leads with {best.output_tokens_per_s:.1f} tokens/s{gain}."
        )
    for variant, crossing in crossovers(cells).items():
        rungs = [c.concurrency for c in cells if c.variant == variant]
        lowest, highest = min(rungs), max(rungs)
        if crossing is None:
            said.append(
                f"{variant} is ahead of plain serving up to concurrency {highest}, the highest it was measured at."
            )
        elif crossing <= lowest:
            said.append(f"{variant} does not pay at any concurrency that it was measured at.")
        else:
            said.append(
                f"{variant} no longer pays from concurrency {crossing:.1f} on (interpolated between rungs)."
            )
    return said + memory_findings(cells)


def memory_findings(cells: Sequence[Cell]) -> list[str]:
    """How much more the server of each variant holds than the plain one, at the highest common concurrency."""
    highest = max(c.concurrency for c in cells)
    held = {c.variant: c.rss_bytes for c in cells if c.concurrency == highest}
    plain = held.pop(BASELINE, None)
    if plain is None or not held or not plain:
        return []
    more = ", ".join(f"{variant} {(rss - plain) / 1e6:+.0f}" for variant, rss in held.items())
    return [f"Resident memory over the plain server's {plain / 1e6:.0f} MB, in MB: {more}."]


def to_csv(result: BenchResult) -> str:
    """One line per cell, latencies and lengths in columns of their own."""
    rows = []
    for cell in result.cells:
        flat: dict[str, object] = {}
        for key, value in cell.model_dump().items():
            if isinstance(value, dict):
                flat |= {f"{key}_{name}": part for name, part in value.items()}
            else:
                flat[key] = " ".join(map(str, value)) if isinstance(value, list) else value
        rows.append(flat)
    sink = io.StringIO()
    writer = csv.DictWriter(sink, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue()


def to_markdown(result: BenchResult, name: str) -> str:
    """Tables for a README or an issue."""
    lines = [
        f"# {result.suite['name']}, {result.started_at[:10]}",
        "",
        f"From `{name}`. {_state(result)}",
        "",
    ]
    for title, cells in groups(result):
        lines += [f"## {title}", "", *(f"- {finding}" for finding in findings(cells)), ""]
        for columns in (SPEED, CHECKS):
            lines += ["| " + " | ".join(head for head, _ in columns) + " |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(text(cell) for _, text in columns) + " |" for cell in cells]
            lines.append("")
    lines += [NOTES, ""]
    if result.failures:
        lines += ["## Variants that failed", ""]
        lines += [
            f"- {f.variant}, repeat {f.repeat + 1} ({f.phase}): {_first_line(f.message)}"
            for f in result.failures
        ]
        lines.append("")
    lines += ["## Where it ran", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in facts(result)]
    return "\n".join(lines) + "\n"


def to_html(result: BenchResult, name: str) -> str:
    """One page: findings, plots, tables, provenance. Its policy forbids every request."""
    body = [
        f"<h1>{escape(result.suite['name'])}</h1><p>From <code>{escape(name)}</code>. {escape(_state(result))}</p>"
    ]
    for title, cells in groups(result):
        body.append(f"<section><h2>{escape(title)}</h2>")
        body.append("<ul>" + "".join(f"<li>{escape(finding)}</li>" for finding in findings(cells)) + "</ul>")
        plots = [
            f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
            for caption, svg in draw_plots(cells, result.variants)
        ]
        body.append(f'<div class="plots">{"".join(plots)}</div>')
        body += [_table(columns, cells) for columns in (SPEED, CHECKS)]
        body.append("</section>")
    body.append(f"<p>{escape(NOTES)}</p>")
    if result.failures:
        items = [
            f"<li>{escape(f.variant)}, repeat {f.repeat + 1} ({f.phase})<pre>{escape(f.message)}</pre></li>"
            for f in result.failures
        ]
        body.append(f"<h2>Variants that failed</h2><ul>{''.join(items)}</ul>")
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in facts(result))
    body.append(f'<h2>Where it ran</h2><div class="wide"><table class="facts">{rows}</table></div>')
    return _PAGE.format(title=escape(result.suite["name"]), body="\n".join(body))


def facts(result: BenchResult) -> list[tuple[str, str]]:
    """Provenance as rows."""
    where = result.provenance
    machine = where.machine
    rows = [
        ("commit", where.commit or "an installed package"),
        ("command", where.command),
        ("started, finished", f"{result.started_at}, {result.finished_at or 'not finished'}"),
        ("CPU", f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 1e9:.1f} GB"),
        ("GPU", "; ".join(machine.gpus) or "none"),
        ("versions", ", ".join(f"{key} {value}" for key, value in where.versions.items())),
        ("model", str(result.suite["server"]["model"])),
        ("vllm serve arguments", " ".join(result.suite["server"].get("args", ()))),
    ]
    rows += [
        (f"start of {name}", f"{min(times):.0f}…{max(times):.0f} s")
        for name, times in result.ready_seconds.items()
    ]
    rows += [(f"SHA-256 of {name}", digest[:16]) for name, digest in where.hashes.items()]
    rows += [(f"SHA-256 of prompts {name}", digest[:16]) for name, digest in where.data.items()]
    return rows


def _state(result: BenchResult) -> str:
    repeats = sorted({cell.repeats for cell in result.cells})
    counts = "…".join(map(str, sorted({repeats[0], repeats[-1]}))) if repeats else "no"
    unfinished = "" if result.finished else " The run is not finished."
    return f"{counts} repeat(s) per cell.{unfinished}"


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1][:300]


def _table(columns: Sequence[Column], cells: Sequence[Cell]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title, _ in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(text(cell))}</td>" for _, text in columns) + "</tr>" for cell in cells
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 16px; max-width: 1400px; color: #1a1a1a;
  background: #ffffff; }}
h1 {{ font-size: 1.6em; }} h2 {{ font-size: 1.25em; margin-top: 1.6em; }}
.plots {{ display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }}
figure {{ margin: 0; border: 1px solid #dddddd; border-radius: 6px; padding: 8px; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figcaption {{ font-size: 0.9em; color: #444444; }}
.wide {{ overflow-x: auto; margin: 16px 0; }}
table {{ border-collapse: collapse; font-size: 0.9em; }}
th, td {{ padding: 4px 10px; border-bottom: 1px solid #dddddd; text-align: right; white-space: nowrap; }}
th {{ background: #f4f4f4; }} thead th {{ white-space: normal; vertical-align: bottom; }}
th:first-child, td:first-child, .facts td {{ text-align: left; }}
tbody td:first-child {{ position: sticky; left: 0; background: #ffffff; }}
.facts td {{ white-space: normal; overflow-wrap: anywhere; min-width: 200px; }}
.facts tbody td:first-child {{ position: static; }}
pre {{ overflow-x: auto; font-size: 0.8em; background: #f4f4f4; padding: 8px; }}
code {{ overflow-wrap: anywhere; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
