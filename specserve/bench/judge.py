"""From blocks to verdicts: is the second arm faster, and is that sound? By workload and load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Literal

from specserve.bench import stats
from specserve.bench.result import BenchCheck, Block, Result, Speculation
from specserve.bench.stats import Interval, Spread

CellVerdict = Literal["faster", "slower", "no difference", "inconclusive", "unsound"]

MIN_PROMPTS = 8
"""Fewer paired prompts than this say too little about other prompts."""
MAX_ERROR_SHARE = 0.02
MAX_DRIFT = 0.25
"""Two equal blocks further apart than this: the machine changed while it was measured."""
MIN_STREAM_SHARE = 0.02
"""An answer whose tokens all arrive in this last share of its time was not streamed."""
BURST_TPOT_SECONDS = 0.001
"""And its tokens came faster than any engine makes them; so a short answer after a long wait is
no burst."""
MAX_BURST_SHARE = 0.1
MAX_LATE_SECONDS = 1.0
"""A replayed request that was sent this late met another load than the recorded one."""
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
class BenchCell:
    """Both arms at one workload and concurrency."""

    workload: str
    concurrency: int
    baseline: ArmCell
    speculative: ArmCell
    verdict: CellVerdict
    speedup: Interval | None
    """Baseline TPOT / speculative TPOT; None when unsound."""
    throughput_speedup: float | None
    ttft_ratio: float | None
    """Speculative median TTFT / the baseline's: above 1 the first token comes later."""
    noise: float | None
    """Half width, as a ratio minus 1, that equal blocks alone explain."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchVerdict:
    """Two arms, judged once: whatever is printed, drawn or advised reads it here."""

    result: Result
    """Of the two arms; the first is the baseline."""
    cells: tuple[BenchCell, ...]
    """Every cell in which both arms were measured."""
    failed: tuple[BenchCheck, ...]
    """Checks that the second arm fails and the baseline passes."""


def verdicts(result: Result) -> tuple[BenchVerdict, ...]:
    """The first arm against each of the others."""
    base, *others = result.arms
    if len(others) < 2:
        return (verdict(result),)
    out = []
    for other in others:
        names = (base.name, other.name)
        pair = result.model_copy(
            update={
                "arms": [base, other],
                "title": f"{result.title}, {other.name}",
                "blocks": [b for b in result.blocks if b.arm in names],
                "answers": [a for a in result.answers if a.arm in names],
                "checks": [c for c in result.checks if c.arm in names],
                "searches": [s for s in result.searches if s.arm in names],
            }
        )
        out.append(verdict(pair))
    return tuple(out)


def verdict(result: Result) -> BenchVerdict:
    """Judge a result of two arms; one of a single arm has no cell."""
    base, *others = (arm.name for arm in result.arms)
    cells = []
    for workload, concurrency in sorted({(b.workload, b.concurrency) for b in result.blocks}):
        here = [b for b in result.blocks if (b.workload, b.concurrency) == (workload, concurrency)]
        first = [b for b in here if b.arm == base]
        second = [b for b in here if b.arm in others]
        if first and second:
            cells.append(_cell(first, second))
    failed = [c for c in result.checks if c.status == "FAIL"]
    known = {c.name for c in failed if c.arm == base}
    return BenchVerdict(result, tuple(cells), tuple(c for c in failed if c.name not in known))


def drops(old: Sequence[BenchVerdict], new: Sequence[BenchVerdict], share: float) -> list[str]:
    """Where the newer result is worse by more than this share, or no longer says, in the cells of
    both.

    Results without a cell in common cannot be compared, which is no pass either.
    """
    before, after = (
        {(n, c.workload, c.concurrency): c for n, pair in enumerate(pairs) for c in pair.cells}
        for pairs in (old, new)
    )
    both = [(before[key], cell) for key, cell in after.items() if key in before]
    if not both:
        return ["no workload and concurrency was measured in both results"]
    out = []
    for was, cell in both:
        place = f"of {cell.workload} at {cell.concurrency}"
        out += _drop(f"speedup {place}", _speedup(was), _speedup(cell), share)
        lengths = (was.speculative.mean_acceptance_length, cell.speculative.mean_acceptance_length)
        out += _drop(f"acceptance length {place}", *lengths, share)
    return out


def _speedup(cell: BenchCell) -> float | None:
    if cell.speedup is None:
        return None
    return cell.speedup.value


def _drop(name: str, then: float | None, now: float | None, share: float) -> list[str]:
    if then is None:
        return []
    if now is None:
        return [f"{name} was {then:.2f} and is not known now"]
    if now < then * (1 - share):
        return [f"{name} fell from {then:.2f} to {now:.2f}"]
    return []


def _cell(first: Sequence[Block], second: Sequence[Block]) -> BenchCell:
    baseline, speculative = summarise(first), summarise(second)
    ours, theirs = _by_prompt(first), _by_prompt(second)
    ratio = stats.paired_ratio(ours, theirs)
    half = stats.block_half_width([_block_medians(first), _block_medians(second)])
    noise = None
    if half is not None:
        noise = math.exp(half) - 1
        if ratio is not None:
            ratio = stats.widen(ratio, half)
    warnings = _warnings(first, second, paired=len(ours.keys() & theirs.keys()))
    verdict: CellVerdict = "unsound"
    throughput = ttft = None
    if warnings:
        ratio = None
    else:
        verdict = _judge(ratio, half)
        throughput, ttft = _throughput(baseline, speculative), _ttft(baseline, speculative)
    return BenchCell(
        workload=first[0].workload,
        concurrency=first[0].concurrency,
        baseline=baseline,
        speculative=speculative,
        verdict=verdict,
        speedup=ratio,
        throughput_speedup=throughput,
        ttft_ratio=ttft,
        noise=noise,
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


def _judge(ratio: Interval | None, half: float | None) -> CellVerdict:
    if ratio is None or half is None:
        return "inconclusive"
    # Asked first: with many requests the interval of two equal servers may lie just above 1.
    if ratio.low > 1 - SAME_WITHIN and ratio.high < 1 + SAME_WITHIN:
        return "no difference"
    if f"{ratio.value:.2f}" == "1.00":
        return "inconclusive"
    if ratio.low > 1:
        return "faster"
    if ratio.high < 1:
        return "slower"
    return "inconclusive"


def _warnings(first: Sequence[Block], second: Sequence[Block], *, paired: int) -> list[str]:
    """Why no verdict may be drawn, each with what to run next."""
    out = []
    if paired < MIN_PROMPTS:
        seen = f"{paired} prompts were answered by both arms"
        out.append(f"{seen}; at least {MIN_PROMPTS} are needed: raise --prompts")
    for blocks in (first, second):
        requests = sum(len(b.samples) for b in blocks)
        errors = sum(not s.ok for b in blocks for s in b.samples)
        if errors > MAX_ERROR_SHARE * requests:
            seen = f"{errors} of {requests} requests of '{blocks[0].arm}' failed"
            out.append(f"{seen}: look at its log, then run again")
    bursts = [*_bursts(first), *_bursts(second)]
    if not bursts:  # tokens that arrive together have no time between them that could drift
        out += [*_drift(first), *_drift(second)]
    return [*out, *bursts, *_lateness(first), *_lateness(second)]


def _drift(blocks: Sequence[Block]) -> list[str]:
    moved = stats.drift(_block_medians(blocks))
    if moved <= MAX_DRIFT:
        return []
    seen = f"equal blocks of '{blocks[0].arm}' differ by {moved:.0%}"
    return [f"{seen}; at most {MAX_DRIFT:.0%} is sound: quiet the machine or raise --repeat"]


def _bursts(blocks: Sequence[Block]) -> list[str]:
    """Tokens that arrive together have no time between them: a buffer held them back."""
    long = held = 0
    for sample in (s for b in blocks for s in b.samples):
        tokens, tpot = sample.output_tokens or 0, sample.tpot_seconds
        if tokens >= 8 and tpot is not None and sample.e2e_seconds and sample.ttft_seconds:
            long += 1
            held += _is_held(sample.e2e_seconds, tpot, tokens)
    if held <= MAX_BURST_SHARE * long:
        return []
    seen = f"{held} of {long} answers of '{blocks[0].arm}' came in one burst, so TPOT is not known"
    return [f"{seen}: look for a proxy that buffers, or for too few cores"]


def _is_held(e2e: float, tpot: float, tokens: int) -> bool:
    """Seconds and tokens of one answer.

    A buffer; and half a second of answer after half a minute in a queue:

    >>> _is_held(1.0, 0.0001, 64), _is_held(30.0, 0.004, 128)
    (True, False)
    """
    return tpot < BURST_TPOT_SECONDS and tpot * (tokens - 1) < MIN_STREAM_SHARE * e2e


def _lateness(blocks: Sequence[Block]) -> list[str]:
    late = [s.late_seconds for b in blocks for s in b.samples if s.late_seconds is not None]
    over = [s for s in late if s > MAX_LATE_SECONDS]
    if len(over) <= MAX_ERROR_SHARE * len(late):
        return []
    seen = f"{len(over)} of {len(late)} replayed requests to '{blocks[0].arm}'"
    said = f"{seen} were sent up to {max(over):.1f} s late"
    return [f"{said}: raise --concurrency, which bounds what may be in flight"]


def _tpots(block: Block) -> list[tuple[str, float]]:
    """Prompt and TPOT in seconds of every answer that has one."""
    known = [(s.prompt_id, s.tpot_seconds) for s in block.samples]
    return [(prompt, tpot) for prompt, tpot in known if tpot is not None and tpot > 0]


def _by_prompt(blocks: Sequence[Block]) -> dict[str, float]:
    """Prompt -> median TPOT over the blocks, in seconds."""
    seen: dict[str, list[float]] = {}
    for block in blocks:
        for prompt, tpot in _tpots(block):
            seen.setdefault(prompt, []).append(tpot)
    return {prompt: median(values) for prompt, values in seen.items()}


def _block_medians(blocks: Sequence[Block]) -> list[float]:
    each = [[tpot for _, tpot in _tpots(block)] for block in blocks]
    return [median(values) for values in each if values]


def total(blocks: Sequence[Block]) -> Speculation:
    """Speculation over several blocks; zeros when none of them drafted, which make no rate."""
    known = [b.speculation for b in blocks if b.speculation is not None]
    positions = zip_longest(*(s.accepted_per_position for s in known), fillvalue=0.0)
    return Speculation(
        drafts=sum(s.drafts for s in known),
        draft_tokens=sum(s.draft_tokens for s in known),
        accepted_tokens=sum(s.accepted_tokens for s in known),
        accepted_per_position=[sum(accepted) for accepted in positions],
    )


def summarise(blocks: Sequence[Block]) -> ArmCell:
    """One arm's blocks of one cell as percentiles and rates."""
    samples = [s for b in blocks for s in b.samples]
    good = [s for s in samples if s.ok]
    spec = total(blocks)
    hits = [b.prefix_cache_hit_ratio for b in blocks if b.prefix_cache_hit_ratio is not None]
    seconds = sum(b.duration_seconds for b in blocks) or math.inf
    return ArmCell(
        arm=blocks[0].arm,
        requests=len(samples),
        errors=len(samples) - len(good),
        ttft=stats.spread(s.ttft_seconds for s in good),
        tpot=stats.spread(s.tpot_seconds for s in good),
        itl=stats.spread(gap for s in good for gap in s.itl_seconds),
        e2e=stats.spread(s.e2e_seconds for s in good),
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=sum(s.output_tokens or 0 for s in good) / seconds,
        prefix_cache_hit_ratio=stats.mean(hits),
        acceptance_rate=spec.acceptance_rate,
        mean_acceptance_length=spec.mean_acceptance_length,
        acceptance_per_position=tuple(spec.acceptance_per_position),
    )
