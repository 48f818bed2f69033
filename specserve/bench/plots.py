"""The pictures of a report, as SVG text.

matplotlib is an extra (``specserve[bench]``) and is imported here only.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specserve.bench import breakeven
from specserve.bench.judge import ArmCell, BenchCell, BenchVerdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"faster": "#2563eb", "slower": "#dc2626"}


def svgs(verdict: BenchVerdict) -> dict[str, str]:
    """Every picture that there is data for, by name; empty when matplotlib is not installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    mpl.use("svg")
    # A workload's name is a name, also where "$a^$" stands in it.
    mpl.rcParams["text.parse_math"] = False
    drawn: dict[str, Callable[[Axes, BenchVerdict], bool]] = {
        "speedup": _speedup,
        "tpot": _tpot,
        "throughput": _throughput,
        "positions": _positions,
        "breakeven": _breakeven,
    }
    found = {}
    for name, draw in drawn.items():
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        if draw(axes, verdict):
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
            text = out.getvalue()
            found[name] = text[text.index("<svg") :]
    return found


def _speedup(axes: Axes, verdict: BenchVerdict) -> bool:
    known = [(c, c.speedup) for c in verdict.cells if c.speedup]
    if not known:
        return False
    places = range(len(known))
    values = [s.value for _, s in known]
    errors = [[s.value - s.low for _, s in known], [s.high - s.value for _, s in known]]
    colours = [_COLOURS.get(c.verdict, "#9ca3af") for c, _ in known]
    labels = [f"{c.workload}\nx{c.concurrency}" for c, _ in known]
    axes.bar(places, values, color=colours, width=0.6)
    axes.errorbar(places, values, yerr=errors, fmt="none", ecolor="#111", capsize=4)
    axes.axhline(1, color="#111", linewidth=0.8, linestyle="--")
    axes.set_xticks(places, labels, fontsize=8)
    axes.set_ylabel("speedup (above 1 is faster)")
    title = "Speedup per workload and concurrency, with 95 % interval"
    axes.set_title(title, fontsize=11, loc="left")
    return True


def _tpot(axes: Axes, verdict: BenchVerdict) -> bool:
    def median(arm: ArmCell) -> float | None:
        if arm.tpot is None:
            return None
        return arm.tpot.p50 * 1000

    return _curves(axes, verdict.cells, "TPOT, median (ms)", median)


def _throughput(axes: Axes, verdict: BenchVerdict) -> bool:
    return _curves(axes, verdict.cells, "output tokens/s", lambda arm: arm.output_tokens_per_second)


def _curves(
    axes: Axes, cells: Sequence[BenchCell], label: str, value: Callable[[ArmCell], float | None]
) -> bool:
    for i, workload in enumerate(dict.fromkeys(c.workload for c in cells)):
        here = sorted((c for c in cells if c.workload == workload), key=lambda c: c.concurrency)
        loads = [c.concurrency for c in here]
        for style, arms in (
            ("--", [c.baseline for c in here]),
            ("-", [c.speculative for c in here]),
        ):
            points = [(x, value(arm)) for x, arm in zip(loads, arms, strict=True)]
            known = [(x, y) for x, y in points if y is not None]
            axes.plot(
                [x for x, _ in known],
                [y for _, y in known],
                style,
                marker="o",
                markersize=4,
                color=f"C{i % 10}",
                label=_label(f"{workload}, {arms[0].arm}"),
            )
    if not axes.lines:
        return False
    _load_axis(axes, sorted({c.concurrency for c in cells}))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    axes.legend(fontsize=8, frameon=False, handlelength=3)
    axes.set_title(f"{label[0].upper()}{label[1:]} against load", fontsize=11, loc="left")
    return True


def _label(text: str) -> str:
    """A label of the legend; matplotlib leaves out those that begin with an underscore."""
    if text.startswith("_"):
        return f" {text}"
    return text


def _load_axis(axes: Axes, loads: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.minorticks_off()
    axes.set_xlabel("concurrent requests")


def _positions(axes: Axes, verdict: BenchVerdict) -> bool:
    known = [c for c in verdict.cells if c.speculative.acceptance_per_position]
    if not known:
        return False
    lowest: dict[str, BenchCell] = {}
    for cell in sorted(known, key=lambda c: c.concurrency):
        lowest.setdefault(cell.workload, cell)
    for cell in known:
        if lowest[cell.workload] is cell:
            rates = [100 * p for p in cell.speculative.acceptance_per_position]
            label = f"{cell.workload} x{cell.concurrency}"
            axes.plot(range(len(rates)), rates, marker="o", label=label)
    axes.set_ylim(0, 100)
    axes.set_xticks(range(max(len(c.speculative.acceptance_per_position) for c in known)))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted (%)")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("Acceptance by position", fontsize=11, loc="left")
    return True


def _breakeven(axes: Axes, verdict: BenchVerdict) -> bool:
    cells = breakeven.profile(verdict).cells
    if not cells:
        return False
    xs = [round(concurrency) for concurrency, _ in cells]
    # Where no acceptance pays, the whole range is slower.
    limits = []
    for _, step in cells:
        limit = 1.0
        if step.break_even is not None:
            limit = step.break_even
        limits.append(100 * limit)
    axes.plot(xs, limits, "--", color=_COLOURS["slower"], marker="_")
    axes.fill_between(xs, 0, limits, color=_COLOURS["slower"], alpha=0.08)
    for cell in verdict.cells:
        if cell.speculative.acceptance_rate is not None:
            point = (cell.concurrency, 100 * cell.speculative.acceptance_rate)
            axes.scatter(*point, color=_COLOURS["faster"], zorder=3)
            axes.annotate(cell.workload, point, (6, -3), textcoords="offset points", fontsize=8)
    _load_axis(axes, xs)
    axes.set_ylabel("acceptance rate (%)")
    title = "Acceptance (points) against break-even (line): below the line it is slower"
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12)
    return True
