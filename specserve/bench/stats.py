"""Statistics of paired measurements: pure functions over numbers, no clock, no global
randomness."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 1000
CONFIDENCE = 0.95

_T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 0.975 for 1 to 10 degrees of freedom (any table of the distribution)."""


@dataclass(frozen=True)
class Interval:
    """An estimate with the interval that holds it in 95 of 100 repetitions."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """Percentiles of one quantity, in its own unit."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float


def percentile(ordered: Sequence[float], q: float) -> float:
    """Percentile of sorted numbers with linear interpolation.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.5
    """
    if not ordered:
        raise ValueError("no values")
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    if not values:
        return None
    return math.fsum(values) / len(values)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and percentiles of what is known; None of nothing."""
    ordered = sorted(v for v in values if v is not None)
    if not ordered:
        return None
    return Spread(
        n=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
    )


def paired_ratio(
    numerator: Mapping[str, float], denominator: Mapping[str, float], *, seed: int = 0
) -> Interval | None:
    """Ratio of medians over the prompts that both arms answered, with a bootstrap interval.

    Prompts are drawn with replacement, both arms of a prompt together. None with fewer than two
    common prompts. Percentile bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap,
    ch. 13.
    """
    keys = sorted(numerator.keys() & denominator.keys())
    if len(keys) < 2:
        return None
    pairs = [(numerator[k], denominator[k]) for k in keys]
    value = median(a for a, _ in pairs) / median(b for _, b in pairs)
    rng = random.Random(seed)  # noqa: S311 resampling, not cryptography
    drawn: list[float] = []
    for _ in range(RESAMPLES):
        sample = rng.choices(pairs, k=len(pairs))
        drawn.append(median(a for a, _ in sample) / median(b for _, b in sample))
    drawn.sort()
    tail = (1 - CONFIDENCE) / 2 * 100
    return Interval(value, percentile(drawn, tail), percentile(drawn, 100 - tail))


def block_half_width(arms: Sequence[Sequence[float]]) -> float | None:
    """Half width (natural log) of the 95 % interval of a ratio of two arms, from the noise of equal
    blocks.

    ``arms`` holds, per arm, one positive figure a block. Blocks of one arm measure the same thing,
    so their spread is noise: pooled variance of the logarithms, Student's t with the pooled degrees
    of freedom. None when an arm has no block, or none has two.

    >>> round(block_half_width([[1.0, 1.0], [2.0, 2.0]]), 3)
    0.0
    >>> round(block_half_width([[1.0, 1.1], [2.0, 2.1]]), 3)
    0.23
    """
    degrees, squares = 0, 0.0
    for blocks in arms:
        if not blocks:
            return None
        logs = [math.log(b) for b in blocks]
        centre = math.fsum(logs) / len(logs)
        squares += math.fsum((x - centre) ** 2 for x in logs)
        degrees += len(logs) - 1
    if degrees < 1:
        return None
    t = 1.96 + 2.5 / degrees
    if degrees <= len(_T_975):
        t = _T_975[degrees - 1]
    return t * math.sqrt(squares / degrees * sum(1 / len(blocks) for blocks in arms))


def widen(interval: Interval, half_width: float) -> Interval:
    """The interval with a second, independent source of noise added (both as natural logs)."""
    low = math.hypot(math.log(interval.value / interval.low), half_width)
    high = math.hypot(math.log(interval.high / interval.value), half_width)
    return Interval(
        interval.value, interval.value * math.exp(-low), interval.value * math.exp(high)
    )


def drift(blocks: Sequence[float]) -> float:
    """Largest ratio between two blocks of one arm, minus 1.

    >>> round(drift([1.0, 1.2, 1.1]), 3)
    0.2
    """
    if not blocks:
        return 0.0
    return max(blocks) / min(blocks) - 1
