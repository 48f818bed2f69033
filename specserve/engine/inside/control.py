"""The law of the live control: how many tokens the next draft should have.

Runs inside vLLM's interpreter: standard library only, no vLLM. Three things are learned while
serving, per batch size: how long a step takes over the tokens that it verifies, how often a draft
reaches a position, how often that position is accepted. A step that ran with k tokens tells of
every smaller k too. The k with the most expected tokens per second wins, after a margin; what is
not known well enough to be ruled out is tried, and what trying costs is kept under a share of the
time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.engine.inside.economics import expected_tokens, positions

MARGIN = 0.012
"""What speculation must gain over k = 0, and what a change of k must gain over the present k is a
third of it."""
CREDIT_STEPS = 8
"""Steps that trying may have gained and lose again: one step's luck is not a loss."""
BUDGET = 0.006
"""Share of the time that may be lost to trying other lengths."""
ZERO_BUDGET = 0.003
"""Share of the time that may be lost to seeing k = 0 again."""
ALLOWANCE_STEPS = 4
"""Steps that may be lost to trying before any time has passed."""
GOOD = 0.85
"""Acceptance for which the length of a probe is chosen: what would be best if traffic were good."""
_SAMPLES = 160
"""Drafts that the mean of an acceptance remembers."""
_RECENT = 16
_NOISE = 0.06
"""Relative deviation of a step's time, until it is known."""
_UNSEEN = 0.06
"""Relative doubt of a step's time, per token of distance from the nearest measured point."""
_AGEING = 0.997
_BORROWED = 2.0
"""Steps that the times of other batch sizes count for at a new one."""
_MIXED_UP_TO = 8
"""Batch sizes up to which it matters how many requests of a step have a draft at all."""


@dataclass(frozen=True)
class SeenStep:
    """What one step of the engine showed."""

    asked: int
    """Tokens per draft that were asked for when these drafts were made."""
    drafted: Sequence[int]
    """Per request: tokens that were verified."""
    accepted: Sequence[int]
    """Per request: how many of them were accepted."""
    seconds: float | None
    """None where the time says nothing: a prefill in the step, or a pause before it."""
    next_asked: int | None = None
    """Tokens that this step drafted for the next one; None where drafting costs nothing."""


@dataclass(frozen=True)
class Decision:
    """A length, and why."""

    tokens: int
    why: str
    """``best``, ``off``, ``probe``, ``start``."""
    rate: float | None = None
    """Expected tokens per second of one request."""


class AcceptanceMeans:
    """How often a draft reaches a position, and how often that position is accepted.

    Both are shares of all requests of a step: a lookup that finds nothing reaches no position.
    A long memory that gives way to a short one as soon as the two disagree.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.reached = [0.0] * (longest + 1)
        self.taken = [0.0] * (longest + 1)
        self.samples = [0.0] * (longest + 1)
        self._recent_reached = [0.0] * (longest + 1)
        self._recent_taken = [0.0] * (longest + 1)
        self._recent_samples = [0.0] * (longest + 1)
        self._variance = 1.0

    def learn(self, step: SeenStep) -> None:
        """Counts one step; positions beyond the asked length only age."""
        batch, asked = len(step.drafted), min(step.asked, self._longest)
        for position in range(asked + 1, self._longest + 1):
            self.samples[position] *= _AGEING
            self._recent_samples[position] *= _AGEING
        if batch == 0 or asked == 0:
            return
        reached, taken = _at_least(step.drafted, asked), _at_least(step.accepted, asked)
        mean = sum(taken) / batch
        square = sum(n * n for n in step.accepted) / batch
        spread = max(square - mean * mean, (mean - self.expected(asked) + 1) ** 2 / 2)
        self._variance += 0.05 * (min(spread, asked * asked) - self._variance)
        long, short = max(_SAMPLES, 12 * batch), max(_RECENT, 2 * batch)
        for position in range(1, asked + 1):
            was, now = reached[position - 1] / batch, taken[position - 1] / batch
            self._blend(self.reached, self.taken, self.samples, position, (was, now, batch, long))
            self._blend(
                self._recent_reached,
                self._recent_taken,
                self._recent_samples,
                position,
                (was, now, batch, short),
            )
        self._notice_change(asked)

    @staticmethod
    def _blend(
        reached: list[float],
        taken: list[float],
        samples: list[float],
        position: int,
        seen: tuple[float, float, int, int],
    ) -> None:
        was, now, batch, most = seen
        samples[position] = min(samples[position] + batch, float(most))
        gain = min(1.0, batch / samples[position])
        reached[position] += gain * (was - reached[position])
        taken[position] += gain * (now - taken[position])

    def _notice_change(self, asked: int) -> None:
        if self._recent_samples[1] < _RECENT * 0.75:
            return
        gap = sum(self._recent_taken[1 : asked + 1]) - sum(self.taken[1 : asked + 1])
        doubt = math.sqrt(max(self._variance, 0.05) / self._recent_samples[1])
        if abs(gap) > 3.2 * doubt:
            for position in range(1, asked + 1):
                self.reached[position] = self._recent_reached[position]
                self.taken[position] = self._recent_taken[position]
                self.samples[position] = self._recent_samples[position]
            for position in range(asked + 1, self._longest + 1):
                self.samples[position] = min(self.samples[position], 1.0)

    def expected(self, tokens: int) -> float:
        """Tokens per step and request with drafts of this length, the target's own included.

        >>> acceptance = AcceptanceMeans(2)
        >>> acceptance.learn(SeenStep(2, [2, 2], [2, 1], None))
        >>> acceptance.expected(0), acceptance.expected(1), acceptance.expected(2)
        (1.0, 2.0, 2.5)
        """
        return 1.0 + sum(self.taken[1 : tokens + 1])

    def curves(self) -> tuple[list[float], list[float], list[float]]:
        """Per length from 0: expected tokens, verified draft tokens, doubt of the expected tokens.

        A position that is not known is expected to keep what the positions before it keep.
        """
        expected, verified, doubts = [1.0], [0.0], [0.0]
        before, kept, there, doubt = 1.0, 0.7, 1.0, 0.0
        for position in range(1, self._longest + 1):
            samples = self.samples[position]
            weight = samples / (samples + 2.0)
            guess = before * kept
            now = weight * self.taken[position] + (1 - weight) * guess
            now = min(now, before)
            there = weight * self.reached[position] + (1 - weight) * there
            if before > 0.02:
                kept = now / before
            before = now
            expected.append(expected[-1] + now)
            verified.append(verified[-1] + there)
            share = min(max(now, 0.02), 0.98)
            doubt += math.sqrt(share * (1 - share) / (samples + 2.0))
            doubts.append(doubt)
        return expected, verified, doubts


def _at_least(lengths: Sequence[int], longest: int) -> list[int]:
    """How many of the lengths reach 1, 2, ... longest.

    >>> _at_least([3, 0, 1], 3)
    [2, 1, 1]
    """
    counts = [0] * (longest + 1)
    for length in lengths:
        counts[min(length, longest)] += 1
    reaching, running = [0] * longest, 0
    for length in range(longest, 0, -1):
        running += counts[length]
        reaching[length - 1] = running
    return reaching


class StepTimes:
    """Seconds of a step at one batch size, over verified draft tokens per request."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.seconds = [0.0] * (longest + 1)
        self.visits = [0.0] * (longest + 1)
        self.steps = 0
        self.noise = _NOISE
        self._strays = 0
        self._borrowed = 0.0
        self.covered = 0.0

    @property
    def known(self) -> bool:
        """Whether any step was timed, or a neighbour's times stand in."""
        return any(self.seconds)

    def borrow(self, points: Sequence[tuple[float, float]], batch: float) -> None:
        """Starts from (verified tokens of the step, seconds) of other batch sizes, in order."""
        if not points:
            return
        self.seconds = [_along(points, batch * (1 + k)) for k in range(self._longest + 1)]
        self._borrowed = _BORROWED
        self.covered = points[-1][0] / batch - 1

    def learn(self, drafted: float, seconds: float) -> None:
        """One timed step. A single stray does not move the curve; strays in a row do."""
        low = min(int(drafted), self._longest)
        high = min(low + 1, self._longest)
        share = min(max(drafted - low, 0.0), 1.0)
        if not self.known:
            self.seconds = [seconds] * (self._longest + 1)
        guess = self.at(drafted)
        weight = (1 - share) * self.visits[low] + share * self.visits[high]
        if self.steps > 6 and weight > 2 and seconds > guess * (1.25 + 3 * self.noise):
            self._strays += 1
            if self._strays < 4:
                return
        else:
            self._strays = 0
        self.steps += 1
        if seconds < 0.55 * guess and weight <= 6:
            # What was seen before was the stray: a step is rarely too fast by chance.
            self.visits[low] = self.visits[high] = 0.0
            self._borrowed = 0.0
        if weight >= 1 and self._strays < 4:
            seconds = min(seconds, 1.5 * guess)
        error = max(-0.5, min(0.5, seconds / guess - 1))
        if weight > 2:
            self.noise += 0.03 * (min(abs(error) * 1.25, 0.5) - self.noise)
        if weight > 2 or self._borrowed:
            level = 1 + max(0.04, 0.3 / self.steps) * max(-0.3, min(0.3, error))
            self.seconds = [value * level for value in self.seconds]
        for node, part in ((low, 1 - share), (high, share)):
            if part <= 0:
                continue
            self.visits[node] = min(self.visits[node] + part, 60.0)
            gain = part / (self.visits[node] + self._borrowed)
            self.seconds[node] += min(1.0, gain) * (seconds - guess)
        self._fill()

    def _fill(self) -> None:
        """Nodes that were never seen follow their neighbours."""
        seen = [k for k in range(self._longest + 1) if self.visits[k] >= 0.5]
        if len(seen) < 2:
            return
        for k in range(self._longest + 1):
            if self.visits[k] >= 0.5:
                continue
            after = bisect_right(seen, k)
            if after == 0:
                left, right = seen[0], seen[1]
            elif after == len(seen):
                left, right = seen[-2], seen[-1]
            else:
                left, right = seen[after - 1], seen[after]
            slope = (self.seconds[right] - self.seconds[left]) / (right - left)
            if after == len(seen):
                self.seconds[k] = self.seconds[right] + max(slope, 0.0) * (k - right)
            else:
                self.seconds[k] = self.seconds[left] + slope * (k - left)

    def at(self, drafted: float) -> float:
        """Expected seconds with so many draft tokens per request."""
        low = int(drafted)
        if low >= self._longest:
            return self.seconds[self._longest]
        share = drafted - low
        return self.seconds[low] * (1 - share) + self.seconds[low + 1] * share

    def least(self, drafted: float) -> float:
        """Seconds of a step at best: where it was never seen, costs may stand still on half of the
        way from the longest seen below.
        """
        expected = self.at(drafted)
        node = min(int(drafted + 0.5), self._longest)
        if self.visits[node] < 0.5:
            below = max((k for k in range(node) if self.visits[k] >= 0.5), default=0)
            expected = min(expected, (expected + self.seconds[below]) / 2)
        return expected * max(0.4, 1 - 1.3 * self.doubt(drafted))

    def most(self, drafted: float) -> float:
        """Seconds of a step at worst: beyond what was seen, every token has its price."""
        seen = self.furthest
        if drafted <= seen:
            return self.at(drafted)
        return max(self.at(drafted), self.seconds[seen] * (1 + drafted) / (1 + seen))

    @property
    def furthest(self) -> int:
        """The most draft tokens per request that were timed."""
        return max((k for k in range(self._longest + 1) if self.visits[k] >= 0.5), default=0)

    def doubt(self, drafted: float) -> float:
        """Relative doubt of :meth:`at`."""
        node = min(int(drafted + 0.5), self._longest)
        if self.visits[node] >= 1:
            return self.noise / math.sqrt(self.visits[node])
        distance = min(
            (abs(node - k) for k in range(self._longest + 1) if self.visits[k] >= 1), default=4
        )
        return self.noise + _UNSEEN * distance


def _along(points: Sequence[tuple[float, float]], x: float) -> float:
    """A value on the line through points in rising order, at its ends carried on."""
    if len(points) == 1:
        return points[0][1]
    after = min(max(bisect_right([each for each, _ in points], x), 1), len(points) - 1)
    (left, low), (right, high) = points[after - 1], points[after]
    if right == left:
        return high
    value = low + (high - low) * (x - left) / (right - left)
    return max(value, 0.3 * min(low, high))


def size_class(batch: int) -> int:
    """Batch sizes that share a curve: each of its own up to 8, then steps of about an eighth.

    >>> [size_class(batch) for batch in (1, 8, 16, 17, 256)]
    [1, 8, 13, 14, 36]
    """
    if batch <= 8:
        return batch
    return 8 + int(math.log(batch / 8) / math.log(1.13) + 0.02)


class Law:
    """Chooses the length of the next draft, from what the steps before showed."""

    def __init__(self, longest: int, *, lookup: bool, first: Sequence[int] = ()) -> None:
        """``lookup``: drafting costs nothing, and k = 0 is as fast as no speculation.

        ``first``: the length to begin with, by batch size from 0; the last one reaches on.
        """
        self.longest = longest
        self.lookup = lookup
        self.acceptance = AcceptanceMeans(longest)
        self.times: dict[int, StepTimes] = {}
        self._batches: dict[int, float] = {}
        self._first = tuple(first)
        good = positions(GOOD, longest)
        self._if_good = [expected_tokens(good, k) for k in range(longest + 1)]
        self._current: dict[int, int] = {}
        self._probing: tuple[int, int] | None = None
        self._elapsed = 0.0
        self.lost = 0.0
        self._unprobed = 0
        self._quiet = 0
        self._unseen_zero: dict[int, int] = {}
        self._rates: dict[int, float] = {}
        self._typical = 0.0

    def choose(self, batch: int, most: int | None = None) -> Decision:
        """The length of the draft that the coming step makes, at most ``most``."""
        limit = self.longest
        if most is not None:
            limit = min(limit, most)
        size = size_class(batch)
        times = self._times(size, batch)
        if self._probing is not None:
            length, left = self._probing
            self._probing = None
            if left > 1:
                self._probing = (length, left - 1)
            return Decision(min(length, limit), "probe")
        if limit == 0:
            return Decision(0, "off")
        start = self._start(times, batch, limit)
        if start is not None:
            return start
        return self._weigh(times, batch, limit, size)

    def _times(self, size: int, batch: int) -> StepTimes:
        times = self.times.get(size)
        if times is None:
            times = StepTimes(self.longest)
            times.borrow(self._points(), batch)
            self.times[size] = times
            self._batches[size] = float(batch)
        return times

    def _points(self) -> list[tuple[float, float]]:
        """(Verified tokens of a step, seconds) wherever a step was timed."""
        points = []
        for size, times in self.times.items():
            for k, visits in enumerate(times.visits):
                if visits >= 1:
                    points.append((self._batches[size] * (1 + k), times.seconds[k]))
        return sorted(points)

    def _start(self, times: StepTimes, batch: int, limit: int) -> Decision | None:
        """The first steps at a batch size: what the schedule says, else none and a short draft."""
        if self._first and times.visits[0] < 1 and times.steps < 4:
            length = self._first[min(batch, len(self._first) - 1)]
            return Decision(min(length, limit), "start")
        if times.visits[0] < 2 and times.steps < 6:
            return Decision(0, "start")
        if self.acceptance.samples[1] < 2 or (len(self.times) == 1 and times.steps < 6):
            return self._probe(min(2, limit))
        return None

    def _weigh(self, times: StepTimes, batch: int, limit: int, size: int) -> Decision:
        expected, verified, doubts = self.acceptance.curves()
        seconds = [self._seconds(times, batch, verified[k], k) for k in range(limit + 1)]
        rates = [expected[k] / seconds[k] for k in range(limit + 1)]
        present = min(self._current.get(size, 0), limit)
        known = max(float(times.furthest), times.covered) + 1
        timed = [k for k in range(limit + 1) if verified[k] <= known]
        best = max(timed, key=lambda k: (rates[k], -k))
        if rates[best] < rates[0] * (1 + MARGIN):
            best = 0
            if present and rates[present] > rates[0] * (1 + MARGIN / 3):
                best = present
        elif best != present and rates[best] < rates[present] * (1 + MARGIN / 3):
            best = present
        self._current[size] = best
        self._typical = seconds[best]
        self._rates[size] = rates[best]
        probe = self._worth_trying(times, best, (expected, verified, doubts), (seconds, rates))
        self._quiet -= 1
        if best and self._zero_is_due(size, rates[0] / rates[best]):
            if not self.lookup:
                self._probing = (0, 1)
            return Decision(0, "probe", rates[best])
        if probe is not None and self._quiet <= 0:
            return self._probe(probe, rates[best])
        if best == 0:
            return Decision(0, "off", rates[0])
        return Decision(best, "best", rates[best])

    def _seconds(self, times: StepTimes, batch: int, verified: float, k: int) -> float:
        """Expected seconds of a step.

        Where few requests run and not all have a draft, the mean number of drafted tokens is one
        that hardly any step has: the numbers of requests with a draft are weighed one by one.
        """
        if k == 0 or batch > _MIXED_UP_TO or verified > 0.97 * k:
            return times.at(verified)
        share = min(max(verified / k, 0.0), 1.0)
        total = 0.0
        for having in range(batch + 1):
            chance = math.comb(batch, having) * share**having * (1 - share) ** (batch - having)
            total += chance * times.at(k * having / batch)
        return total

    def _worth_trying(
        self,
        times: StepTimes,
        best: int,
        known: tuple[list[float], list[float], list[float]],
        now: tuple[list[float], list[float]],
    ) -> int | None:
        """A length that may be better than the best, and that there is time left to try."""
        expected, verified, doubts = known
        seconds, rates = now
        tried, hope = None, rates[best] * (1 + MARGIN / 2)
        for k in range(len(rates)):
            if k == best:
                continue
            most = expected[k] + 1.3 * max(doubts[k] - doubts[min(best, k)], 0.0)
            least = seconds[k] * times.least(verified[k]) / times.at(verified[k])
            if most / least > hope:
                tried, hope = k, most / least
        self._unprobed += 1
        # Never much further than what was timed: the unknown is entered step by step.
        reach = 2 * times.furthest + 2
        worst = [max(seconds[k], times.most(verified[k])) for k in range(len(rates))]
        if tried is not None:
            tried = min(tried, reach)
            if tried != best and self._affordable(tried, best, expected, worst):
                return tried
        # Traffic may have become better in a way that nothing seen so far tells.
        likely = max(
            range(len(rates)),
            key=lambda k: (self._if_good[k] / max(times.seconds[k], seconds[k]), -k),
        )
        likely = min(likely, reach)
        if likely <= best:
            return None
        lost = worst[likely] - seconds[best] * expected[likely] / expected[best]
        wait = max(8.0, lost / (BUDGET * seconds[best]))
        if self._unprobed >= wait and self._affordable(likely, best, expected, worst):
            return likely
        return None

    def _zero_is_due(self, size: int, relative: float) -> bool:
        """Whether k = 0 should be seen again: what all the others are measured against."""
        self._unseen_zero[size] = self._unseen_zero.get(size, 0) + 1
        if self._quiet > 0 or self._unseen_zero[size] < max(20.0, (1 - relative) / ZERO_BUDGET):
            return False
        self._unseen_zero[size] = 0
        return True

    def _affordable(
        self, k: int, best: int, expected: Sequence[float], seconds: Sequence[float]
    ) -> bool:
        lost = max(0.0, seconds[k] - seconds[best] * expected[k] / expected[best])
        allowed = ALLOWANCE_STEPS * seconds[best] + BUDGET * self._elapsed
        return self.lost + lost <= allowed

    def _probe(self, length: int, rate: float | None = None) -> Decision:
        """One draft; two where drafting has its price, since a step then pays for two lengths."""
        self._unprobed = 0
        # What it gave is known two steps later: until then nothing else is tried.
        self._quiet = 3
        if not self.lookup:
            self._probing = (length, 1)
        return Decision(length, "probe", rate)

    def observe(self, step: SeenStep) -> None:
        """Learns from a finished step."""
        batch = len(step.drafted)
        if batch == 0:
            return
        self.acceptance.learn(step)
        if step.seconds is None or step.seconds <= 0:
            return
        self._elapsed += step.seconds
        size = size_class(batch)
        rate = self._rates.get(size)
        if rate is not None and step.asked not in (0, self._current.get(size)):
            made = 1 + sum(step.accepted) / batch
            usual = min(step.seconds, 12 * self._typical)
            self.lost = max(-CREDIT_STEPS * self._typical, self.lost + usual - made / rate)
        if step.next_asked is not None and step.next_asked != step.asked:
            return
        self._times(size, batch).learn(sum(step.drafted) / batch, step.seconds)
