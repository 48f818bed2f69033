"""What speculation costs and what it brings: every formula of it, once.

Standard library only: the control loads it inside vLLM's interpreter.

Units are seconds, bytes, operations and tokens. ``k`` is the number of tokens drafted per sequence
and step; a step that drafted k verifies k + 1 positions of each sequence. Two yardsticks are never
mixed: *off* is an engine started without speculation; *k = 0* is the engine with its draft loaded
that drafts nothing, which for a draft with weights still costs one forward of the draft a step
(vLLM 0.32, v1/spec_decode/llm_base_proposer.py:propose, read 2026-11-30).

Sources: Leviathan et al., arXiv 2211.17192 (tokens of a step, 2023); Liu et al., arXiv 2406.14066
(goodput, 2024); Chen et al., arXiv 2408.11049 (KV reads at long contexts, 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LARGEST_K = 8
"""The largest k that is weighed where the best one is sought."""


def expected_tokens(by_position: Sequence[float], k: int) -> float:
    """Tokens that one step gives a sequence: 1 + the sum of the acceptance of the first k
    positions.

    ``by_position`` is unconditional, as vLLM's counter per position / drafts; positions beyond it
    are accepted as the last two say, each as likely after the one before it.

    >>> expected_tokens([0.8, 0.6], 2)
    2.4
    >>> round(expected_tokens([0.8, 0.6], 3), 4)
    2.85
    """
    known = list(by_position[:k])
    while len(known) < k and known:
        before = 1.0
        if len(known) > 1:
            before = known[-2]
        chance = 0.0
        if before > 0:
            chance = min(1.0, known[-1] / before)
        known.append(known[-1] * chance)
    return 1 + sum(known)


def positions(chance: float, k: int) -> tuple[float, ...]:
    """Acceptance by position where each token is accepted with the same chance after those before
    it: chance, chance^2, ... (arXiv 2211.17192, formula 1).

    >>> positions(0.5, 3)
    (0.5, 0.25, 0.125)
    """
    return tuple(chance**i for i in range(1, k + 1))


def acceptance_rate(tokens_per_step: float, k: float) -> float:
    """Accepted / drafted tokens: (tokens per step - 1) / k.

    >>> acceptance_rate(2.5, 3)
    0.5
    """
    return (tokens_per_step - 1) / k


def chance_of(rate: float, k: int) -> float:
    """The chance per token behind an acceptance rate of k drafted tokens, so that other k can be
    reckoned: the root of (chance + chance^2 + ... + chance^k) / k = rate.

    >>> round(chance_of(0.5, 2), 3), chance_of(1.0, 4), chance_of(0.0, 4)
    (0.618, 1.0, 0.0)
    """
    return _root(lambda chance: sum(positions(chance, k)) / k - rate)


def gain(tokens_per_step: float, cost: float) -> float:
    """The speedup: tokens of a step / how many times as long it takes as a step without.

    >>> gain(2.4, 1.2)
    2.0
    """
    return tokens_per_step / cost


def break_even_rate(cost: float, drafted: float) -> float | None:
    """The acceptance rate at which a token costs the same with and without speculation; None where
    no acceptance pays.

    A step gives 1 + rate x drafted tokens and takes ``cost`` times as long, so they meet where
    1 + rate x drafted = cost.

    >>> round(break_even_rate(1.6, 3.0), 6), break_even_rate(5.0, 3.0), break_even_rate(0.9, 3.0)
    (0.2, None, 0.0)
    """
    rate = (cost - 1) / drafted
    if rate > 1:
        return None
    return max(0.0, rate)


def margin(rate: float, cost: float, drafted: float) -> float:
    """How far an acceptance rate lies above what pays; negative is slower, also where no acceptance
    pays.

    >>> round(margin(0.5, 1.6, 3.0), 6), round(margin(0.5, 7.0, 3.0), 6)
    (0.3, -1.5)
    """
    return rate - (cost - 1) / drafted


def break_even_chance(part: float, k: int) -> float | None:
    """The chance per token at which k drafts pay that each cost ``part`` of the target's step, by
    bytes alone: the root of chance + ... + chance^k = k x part. None where none does.

    >>> round(break_even_chance(0.3, 3), 3), break_even_chance(1.0, 3)
    (0.509, None)
    """
    if part >= 1:
        return None
    return _root(lambda chance: sum(positions(chance, k)) - k * part)


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function of 0 to 1 crosses 0; the end of the range that is nearer if it does
    not."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    if low == 0.0:
        return low
    return high


def tokens_per_step(output_tokens: float, accepted_tokens: float) -> float:
    """Tokens of a sequence per step it took part in: every token that no draft gave cost a step.

    >>> tokens_per_step(100, 50)
    2.0
    """
    return output_tokens / max(output_tokens - accepted_tokens, 1.0)


@dataclass(frozen=True)
class Curve:
    """Something over a rising axis, as it was measured: linear between two points; below the first
    its value holds, and beyond the last nothing is known.

    >>> curve = Curve(((4.0, 1.0), (16.0, 2.0)))
    >>> curve.at(10), curve.at(1), curve.at(17)
    (1.5, 1.0, None)
    """

    points: tuple[tuple[float, float], ...]

    def at(self, place: float) -> float | None:
        """The value at a place of the axis."""
        if not self.points or place > self.points[-1][0]:
            return None
        left, value = self.points[0]
        if place <= left:
            return value
        for right, there in self.points[1:]:
            if place <= right:
                return value + (place - left) / (right - left) * (there - value)
            left, value = right, there
        return value
