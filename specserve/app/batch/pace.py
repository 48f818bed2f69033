"""How many requests a batch has in flight: as many as make more tokens a second.

The engine takes any number and queues what it cannot run, so too many cost little, too few cost
much: the number doubles while that brings a gain, then stays where the rate was best, and tries a
quarter more or a fifth less in turn, now and then. A refusal for overload cuts it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specserve.engine.http.metrics import EngineSnapshot, Histogram

MOST = 256
FIRST = 16
GAIN_RATIO = 1.10
"""Less than this is not worth twice the requests."""
_MORE_RATIO, _LESS_RATIO = 1.08, 0.98
"""What a quarter more must bring, and what a fifth less must keep, to stay."""
LEAST_SECONDS = 0.5
LEAST_ANSWERS = 64
"""Of a window: below these a rate is noise; three times as many tell small differences."""
_LOST_RATIO = 0.6
"""At a rate below this share of what the number once brought, it is looked for again."""
_HOLD_WINDOWS = 4
_CUT_RATIO = 0.7
_CEILING_SECONDS = 60.0
"""After this long without a refusal, more than what was refused is tried again."""
_BACKOFF_SECONDS = 1.0
_LONGEST_SECONDS = 60.0


@dataclass
class _Measured:
    """What finished since the number last changed."""

    skip: int
    """Of these many the time fell under the number before."""
    since: float
    finished: int = 0
    tokens: int = 0


@dataclass
class Pace:
    """The number of requests in flight; everything it knows it is told, the time included."""

    most: int = MOST
    limit: int = FIRST
    fixed: bool = False
    """Whether the number was given: then only refusals change it."""
    cap: int | None = None
    """What `Yielding` leaves; None for all."""
    paused_until: float = 0.0
    _ceiling: int = 0
    _ceiling_until: float = 0.0
    _best: int = 0
    _best_rate: float = 0.0
    _climbs: bool = True
    _tries_more: bool = False
    _held: int = 0
    _refusals: int = 0
    _window: _Measured = field(default_factory=lambda: _Measured(0, 0.0))

    def __post_init__(self) -> None:
        self.limit = max(1, min(self.limit, self.most))
        self._ceiling = self.most

    def allowed(self, now: float) -> int:
        """How many may be in flight now."""
        if now < self.paused_until:
            return 0
        if self.cap is not None:
            return min(self.limit, self.cap)
        return self.limit

    def refused(self, now: float, in_flight: int, retry_after_seconds: float | None) -> None:
        """The server took one request too many: fewer, and none before it says."""
        if now >= self.paused_until:  # several are refused at once, which is one refusal
            self._refusals += 1
            self.limit = max(1, int(min(self.limit, in_flight) * _CUT_RATIO))
            self._ceiling, self._ceiling_until = max(1, self.limit), now + _CEILING_SECONDS
            self._best, self._best_rate, self._climbs = self.limit, 0.0, False
        wait = retry_after_seconds
        if wait is None:
            wait = _BACKOFF_SECONDS * 2 ** min(self._refusals - 1, 5)
        self.paused_until = max(self.paused_until, now + min(wait, _LONGEST_SECONDS))
        self._restart(now, in_flight)

    def unreachable(self, now: float, failures: int) -> None:
        """Nobody listens, or the connection broke: wait a little."""
        wait = min(0.2 * 2 ** min(failures, 6), 10.0)
        self.paused_until = max(self.paused_until, now + wait)
        self._restart(now, 0)

    def finished(self, now: float, tokens: int, in_flight: int) -> None:
        """One request was answered. ``tokens`` 1 for each where the server counts none."""
        self._refusals = 0
        if self.fixed or self.cap is not None:
            return
        window = self._window
        if window.skip > 0:
            window.skip -= 1
            window.since = now
            return
        window.finished += 1
        window.tokens += tokens
        seconds = now - window.since
        wanted = max(self.limit, LEAST_ANSWERS)
        if not self._climbs:
            wanted *= 3
        if window.finished < wanted or seconds < LEAST_SECONDS:
            return
        before = self.limit
        # Where fewer than the limit were to be had, the rate says nothing about the limit.
        if in_flight >= self.limit * 0.8 - 1:
            self._judge(window.tokens / seconds, now)
        if self.limit == before:
            self._window = _Measured(0, now)
        else:
            self._restart(now, in_flight)

    def _restart(self, now: float, in_flight: int) -> None:
        self._window = _Measured(in_flight, now)

    def _judge(self, rate: float, now: float) -> None:
        if now >= self._ceiling_until:
            self._ceiling = self.most
        if self._climbs:
            if rate < self._best_rate * GAIN_RATIO:
                self._climbs = False
                self.limit, self._held = self._best, 0
                return
            self._best, self._best_rate = self.limit, rate
            self.limit = min(self.limit * 2, self._ceiling)
            self._climbs = self.limit > self._best
            return
        if self.limit != self._best:  # a try
            least = _LESS_RATIO
            if self.limit > self._best:
                least = _MORE_RATIO
            if rate >= self._best_rate * least:
                self._best, self._best_rate = self.limit, rate
            self.limit, self._held = self._best, 0
            return
        self._held += 1
        if rate < self._best_rate * _LOST_RATIO:
            # The server or the requests have changed.
            self.limit = max(1, self.limit // 2)
            self._best, self._best_rate, self._climbs, self._held = self.limit, 0.0, True, 0
            return
        # The mean of about four windows, for one alone is noisy.
        if self._best_rate == 0.0:
            self._best_rate = rate
        self._best_rate += (rate - self._best_rate) / 4
        if self._held >= _HOLD_WINDOWS:
            self._tries_more = not self._tries_more
            self.limit = max(1, self.limit * 4 // 5)
            if self._tries_more:
                self.limit = min(max(self._best + 1, self._best * 5 // 4), self._ceiling)
            self._held = 0


@dataclass
class Yielding:
    """Whether others wait for a server that a batch shares, from two reads of its metrics.

    The engine's gauges count our requests as well, so those are subtracted; what is left are
    others. Their TTFT is not told apart from ours: it counts only while there are others.
    """

    ttft_seconds: float
    """Above this the batch steps back."""
    before: EngineSnapshot | None = None
    own_finished: int = 0
    """Of ours, since the last read."""
    reason: str | None = None
    """Why the batch steps back now; None when it does not."""

    def read(self, now: EngineSnapshot, in_flight: int) -> str | None:
        """Why the batch should step back; None when nobody needs it to."""
        before, self.before = self.before, now
        finished, self.own_finished = self.own_finished, 0
        running, waiting = now.total("running"), now.total("waiting")
        if running is None or waiting is None:
            self.reason = None
            return None
        others = running + waiting - in_flight
        self.reason = None
        if others >= 1 and waiting >= 1:
            count = min(others, waiting)
            self.reason = f"up to {count:.0f} requests of others wait"
        elif before is not None and (others >= 1 or _others_finished(before, now, finished)):
            ttft = _quantile_over(before, now, self.ttft_seconds)
            if ttft:
                self.reason = f"TTFT is over {self.ttft_seconds:g} s for more than one in ten"
        return self.reason

    @staticmethod
    def cap(present: int | None, in_flight: int, limit: int, reason: str | None) -> int | None:
        """The new cap: half of what is in flight, down to none; twice as many when all is well."""
        if reason is not None:
            return in_flight // 2
        if present is None:
            return None
        raised = max(1, present * 2)
        if raised >= limit:
            return None
        return raised


def _others_finished(before: EngineSnapshot, now: EngineSnapshot, own: int) -> bool:
    old, new = before.finished_requests, now.finished_requests
    return old is not None and new is not None and new - old > own


def _quantile_over(before: EngineSnapshot, now: EngineSnapshot, seconds: float) -> bool:
    """Whether more than a tenth of the first tokens since the last read took longer."""
    over = total = 0.0
    olds = {(s.engine, s.model_name): s.histograms for s in before.engines}
    for sample in now.engines:
        new = sample.histograms.get("time_to_first_token")
        old = olds.get((sample.engine, sample.model_name), {}).get("time_to_first_token")
        if new is None or old is None or new.bounds != old.bounds:
            continue
        total += new.count - old.count
        over += (new.count - _within(new, seconds)) - (old.count - _within(old, seconds))
    return total > 0 and over > total / 10


def _within(histogram: Histogram, seconds: float) -> float:
    """Observations at or under the smallest bound that is not below ``seconds``."""
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if bound >= seconds:
            return count
    return histogram.count
