"""The pictures of a report, as SVG text. matplotlib is an extra (``specserve[bench]``) and is imported here only."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from specserve.bench import breakeven, judge
from specserve.bench.judge import Cell
from specserve.bench.result import Result

_ON, _GREY = "#2563eb", "#9ca3af"


def svgs(result: Result) -> dict[str, str]:
    """Every picture that the result has data for, by name; empty when matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return {}
    mpl.use("svg")
    cells = judge.cells(result)
    drawn: dict[str, Callable[[Any], bool]] = {
        "speedup": lambda axes: _speedup(axes, cells),
        "tpot": lambda axes: _curves(
            axes, cells, "TPOT, median (ms)", lambda a: a.tpot.p50 * 1000 if a.tpot else None
        ),
        "throughput": lambda axes: _curves(
            axes, cells, "output tokens/s", lambda a: a.output_tokens_per_second
        ),
        "positions": lambda axes: _positions(axes, cells),
        "breakeven": lambda axes: _breakeven(axes, result, cells),
    }
    return {name: svg for name, draw in drawn.items() if (svg := _svg(draw)) is not None}


def _svg(draw: Callable[[Any], bool]) -> str | None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    if not draw(axes):
        return None
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _speedup(axes: Any, cells: Sequence[Cell]) -> bool:
    known = [c for c in cells if c.speedup]
    if not known:
        return False
    values = [c.speedup.value for c in known if c.speedup]
    low = [c.speedup.value - c.speedup.low for c in known if c.speedup]
    high = [c.speedup.high - c.speedup.value for c in known if c.speedup]
    colours = [{"faster": _ON, "slower": "#dc2626"}.get(c.verdict, _GREY) for c in known]
    labels = [f"{c.workload}\nx{c.concurrency}" for c in known]
    axes.bar(range(len(known)), values, color=colours, width=0.6)
    axes.errorbar(range(len(known)), values, yerr=[low, high], fmt="none", ecolor="#111", capsize=4)
    axes.axhline(1, color="#111", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(known)), labels, fontsize=8)
    axes.set_ylabel("speedup (above 1 is faster)")
    axes.set_title(
        "Speedup per workload and concurrency, with 95 % interval", fontsize=11, loc="left"
    )
    return True


def _curves(
    axes: Any, cells: Sequence[Cell], label: str, value: Callable[[Any], float | None]
) -> bool:
    for i, workload in enumerate(dict.fromkeys(c.workload for c in cells)):
        here = sorted((c for c in cells if c.workload == workload), key=lambda c: c.concurrency)
        for style, arm in (("--", "baseline"), ("-", "speculative")):
            points = [(c.concurrency, value(getattr(c, arm))) for c in here]
            xs, ys = (
                [x for x, y in points if y is not None],
                [y for _, y in points if y is not None],
            )
            name = getattr(here[0], arm).arm
            axes.plot(
                xs,
                ys,
                style,
                marker="o",
                markersize=4,
                color=f"C{i % 10}",
                label=f"{workload}, {name}",
            )
    if not axes.lines:
        return False
    ticks = sorted({c.concurrency for c in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(label)
    axes.legend(fontsize=8, frameon=False, handlelength=3)
    axes.set_title(f"{label[0].upper()}{label[1:]} against load", fontsize=11, loc="left")
    return True


def _positions(axes: Any, cells: Sequence[Cell]) -> bool:
    known = [c for c in cells if c.speculative.acceptance_per_position]
    lowest = {
        w: min(c.concurrency for c in known if c.workload == w) for w in {c.workload for c in known}
    }
    for cell in (c for c in known if c.concurrency == lowest[c.workload]):
        rates = [100 * p for p in cell.speculative.acceptance_per_position]
        axes.plot(
            range(len(rates)), rates, marker="o", label=f"{cell.workload} x{cell.concurrency}"
        )
    if not axes.lines:
        return False
    axes.set_ylim(0, 100)
    axes.set_xticks(range(max(len(c.speculative.acceptance_per_position) for c in known)))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted (%)")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("Acceptance by position", fontsize=11, loc="left")
    return True


def _breakeven(axes: Any, result: Result, cells: Sequence[Cell]) -> bool:
    steps = breakeven.step_times(result)
    if not steps:
        return False
    xs = [s.concurrency for s in steps]
    limits = [100 * s.break_even_acceptance for s in steps]
    axes.plot(xs, limits, "--", color="#dc2626", marker="_")
    axes.fill_between(xs, 0, limits, color="#dc2626", alpha=0.08)
    for cell in cells:
        if cell.speculative.acceptance_rate is not None:
            point = (cell.concurrency, 100 * cell.speculative.acceptance_rate)
            axes.scatter(*point, color=_ON, zorder=3)
            axes.annotate(cell.workload, point, (6, -3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.minorticks_off()
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("acceptance rate (%)")
    axes.set_title(
        "Acceptance (points) against break-even (line): below the line it is slower",
        fontsize=11,
        loc="left",
    )
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12)
    return True
