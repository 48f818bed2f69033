"""From blocks to verdicts: per workload and concurrency, is the second arm faster, and is that sound?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from specserve.bench import stats
from specserve.bench.result import Block, Check, Result, Speculation
from specserve.bench.stats import Interval, Spread

Verdict = Literal["faster", "slower", "no difference", "inconclusive", "unsound"]

MIN_PROMPTS = 8
"""Fewer paired prompts than this say too little about other prompts."""
MAX_ERROR_SHARE = 0.02
MAX_DRIFT = 0.25
"""Two equal blocks further apart than this: the machine changed while it was measured."""
MIN_STREAM_SHARE = 0.02
"""An answer whose tokens all arrive in this last share of its time was not streamed."""
BURST_TPOT_SECONDS = 0.001
"""And its tokens came faster than any engine makes them: a short answer after a long wait is no burst."""
MAX_BURST_SHARE = 0.1
MAX_LATE_SECONDS = 1.0
"""A replayed request sent this much later than it was recorded met another load than the recorded one."""
SAME_WITHIN = 0.05
"""A ratio whose whole interval lies this near to 1 is called no difference."""


@dataclass(frozen=True)
class ArmCell:
    """One arm in one cell. Times in seconds, rates a second."""

    arm: str
    requests: int
    errors: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    requests_per_second: float
    output_tokens_per_second: float
    prefix_cache_hit_ratio: float | None
    """Mean of the blocks."""
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_per_position: tuple[float, ...] = ()


@dataclass(frozen=True)
class Cell:
    """Both arms at one workload and concurrency."""

    workload: str
    concurrency: int
    baseline: ArmCell
    speculative: ArmCell
    verdict: Verdict
    speedup: Interval | None
    """Baseline TPOT / speculative TPOT; None when unsound."""
    throughput_speedup: float | None
    ttft_ratio: float | None
    """Speculative median TTFT / the baseline's: above 1 the first token comes later."""
    noise: float | None
    """Half width, as a ratio minus 1, that equal blocks alone explain."""
    warnings: tuple[str, ...] = field(default=())


def pairs(result: Result) -> list[Result]:
    """The first arm with each of the others, as results of two arms."""
    base, *others = result.arms
    if len(others) < 2:
        return [result]
    out = []
    for other in others:
        names = (base.name, other.name)
        kept = {
            k: [x for x in getattr(result, k) if x.arm in names]
            for k in ("blocks", "answers", "checks", "searches")
        }
        title = f"{result.title}, {other.name}"
        out.append(result.model_copy(update={**kept, "arms": [base, other], "title": title}))
    return out


def failed(result: Result) -> list[Check]:
    """Checks that an arm fails and the baseline does not: what the model cannot do is no fault of speculation."""
    base = {c.name for c in result.checks if c.arm == result.arms[0].name and c.status == "FAIL"}
    return [c for c in result.checks if c.status == "FAIL" and c.name not in base]


def cells(result: Result) -> list[Cell]:
    """Every cell in which both arms were measured; the first arm is the baseline."""
    if len(result.arms) < 2:
        return []
    base, spec = result.arms[0].name, result.arms[1].name
    keys = sorted({(b.workload, b.concurrency) for b in result.blocks})
    out = []
    for workload, concurrency in keys:
        here = [b for b in result.blocks if (b.workload, b.concurrency) == (workload, concurrency)]
        first, second = [b for b in here if b.arm == base], [b for b in here if b.arm == spec]
        if first and second:
            out.append(_cell(workload, concurrency, first, second))
    return out


def drops(old: Result, new: Result, share: float) -> list[str]:
    """Where the newer result is worse by more than this share, or says nothing more, in the cells of both.

    Results without a cell in common cannot be compared, which is no pass either.
    """
    before, after = (
        {(n, c.workload, c.concurrency): c for n, pair in enumerate(pairs(r)) for c in cells(pair)}
        for r in (old, new)
    )
    both = [(before[key], cell) for key, cell in after.items() if key in before]
    out = [] if both else ["no workload and concurrency was measured in both results"]
    for was, cell in both:
        for name, a, b in (
            ("speedup", was.speedup and was.speedup.value, cell.speedup and cell.speedup.value),
            (
                "acceptance length",
                was.speculative.mean_acceptance_length,
                cell.speculative.mean_acceptance_length,
            ),
        ):
            place = f"{name} of {cell.workload} at {cell.concurrency}"
            if a and not b:
                out.append(f"{place} was {a:.2f} and is not known now")
            elif a and b and b < a * (1 - share):
                out.append(f"{place} fell from {a:.2f} to {b:.2f}")
    return out


def _cell(workload: str, concurrency: int, first: Sequence[Block], second: Sequence[Block]) -> Cell:
    baseline, speculative = summarise(first), summarise(second)
    ratio = stats.paired_ratio(_by_prompt(first), _by_prompt(second))
    medians = [_block_medians(first), _block_medians(second)]
    half = stats.block_half_width(medians) if all(medians) else None
    bursts = [*_bursts(first), *_bursts(second)]
    steady = [[], []] if bursts else medians  # times between tokens that are none cannot drift
    warnings = _soundness(
        baseline, speculative, _by_prompt(first).keys() & _by_prompt(second).keys(), steady
    )
    warnings += [*bursts, *_lateness(first), *_lateness(second)]
    if ratio is not None and half is not None:
        ratio = stats.widen(ratio, half)
    verdict = _verdict(ratio, half, unsound=bool(warnings))
    return Cell(
        workload=workload,
        concurrency=concurrency,
        baseline=baseline,
        speculative=speculative,
        verdict=verdict,
        speedup=None if verdict == "unsound" else ratio,
        throughput_speedup=_throughput(baseline, speculative) if verdict != "unsound" else None,
        ttft_ratio=_ttft(baseline, speculative) if verdict != "unsound" else None,
        noise=None if half is None else math.exp(half) - 1,
        warnings=tuple(warnings),
    )


def _throughput(baseline: ArmCell, speculative: ArmCell) -> float | None:
    if baseline.output_tokens_per_second <= 0:
        return None
    return speculative.output_tokens_per_second / baseline.output_tokens_per_second


def _ttft(baseline: ArmCell, speculative: ArmCell) -> float | None:
    if baseline.ttft is None or speculative.ttft is None or not baseline.ttft.p50:
        return None
    return speculative.ttft.p50 / baseline.ttft.p50


def _verdict(ratio: Interval | None, half: float | None, *, unsound: bool) -> Verdict:
    if unsound:
        return "unsound"
    if ratio is None or half is None:
        return "inconclusive"
    if ratio.low > 1:
        return "faster"
    if ratio.high < 1:
        return "slower"
    if ratio.low > 1 - SAME_WITHIN and ratio.high < 1 + SAME_WITHIN:
        return "no difference"
    return "inconclusive"


def _soundness(
    baseline: ArmCell,
    speculative: ArmCell,
    paired: Iterable[str],
    medians: Sequence[Sequence[float]],
) -> list[str]:
    """Why no verdict may be drawn, each with what to run next."""
    out = []
    count = len(list(paired))
    if count < MIN_PROMPTS:
        out.append(
            f"{count} prompts were answered by both arms; at least {MIN_PROMPTS} are needed: raise --prompts"
        )
    for cell in (baseline, speculative):
        if cell.errors > MAX_ERROR_SHARE * cell.requests:
            out.append(
                f"{cell.errors} of {cell.requests} requests of '{cell.arm}' failed: look at its log, then run again"
            )
    for cell, blocks in zip((baseline, speculative), medians, strict=True):
        moved = stats.drift(blocks) if blocks else 0.0
        if moved > MAX_DRIFT:
            out.append(
                f"equal blocks of '{cell.arm}' differ by {moved:.0%}; at most {MAX_DRIFT:.0%} is sound: "
                "quiet the machine or raise --repeat"
            )
    return out


def _bursts(blocks: Sequence[Block]) -> list[str]:
    """Tokens that arrive together have no time between them: a buffer held them back."""
    long = [
        s
        for b in blocks
        for s in b.samples
        if s.e2e_seconds and s.ttft_seconds and (s.output_tokens or 0) >= 8
    ]
    held = [
        s
        for s in long
        if _is_held(s.e2e_seconds or 0.0, s.tpot_seconds or 0.0, s.output_tokens or 0)
    ]
    if len(held) <= MAX_BURST_SHARE * len(long):
        return []
    seen = f"{len(held)} of {len(long)} answers of '{blocks[0].arm}' came in one burst, so TPOT is not known"
    return [f"{seen}: look for a proxy that buffers, or for too few cores"]


def _is_held(e2e: float, tpot: float, tokens: int) -> bool:
    """Seconds and tokens of one answer.

    >>> _is_held(1.0, 0.0001, 64), _is_held(30.0, 0.004, 128)  # a buffer; half a second after half a minute's queue
    (True, False)
    """
    return tpot < BURST_TPOT_SECONDS and tpot * (tokens - 1) < MIN_STREAM_SHARE * e2e


def _lateness(blocks: Sequence[Block]) -> list[str]:
    late = [s.late_seconds for b in blocks for s in b.samples if s.late_seconds is not None]
    over = [s for s in late if s > MAX_LATE_SECONDS]
    if len(over) <= MAX_ERROR_SHARE * len(late):
        return []
    seen = f"{len(over)} of {len(late)} replayed requests to '{blocks[0].arm}' were sent up to {max(over):.1f} s late"
    return [f"{seen}: raise --concurrency, which bounds what may be in flight"]


def _by_prompt(blocks: Sequence[Block]) -> dict[str, float]:
    """Prompt -> median TPOT over the blocks, in seconds."""
    seen: dict[str, list[float]] = {}
    for block in blocks:
        for sample in block.samples:
            if (tpot := sample.tpot_seconds) is not None and tpot > 0:
                seen.setdefault(sample.prompt_id, []).append(tpot)
    return {prompt: median(values) for prompt, values in seen.items()}


def _block_medians(blocks: Sequence[Block]) -> list[float]:
    out = []
    for block in blocks:
        values = [t for s in block.samples if (t := s.tpot_seconds) is not None and t > 0]
        if values:
            out.append(median(values))
    return out


def total(blocks: Sequence[Block]) -> Speculation | None:
    """Speculation over several blocks; None when none of them drafted."""
    known = [b.speculation for b in blocks if b.speculation is not None]
    if not known:
        return None
    width = max(len(s.accepted_per_position) for s in known)
    return Speculation(
        drafts=sum(s.drafts for s in known),
        draft_tokens=sum(s.draft_tokens for s in known),
        accepted_tokens=sum(s.accepted_tokens for s in known),
        accepted_per_position=[
            sum(s.accepted_per_position[i] for s in known if i < len(s.accepted_per_position))
            for i in range(width)
        ],
    )


def summarise(blocks: Sequence[Block]) -> ArmCell:
    """One arm's blocks of one cell as percentiles and rates."""
    samples = [s for b in blocks for s in b.samples]
    good = [s for s in samples if s.ok]
    seconds = sum(b.duration_seconds for b in blocks)
    spec = total(blocks)
    hits = [b.prefix_cache_hit_ratio for b in blocks if b.prefix_cache_hit_ratio is not None]
    return ArmCell(
        arm=blocks[0].arm,
        requests=len(samples),
        errors=len(samples) - len(good),
        ttft=stats.spread([s.ttft_seconds for s in good if s.ttft_seconds is not None]),
        tpot=stats.spread([t for s in good if (t := s.tpot_seconds) is not None]),
        itl=stats.spread([gap for s in good for gap in s.itl_seconds]),
        e2e=stats.spread([s.e2e_seconds for s in good if s.e2e_seconds is not None]),
        requests_per_second=len(good) / seconds if seconds else 0.0,
        output_tokens_per_second=sum(s.output_tokens or 0 for s in good) / seconds
        if seconds
        else 0.0,
        prefix_cache_hit_ratio=sum(hits) / len(hits) if hits else None,
        acceptance_rate=spec.accepted_tokens / spec.draft_tokens
        if spec and spec.draft_tokens
        else None,
        mean_acceptance_length=1 + spec.accepted_tokens / spec.drafts
        if spec and spec.drafts
        else None,
        acceptance_per_position=tuple(a / spec.drafts for a in spec.accepted_per_position)
        if spec and spec.drafts
        else (),
    )
