"""An engine in arithmetic, for the live control: what a step costs, what it accepts, traffic that changes.

A case is a cost law, a method and a timeline of segments. The control sees sampled steps with noise and hiccups; what it
is credited with is the expectation of the same step, so a ratio carries no luck. A fixed length is computed over the same
timeline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from specserve.engine.inside.control import Law, SeenStep

LONGEST = 8
NOISE = 0.06
HICCUP, HICCUP_FACTOR = 0.01, 4.0
SEGMENT_SECONDS = 1.5
SLOWEST_STEP = 0.25
"""Seconds at k = 0: nobody serves a load at which every token takes longer."""
FAMILIES = ("affine", "knee", "padded", "memory-compute", "foreign")
"""The last one is the family that the law was not tuned on: plateaus, dips, cost that grows with the context."""

Cost = Callable[[int, int, float], float]
"""Sequences in the step, verified tokens of the step, context in tokens -> seconds."""


@dataclass(frozen=True)
class Kind:
    """One kind of request: chance of a draft at all, and of each next token."""

    found: float
    first: float
    further: float

    def chances(self) -> list[float]:
        """Per position from 1: that a draft has been accepted that far."""
        chances, chance, keep = [], 1.0, self.first
        for _ in range(LONGEST):
            chance *= keep
            chances.append(chance)
            keep = min(0.99, self.further)
        return chances


@dataclass(frozen=True)
class Segment:
    """A stretch of time in which nothing changes."""

    seconds: float
    kinds: tuple[int, ...]
    """Per running request: its kind."""
    context: float
    phase: int


@dataclass
class Case:
    """Everything that decides how fast each length is."""

    name: str
    lookup: bool
    cost: Cost
    draft_seconds: Callable[[int, int], float]
    """Sequences and length -> seconds of drafting; at length 0 what remains."""
    kinds: tuple[Kind, ...]
    timeline: tuple[Segment, ...]
    seed: int

    def __post_init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], float, int], tuple[float, float]] = {}

    @cached_property
    def _chances(self) -> list[list[float]]:
        return [kind.chances() for kind in self.kinds]

    def expectation(self, segment: Segment, k: int) -> tuple[float, float]:
        """Expected tokens and seconds of one step."""
        counts = tuple(segment.kinds.count(kind) for kind in range(len(self.kinds)))
        key = (counts, segment.context, k)
        if key not in self._known:
            self._known[key] = self._expectation(counts, segment.context, k)
        return self._known[key]

    def _expectation(self, counts: tuple[int, ...], context: float, k: int) -> tuple[float, float]:
        batch = sum(counts)
        tokens = float(batch)
        for kind, count in enumerate(counts):
            found = self.kinds[kind].found
            tokens += count * found * sum(self._chances[kind][:k])
        seconds = 0.0
        for having, chance in enumerate(self._having(counts)):
            if chance > 1e-9:
                seconds += chance * self.cost(batch, batch + k * having, context)
        return tokens, seconds + self.draft_seconds(batch, k)

    def _having(self, counts: tuple[int, ...]) -> list[float]:
        """Chance that 0, 1, ... requests of the step have a draft."""
        spread = [1.0]
        for kind, count in enumerate(counts):
            found = self.kinds[kind].found
            for _ in range(count):
                if found >= 1:
                    spread = [0.0, *spread]
                    continue
                spread = [
                    (spread[i] if i < len(spread) else 0.0) * (1 - found)
                    + (spread[i - 1] if i else 0.0) * found
                    for i in range(len(spread) + 1)
                ]
        return spread

    def sampled(self, segment: Segment, k: int, rng: random.Random) -> tuple[list[int], list[int]]:
        """Drafted and accepted tokens per request of one step."""
        drafted, accepted = [], []
        for kind in segment.kinds:
            if k == 0 or rng.random() >= self.kinds[kind].found:
                drafted.append(0)
                accepted.append(0)
                continue
            drafted.append(k)
            draw, length = rng.random(), 0
            for chance in self._chances[kind][:k]:
                if draw >= chance:
                    break
                length += 1
            accepted.append(length)
        return drafted, accepted

    def rate(self, segment: Segment, k: int) -> float:
        """Tokens per second with drafts of k."""
        tokens, seconds = self.expectation(segment, k)
        return tokens / seconds


@dataclass(frozen=True)
class Played:
    """What one case gave."""

    name: str
    live: float
    fixed: tuple[float, ...]
    """Tokens per second by length from 0."""
    off: float
    recoveries: tuple[float, ...]
    """Live against the best length from 5 to 15 s after each change of traffic."""
    lost: float

    @property
    def against_zero(self) -> float:
        """Live against k = 0."""
        return self.live / self.fixed[0]

    @property
    def against_best(self) -> float:
        """Live against the best fixed length."""
        return self.live / max(self.fixed)


def play(case: Case) -> Played:
    """The control over the whole timeline, and every fixed length."""
    rng = random.Random(case.seed)
    law = Law(LONGEST, lookup=case.lookup)
    tokens = elapsed = 0.0
    asked = 0  # the length of the drafts that the present step verifies
    since, recovery, phase = 0.0, [0.0, 0.0], 0
    recoveries: list[float] = []
    for segment in case.timeline:
        if segment.phase != phase:
            if recovery[1]:
                recoveries.append(recovery[0] / recovery[1])
            phase, since, recovery = segment.phase, 0.0, [0.0, 0.0]
        left, batch = segment.seconds, len(segment.kinds)
        best = max(case.rate(segment, k) for k in range(LONGEST + 1))
        while left > 0:
            following = law.choose(batch).tokens
            drafted, accepted = case.sampled(segment, asked, rng)
            verified = batch + sum(drafted)
            seen = case.cost(batch, verified, segment.context)
            seen += case.draft_seconds(batch, following)
            seen *= max(0.5, rng.gauss(1.0, NOISE))
            if rng.random() < HICCUP:
                seen *= HICCUP_FACTOR
            made, took = case.expectation(segment, asked)
            took += case.draft_seconds(batch, following) - case.draft_seconds(batch, asked)
            law.observe(
                SeenStep(asked, drafted, accepted, seen, None if case.lookup else following)
            )
            tokens += made
            elapsed += took
            left -= took
            since += took
            if phase and 5.0 <= since <= 15.0:
                recovery[0] += made
                recovery[1] += took * best
            asked = following
    if recovery[1]:
        recoveries.append(recovery[0] / recovery[1])
    total = sum(segment.seconds for segment in case.timeline)
    fixed = tuple(
        sum(segment.seconds * case.rate(segment, k) for segment in case.timeline) / total
        for k in range(LONGEST + 1)
    )
    off = sum(
        segment.seconds
        * len(segment.kinds)
        / case.cost(len(segment.kinds), len(segment.kinds), segment.context)
        for segment in case.timeline
    )
    return Played(case.name, tokens / elapsed, fixed, off / total, tuple(recoveries), law.lost)


def cost_law(family: str, rng: random.Random) -> Cost:
    """A cost law of a family: a step of one request takes 8 to 60 ms."""
    base = rng.uniform(0.008, 0.06)
    if family == "affine":
        per_token = base * 10 ** rng.uniform(-3, -0.25)
        return lambda batch, verified, context: base + per_token * verified
    if family == "knee":
        knee = 2 ** rng.uniform(2, 9)
        slope = rng.uniform(0.5, 1.2)
        return lambda batch, verified, context: base * (1 + slope * max(0.0, verified / knee - 1))
    if family == "padded":
        per_token = base * 10 ** rng.uniform(-2.5, -0.7)
        sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 4097, 16)]

        def padded(batch: int, verified: int, context: float) -> float:
            size = next((each for each in sizes if each >= verified), verified)
            return base + per_token * size

        return padded
    if family == "memory-compute":
        crossing = 2 ** rng.uniform(3, 9)
        cache = base * 10 ** rng.uniform(-3.5, -2)
        return lambda batch, verified, context: (
            base * math.hypot(1.0, verified / crossing) + cache * batch * context / 1000
        )
    plateau = 2 ** rng.uniform(1, 6)
    step = base * rng.uniform(0.05, 0.5)
    dip = rng.uniform(0.0, 0.12)
    grows = base * 10 ** rng.uniform(-2.5, -0.7)

    def foreign(batch: int, verified: int, context: float) -> float:
        level = base + step * math.floor((verified - 1) / plateau)
        if verified % 3 == 0:
            level *= 1 - dip
        return level + grows * context / 1000 * (1 + 0.1 * math.sqrt(batch))

    return foreign


def case(seed: int) -> Case:
    """The case of a seed: family, method, load and traffic follow from it."""
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    lookup = rng.random() < 0.5
    cost = cost_law(family, rng)
    single = cost(1, 1, 500.0)
    if lookup:
        kinds = tuple(
            Kind(found, first, further)
            for found, first, further in (
                (rng.uniform(0.0, 0.25), rng.uniform(0.1, 0.5), 0.5),
                (rng.uniform(0.2, 0.6), rng.uniform(0.4, 0.8), 0.8),
                (rng.uniform(0.6, 0.95), rng.uniform(0.8, 0.97), 0.93),
            )
        )

        def draft_seconds(batch: int, k: int) -> float:
            return 0.0
    else:
        kinds = tuple(
            Kind(1.0, first, further)
            for first, further in (
                (rng.uniform(0.1, 0.45), 0.4),
                (rng.uniform(0.5, 0.75), 0.7),
                (rng.uniform(0.8, 0.95), rng.uniform(0.8, 0.95)),
            )
        )
        share = rng.uniform(0.01, 0.12)

        def draft_seconds(batch: int, k: int) -> float:
            return share * single * max(1, k) * (1 + batch / 256)

    load = rng.choice((1, 1, 2, 4, 8, 16, 32, 64, 128, 256))
    while load > 1 and cost(load, load, 500.0) > SLOWEST_STEP:
        load //= 2
    traffic = rng.choice(("steady", "mix", "load", "bursts"))
    timeline = tuple(_timeline(rng, traffic, load))
    name = f"{seed} {family} {'lookup' if lookup else 'model'} load {load} {traffic}"
    return Case(name, lookup, cost, draft_seconds, kinds, timeline, seed)


def _timeline(rng: random.Random, traffic: str, load: int) -> list[Segment]:
    """Two minutes of decoding."""
    weights = _weights(rng)
    phase, now, changes = 0, 0.0, 30.0
    base, context = load, rng.uniform(200, 1500)
    segments: list[Segment] = []
    held: list[int] = []
    while now < 120:
        if now >= changes and traffic != "steady":
            changes += 30.0
            phase += 1
            if traffic == "mix":
                weights = _weights(rng)
                held = []
            elif traffic == "load":
                base = max(1, int(load * 2 ** rng.uniform(-2.5, 2.5)))
                base = min(base, 256)
        batch = base
        if traffic == "bursts" and rng.random() < 0.15:
            batch = min(256, base * 4)
        batch = max(1, min(256, round(batch * rng.uniform(0.9, 1.1))))
        held = [each for each in held if rng.random() < 0.7][:batch]
        held += rng.choices(range(3), weights, k=batch - len(held))
        context = max(100.0, context * rng.uniform(0.9, 1.12))
        if context > 8000:
            context = 500.0
        segments.append(Segment(SEGMENT_SECONDS, tuple(held), round(context), phase))
        now += SEGMENT_SECONDS
    return segments


def _weights(rng: random.Random) -> Sequence[float]:
    """Shares of the three kinds; one often dominates."""
    main = rng.randrange(3)
    return [8.0 if kind == main else rng.uniform(0.0, 2.0) for kind in range(3)]
