"""Is speculation worth it, without a GPU at hand? Speedup by load and acceptance, reckoned from
bytes and operations of a step, and corrected by a benchmark profile where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specserve.engine.inside import economics
from specserve.engine.inside.economics import Chip, Curve, Speculating
from specserve.engine.output.loading import SLOW_BYTES
from specserve.gpu.speeds import speed_of
from specserve.memory import work
from specserve.memory.text import aligned
from specserve.units import duration, percent

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.app.plan import Planning
    from specserve.engine.inside.step_profile import StepProfile
    from specserve.memory.result import MemoryPlan

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATES = (0.4, 0.6, 0.8)
"""Acceptance: accepted / drafted tokens, as ``specserve_acceptance_rate`` counts it."""
USUAL_CONTEXT = 1000
"""Tokens of a sequence, prompt and answer so far, where nobody says."""
PARALLEL = frozenset({"dflash", "dspark", "medusa", "mlp_speculator"})
"""Methods whose draft gives all its tokens in one forward."""

YARDSTICKS = (
    "Speeds are against an engine without speculation; at k = 0: the draft loaded, nothing "
    "drafted. Best k at each acceptance."
)


@dataclass(frozen=True)
class WorthRow:
    """One load."""

    concurrency: int
    speedups: tuple[float, ...]
    """At each of :data:`RATES`, with the k of the config, against an engine without speculation."""
    break_even: float | None
    """Acceptance rate above which the config's k is faster than off; None where none is."""
    idle: float
    """Speed at k = 0 against off: what the loaded draft costs where it drafts nothing."""
    best_k: tuple[int, ...]
    """At each of :data:`RATES`; 0 where leaving it off is best."""
    is_measured: bool
    """Whether the profile holds step times up to this load."""
    fits: bool | None
    """Whether so many requests of max_model_len hold in the cache; None where it is not known."""


@dataclass(frozen=True)
class Worth:
    """What speculation brings and costs on one kind of GPU."""

    gpu: str
    gpus: int
    method: str
    k: int
    context: int
    rows: tuple[WorthRow, ...]
    ready_seconds: float
    """To read the weights of both at :data:`SLOW_BYTES`."""
    ready_seconds_without: float
    requests: float
    requests_without: float
    max_model_len: int
    profile: str | None
    """Which engine's profile corrected the figures."""

    @property
    def conclusion(self) -> str:
        """One line, at the middle acceptance."""
        middle = len(RATES) // 2
        faster = [row for row in self.rows if row.speedups[middle] > 1]
        at = f"at {percent(RATES[middle])} acceptance"
        if not faster:
            return f"Not worth it {at}: slower at every load. Leave speculation off."
        best = max(faster, key=lambda row: row.speedups[middle])
        most = f"most at {best.concurrency} ({best.speedups[middle]:.2f}x)"
        slower = [row.concurrency for row in self.rows if row.speedups[middle] <= 1]
        if not slower:
            return f"Worth it {at}: faster at every load, {most}."
        last = faster[-1].concurrency
        return f"Worth it {at} up to {last} concurrent requests, {most}; slower beyond."

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        rows: list[JsonValue] = []
        for row in self.rows:
            speedups: dict[str, JsonValue] = {
                f"{rate:g}": round(value, 3)
                for rate, value in zip(RATES, row.speedups, strict=True)
            }
            best: dict[str, JsonValue] = {
                f"{rate:g}": k for rate, k in zip(RATES, row.best_k, strict=True)
            }
            limit = None
            if row.break_even is not None:
                limit = round(row.break_even, 3)
            rows.append(
                {
                    "concurrency": row.concurrency,
                    "speedup_by_acceptance": speedups,
                    "break_even_acceptance_rate": limit,
                    "speed_at_k_0": round(row.idle, 3),
                    "best_k_by_acceptance": best,
                    "source": _source(row),
                    "fits": row.fits,
                }
            )
        return {
            "source": "modelled",
            "yardstick": "an engine without speculation",
            "gpu": self.gpu,
            "gpus": self.gpus,
            "method": self.method,
            "num_speculative_tokens": self.k,
            "context_tokens": self.context,
            "profile": self.profile,
            "loads": rows,
            "price": {
                "max_model_len": self.max_model_len,
                "requests": round(self.requests, 2),
                "requests_without": round(self.requests_without, 2),
            },
            "time_to_read_weights": {
                "source": "modelled",
                "bytes_per_second": SLOW_BYTES,
                "seconds": round(self.ready_seconds, 1),
                "seconds_without": round(self.ready_seconds_without, 1),
            },
            "conclusion": self.conclusion,
        }


def _source(row: WorthRow) -> str:
    if row.is_measured:
        return "measured"
    return "modelled"


def of_plan(
    planning: Planning,
    plan: MemoryPlan,
    *,
    profile: StepProfile | None = None,
    context: int | None = None,
) -> Worth | str:
    """What speculation is worth in this deployment; a sentence where that cannot be said."""
    shape, settings = plan.shape, planning.settings
    if shape.method is None:
        return "speculation is off; set speculative_decoding to ask what it is worth"
    if shape.backend == "cpu":
        return "a processor's speed is not modelled; measure: specserve bench CONFIG"
    board = speed_of(plan.gpu_name)
    if board is None:
        name = plan.gpu_name or "the GPU, which is not named"
        return f"bandwidth and operations of {name} are not on record; set hardware.gpu_name"
    target = work.of_target(planning.target, shape)
    if target is None:
        return "neither headers nor config.json say what the target holds"
    draft = None
    if shape.drafts_with_a_model:
        draft = work.of_draft(planning.target, planning.draft, shape)
        if draft is None:
            return "the size of the draft is not known"
    chip = Chip(
        board.gb_per_second * 1e9,
        board.flops(work.compute_format(planning.target, shape)),
        board.link_gb_per_second * 1e9,
    )
    speculating = Speculating(
        target,
        chip,
        draft,
        gpus=shape.tp,
        draft_gpus=shape.draft_tp or shape.tp,
        parallel=shape.method in PARALLEL
        or settings.speculative_decoding.parallel_drafting is True,
    )
    tokens = context or min(USUAL_CONTEXT, max(1, shape.max_model_len // 2))
    k = max(1, settings.num_speculative_tokens)
    measured_with = None
    if profile is not None:
        measured_with = profile.engine or "an engine that is not named"
    gpu = plan.tightest
    weights = gpu.weights_bytes * shape.gpus
    alone = gpu.target_weights_bytes * shape.gpus
    return Worth(
        gpu=board.name,
        gpus=shape.gpus,
        method=shape.method,
        k=k,
        context=tokens,
        rows=rows(speculating, k, tokens, profile, plan),
        ready_seconds=weights / SLOW_BYTES,
        ready_seconds_without=alone / SLOW_BYTES,
        requests=plan.capacity.requests,
        requests_without=plan.without_draft.requests,
        max_model_len=plan.max_model_len,
        profile=measured_with,
    )


def rows(
    model: Speculating,
    k: int,
    context: int,
    profile: StepProfile | None,
    plan: MemoryPlan | None,
) -> tuple[WorthRow, ...]:
    """Every load. Where the profile was measured, its ratio of step times counts; elsewhere the
    model's, moved by as much as the nearest measured load was off.
    """
    factors = _factors(model, context, profile)
    found = []
    for load in LOADS:
        factor, is_measured = 1.0, False
        if factors:
            inside = Curve(factors).at(load)
            is_measured = inside is not None and load >= factors[0][0]
            factor = factors[-1][1]
            if inside is not None:
                factor = inside
        cost = model.cost(load, k, context) * factor
        speedups = [economics.gain(1 + rate * k, cost) for rate in RATES]
        chances = [economics.chance_of(rate, k) for rate in RATES]
        best = [
            model.best_k(
                load, context, economics.positions(chance, economics.LARGEST_K), factor=factor
            )
            for chance in chances
        ]
        fits = None
        if plan is not None and plan.fits is not None:
            fits = plan.capacity.requests >= load
        found.append(
            WorthRow(
                concurrency=load,
                speedups=tuple(speedups),
                break_even=economics.break_even_rate(cost, k),
                idle=model.off(load, context) / model.idle(load, context),
                best_k=tuple(best),
                is_measured=is_measured,
                fits=fits,
            )
        )
    return tuple(found)


def _factors(
    model: Speculating, context: int, profile: StepProfile | None
) -> tuple[tuple[float, float], ...]:
    """Measured cost / modelled cost by batch size."""
    if profile is None:
        return ()
    return tuple(
        (batch, worth.cost / model.cost(batch, max(1, round(worth.drafted)), context))
        for batch, worth in profile.cells
    )


def render(worth: Worth) -> str:
    """For a person: the table, the price, and one line at the end."""
    where = f"{worth.gpus} x {worth.gpu}"
    source = "modelled from bytes and operations, not measured"
    if worth.profile is not None:
        source = f"modelled, corrected by the profile of {worth.profile}"
    title = (
        f"Worth of {worth.method} with {worth.k} tokens a draft on {where}, sequences of "
        f"{worth.context} tokens ({source})"
    )
    head = (
        "concurrent",
        *(f"{percent(rate)} accepted" for rate in RATES),
        "pays above",
        "best k",
        "at k = 0",
    )
    table: list[tuple[str, ...]] = [head]
    for row in worth.rows:
        limit = "never"
        if row.break_even is not None:
            limit = percent(row.break_even)
        name = str(row.concurrency)
        if row.fits is False:
            name += " *"
        best = "/".join(map(str, row.best_k))
        speeds = [f"{speed:.2f}x" for speed in row.speedups]
        table.append((name, *speeds, limit, best, f"{row.idle:.2f}x"))
    lines = [title, *aligned(table)]
    if any(row.fits is False for row in worth.rows):
        lines.append(f"* more than the cache holds of {worth.max_model_len} tokens each")
    lines.append(YARDSTICKS)
    length = worth.max_model_len
    price = f"Price: {worth.requests:.1f} requests of {length} tokens at once"
    lines.append(f"{price}, {worth.requests_without:.1f} without.")
    ready = f"Time to read the weights (modelled, 1 GB/s): {duration(worth.ready_seconds)}"
    lines.append(f"{ready}, {duration(worth.ready_seconds_without)} without.")
    lines.append(worth.conclusion)
    return "\n".join(lines)


def svg(worth: Worth) -> str | None:
    """Speedup against load, a line for each acceptance; None where matplotlib is not installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return None
    import io

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "specserve"
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    loads: Sequence[int] = [row.concurrency for row in worth.rows]
    for index, (rate, colour) in enumerate(zip(RATES, _COLOURS, strict=True)):
        speeds = [row.speedups[index] for row in worth.rows]
        axes.plot(loads, speeds, marker="o", color=colour, label=f"{percent(rate)} accepted")
    idle = [row.idle for row in worth.rows]
    axes.plot(loads, idle, ":", color="#6b7280", label="draft loaded, k = 0")
    axes.axhline(1, color="#111", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("speed against no speculation")
    axes.legend(fontsize=8, frameon=False)
    title = f"{worth.method}, k = {worth.k}, {worth.gpus} x {worth.gpu} (modelled)"
    axes.set_title(title, fontsize=11, loc="left")
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


_COLOURS = ("#dc2626", "#2563eb", "#059669")
