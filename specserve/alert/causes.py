"""Why a server accepts less, or steps slower, than it usually does: causes by evidence.

Readings and facts in, causes out. Each cause carries what supports it and what speaks against it,
with the numbers; the best supported comes first, and nothing is named while nothing is wrong. The
alerts, /status, the page and `specserve status` share this room.

Weights are points of one scale: 1 is a hint, 2 is what hardly has another explanation, 3 is what
the fact itself explains. A cause is kept while its balance is positive.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from specserve.config.speculation import WITHOUT_DRAFT
from specserve.metric_families import MetricKey, Readings, key
from specserve.units import duration, percent

CauseName = Literal[
    "wrong_output",
    "draft_not_applied",
    "engine_changed",
    "rank_differs",
    "prompts_beyond_draft_context",
    "pruned_vocabulary",
    "traffic_mix",
    "machine_slow",
]
Symptom = Literal["acceptance", "speed"]

FALL, FALL_SHARE = 0.08, 0.15
"""Less than usual by this much, and by this part of it, is a fall."""
MOST = 0.55
"""Part of the usual first position that a change of traffic hardly takes."""
NOTHING = 0.1
"""Acceptance at position 0 of a draft that guesses."""
SLOWER = 1.3
"""Times the usual step time that is slow."""
CHANGED = 1.5
"""Times the usual mean length, up or down, that is another kind of traffic."""
SHARE_CHANGED = 0.15
OTHERS_MIN_TOKENS = 200
RANK_APART = 0.12
RECENT_SECONDS = 3_600.0
"""A change that is older than this did not just show."""
MIN_REQUESTS = 10
MIN_DRAFTS = 100
MIN_BALANCE = 0.3
WINDOWS = ("1m", "5m")
LONG = "30m"


@dataclass(frozen=True, slots=True)
class ServerChange:
    """Something about the server that is not as it was."""

    what: str
    """For people: "the engine restarted", "vLLM 0.31 became 0.32"."""
    seconds_ago: float
    is_setup: bool = False
    """Whether version or configuration changed, not only the process."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What no counter says."""

    method: str | None = None
    draft_context_tokens: int | None = None
    """The longest text that the draft was made for; None when the target's or unknown."""
    draft_vocabulary_ratio: float | None = None
    """Tokens that the draft can propose / tokens of the target; None when unknown."""
    changes: tuple[ServerChange, ...] = ()

    @property
    def has_draft_weights(self) -> bool:
        """Whether there are weights that could be applied wrongly."""
        return self.method is not None and self.method not in WITHOUT_DRAFT


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that speaks for or against a cause."""

    text: str
    weight: float


class CauseJson(TypedDict):
    """A cause on /status."""

    name: str
    symptom: str
    summary: str
    supports: list[str]
    against: list[str]


@dataclass(frozen=True, slots=True)
class Cause:
    """One explanation of what is seen."""

    name: CauseName
    symptom: Symptom
    summary: str
    supports: tuple[Evidence, ...]
    against: tuple[Evidence, ...] = ()
    impact: float = 1.0
    """Part of the speed that the symptom costs: orders causes of different symptoms."""

    @property
    def balance(self) -> float:
        """Support minus what speaks against it."""
        return sum(e.weight for e in self.supports) - sum(e.weight for e in self.against)

    @property
    def line(self) -> str:
        """One line for people."""
        text = f"{self.summary} ({'; '.join(e.text for e in self.supports)})"
        if self.against:
            text += f"; against it: {'; '.join(e.text for e in self.against)}"
        return text

    def as_dict(self) -> CauseJson:
        """The JSON form."""
        return {
            "name": self.name,
            "symptom": self.symptom,
            "summary": self.summary,
            "supports": [evidence.text for evidence in self.supports],
            "against": [evidence.text for evidence in self.against],
        }


def find(readings: Readings, facts: ServerFacts) -> tuple[Cause, ...]:
    """The causes of what is wrong now, the best supported first; empty while nothing is."""
    seen = _AgainstUsual.of(readings, facts)
    found = [*_of_acceptance(seen), *_of_speed(seen)]
    kept = [cause for cause in found if cause.balance >= MIN_BALANCE]
    return tuple(
        sorted(kept, key=lambda cause: (-cause.balance * (0.5 + cause.impact), cause.name))
    )


def suspects_output(causes: tuple[Cause, ...]) -> bool:
    """Whether what is seen is better explained by wrong output than by anything else.

    Only the causes of one symptom exclude each other: a machine that is slow as well explains no
    fall of acceptance.
    """
    first = next((cause for cause in causes if cause.symptom == "acceptance"), None)
    return first is not None and first.name == "wrong_output"


@dataclass(frozen=True, slots=True)
class _Pair:
    """A value now, and what is usual."""

    now: float
    usual: float

    @property
    def times(self) -> float:
        """How many times the usual it is."""
        if self.usual <= 0:
            return 1.0
        return self.now / self.usual

    @property
    def lost(self) -> float:
        """The part of the usual that is gone; negative when it is more."""
        return 1 - self.times

    @property
    def has_fallen(self) -> bool:
        """Whether it is a fall, not noise."""
        return self.usual - self.now >= FALL and self.lost >= FALL_SHARE


@dataclass(frozen=True, slots=True)
class _Rank:
    """One engine's acceptance, and the median of the others'."""

    engine: str
    rate: float
    others: float


@dataclass(frozen=True, slots=True)
class _AgainstUsual:
    """The readings that causes are told by, each against its usual value."""

    readings: Readings
    facts: ServerFacts
    window: str
    traffic_window: str

    @classmethod
    def of(cls, readings: Readings, facts: ServerFacts) -> _AgainstUsual:
        """With the shortest windows that hold enough to say something."""
        drafts = _first_window(readings, "specserve_window_drafts", MIN_DRAFTS)
        traffic = _first_window(readings, "specserve_window_requests", MIN_REQUESTS)
        return cls(readings, facts, drafts, traffic)

    def now(self, family: str, window: str = "", **labels: str) -> float | None:
        """A windowed reading."""
        return self.readings.get(key(family, window=window or self.window, **labels))

    def pair(
        self, family: str, reference: str, *, traffic: bool = False, **labels: str
    ) -> _Pair | None:
        """A reading against its reference; where there is none yet, against the longest window."""
        window = self.window
        if traffic:
            window = self.traffic_window
        now = self.now(family, window, **labels)
        usual = self.readings.get(key(reference))
        if usual is None:
            usual = self.now(family, LONG, **labels)
        if now is None or usual is None:
            return None
        return _Pair(now, usual)

    @property
    def is_sampled(self) -> bool:
        """Whether enough was drafted to say anything about acceptance."""
        drafts = self.now("specserve_window_drafts")
        return drafts is not None and drafts >= MIN_DRAFTS

    @property
    def acceptance(self) -> _Pair | None:
        """Accepted / drafted tokens."""
        if not self.is_sampled:
            return None
        return self.pair("specserve_acceptance_rate", "specserve_acceptance_rate_baseline")

    @property
    def first(self) -> _Pair | None:
        """Acceptance at position 0."""
        if not self.is_sampled:
            return None
        return self.pair(
            "specserve_acceptance_rate_per_position",
            "specserve_usual_position0_acceptance_rate",
            position="0",
        )

    @property
    def second(self) -> _Pair | None:
        """Acceptance at position 1 of the drafts whose first token was accepted."""
        return self.pair(
            "specserve_conditional_acceptance_rate_per_position",
            "specserve_usual_position1_conditional_acceptance_rate",
            position="1",
        )

    @property
    def prompts(self) -> _Pair | None:
        """Mean tokens of a prompt."""
        return self._lengths("prompt")

    @property
    def answers(self) -> _Pair | None:
        """Mean tokens of an answer."""
        return self._lengths("generation")

    def _lengths(self, of: str) -> _Pair | None:
        requests = self.now("specserve_window_requests", self.traffic_window)
        if requests is None or requests < MIN_REQUESTS:
            return None
        family = f"specserve_request_{of}_tokens"
        return self.pair(family, f"{family}_baseline", traffic=True, stat="mean")

    @property
    def step(self) -> _Pair | None:
        """Seconds between two outputs of a request: a step."""
        family = "specserve_inter_token_latency_seconds"
        return self.pair(family, f"{family}_baseline", stat="mean")

    @property
    def batch(self) -> _Pair | None:
        """Sequences in a step."""
        family = "specserve_sequences_per_step"
        return self.pair(family, f"{family}_baseline")

    @property
    def ranks(self) -> tuple[_Rank, ...]:
        """The engines that drafted enough, when there are several."""
        rates: dict[str, float] = {}
        for (family, labels), value in self.readings.items():
            if family != "specserve_engine_acceptance_rate":
                continue
            names = dict(labels)
            drafted = self.now(
                "specserve_engine_window_draft_tokens", self.window, engine=names["engine"]
            )
            is_enough = drafted is not None and drafted >= OTHERS_MIN_TOKENS
            if names["window"] == self.window and is_enough:
                rates[names["engine"]] = value
        if len(rates) < 2:
            return ()
        return tuple(
            _Rank(
                engine,
                rate,
                statistics.median(value for other, value in rates.items() if other != engine),
            )
            for engine, rate in rates.items()
        )

    @property
    def odd_rank(self) -> _Rank | None:
        """The engine that accepts far less than the others."""
        worst = min(self.ranks, key=lambda rank: rank.rate - rank.others, default=None)
        if worst is None or worst.others - worst.rate < RANK_APART:
            return None
        if worst.rate > 0.8 * worst.others:
            return None
        return worst

    @property
    def change(self) -> ServerChange | None:
        """The newest change that can have to do with it; of version or setup before a restart."""
        recent = [c for c in self.facts.changes if c.seconds_ago <= RECENT_SECONDS]
        return min(recent, key=lambda c: (not c.is_setup, c.seconds_ago), default=None)


def _first_window(readings: Readings, family: str, enough: float) -> str:
    for window in WINDOWS:
        value = readings.get(MetricKey(family, (("window", window),)))
        if value is not None and value >= enough:
            return window
    return WINDOWS[-1]


def _of_acceptance(seen: _AgainstUsual) -> Iterator[Cause]:
    """Why fewer drafted tokens are accepted."""
    rate, first = seen.acceptance, seen.first
    fallen = (rate is not None and rate.has_fallen) or (first is not None and first.has_fallen)
    guesses = first is not None and first.now < NOTHING and seen.facts.has_draft_weights
    odd = seen.odd_rank
    if not fallen and not guesses and odd is None:
        return
    fall = _fall(seen)
    impact = _impact(seen)
    if odd is not None:
        yield _rank(seen, odd, impact)
    if fallen or guesses:
        elsewhere = _elsewhere(seen, odd)
        for cause in _global(seen, fall, fallen=fallen, guesses=guesses):
            against = (*cause.against, *elsewhere)
            yield replace(cause, against=against, impact=max(cause.impact, impact))


def _global(
    seen: _AgainstUsual, fall: Evidence | None, *, fallen: bool, guesses: bool
) -> Iterator[Cause]:
    """The causes that touch all engines."""
    if guesses:
        yield from _not_applied(seen)
    if not fallen or fall is None:
        return
    yield from _changed(seen, "acceptance", fall)
    yield from _beyond_context(seen)
    yield from _pruned(seen)
    yield from _mix(seen, fall)
    yield from _wrong_output(seen, fall)


def _fall(seen: _AgainstUsual) -> Evidence | None:
    """The fall itself, of the number that shows it best."""
    first, rate = seen.first, seen.acceptance
    if first is not None and first.has_fallen:
        text = f"position 0 accepts {percent(first.now)}, usually {percent(first.usual)}"
        return Evidence(f"{text} ({seen.window})", 0.3)
    if rate is not None and rate.has_fallen:
        text = f"acceptance is {percent(rate.now)}, usually {percent(rate.usual)}"
        return Evidence(f"{text} ({seen.window})", 0.3)
    return None


def _impact(seen: _AgainstUsual) -> float:
    """The part of the tokens of a step that is lost."""
    rate = seen.acceptance
    if rate is None or rate.usual <= 0:
        return 0.5
    return min(1.0, max(0.1, rate.lost))


def _elsewhere(seen: _AgainstUsual, odd: _Rank | None) -> tuple[Evidence, ...]:
    """What touches all engines is not the cause of one's fall."""
    rate = seen.acceptance
    if odd is None or rate is None or odd.others < 0.85 * rate.usual:
        return ()
    text = f"the engines beside {odd.engine} accept {percent(odd.others)}, about as usual"
    return (Evidence(text, 3.0),)


def _rank(seen: _AgainstUsual, odd: _Rank, impact: float) -> Cause:
    supports = [
        Evidence(
            f"engine {odd.engine} accepts {percent(odd.rate)}, "
            f"the others {percent(odd.others)} ({seen.window})",
            2.0,
        )
    ]
    against: list[Evidence] = []
    rate = seen.acceptance
    if rate is not None and odd.others >= 0.85 * rate.usual:
        supports.append(Evidence("the others accept about as usual", 1.0))
    elif rate is not None:
        text = f"the others accept less than the usual {percent(rate.usual)} as well"
        against.append(Evidence(text, 1.0))
    return Cause(
        "rank_differs",
        "acceptance",
        f"engine {odd.engine} differs from the others: other weights, damage, "
        "or traffic that is routed to it alone",
        tuple(supports),
        tuple(against),
        impact,
    )


def _not_applied(seen: _AgainstUsual) -> Iterator[Cause]:
    first, change = seen.first, seen.change
    if first is None:
        return
    supports = [Evidence(f"position 0 accepts {percent(first.now)} ({seen.window})", 1.0)]
    against: list[Evidence] = []
    if change is not None:
        supports.append(Evidence(f"{_ago(change)}", 1.5))
    elif first.usual < NOTHING:
        supports.append(Evidence("it never accepted more", 1.5))
    else:
        text = f"it accepted {percent(first.usual)} and nothing was restarted since"
        against.append(Evidence(text, 2.5))
    canary = seen.readings.get(key("specserve_canary_position0_acceptance_rate"))
    if canary is not None and canary < 0.2:
        supports.append(Evidence(f"the start-up canary accepted {percent(canary)}", 1.5))
    elif canary is not None:
        against.append(Evidence(f"the start-up canary accepted {percent(canary)}", 2.0))
    yield Cause(
        "draft_not_applied",
        "acceptance",
        "the weights of the draft are not applied, or belong to another model",
        tuple(supports),
        tuple(against),
    )


def _changed(seen: _AgainstUsual, symptom: Symptom, effect: Evidence) -> Iterator[Cause]:
    change = seen.change
    if change is None:
        return
    weight = 1.3
    if change.is_setup:
        weight = 2.0
    supports = (Evidence(_ago(change), weight), effect)
    yield Cause(
        "engine_changed", symptom, "the engine, its configuration or a checkpoint changed", supports
    )


def _ago(change: ServerChange) -> str:
    return f"{change.what} {duration(change.seconds_ago)} ago"


def _beyond_context(seen: _AgainstUsual) -> Iterator[Cause]:
    tokens = seen.facts.draft_context_tokens
    over = seen.pair(
        "specserve_prompts_over_draft_context_ratio",
        "specserve_prompts_over_draft_context_baseline",
        traffic=True,
    )
    if tokens is None or over is None or over.now - over.usual < 0.1:
        return
    text = (
        f"{percent(over.now)} of the prompts are longer than its {tokens:,} tokens, "
        f"usually {percent(over.usual)} ({seen.traffic_window})"
    )
    yield Cause(
        "prompts_beyond_draft_context",
        "acceptance",
        "prompts are longer than the text that the draft was made for",
        (Evidence(text, 3.0),),
        tuple(_first_alone(seen, unlike=True)),
    )


def _pruned(seen: _AgainstUsual) -> Iterator[Cause]:
    """Texts of which the head cannot propose the tokens fail at once, the others go on as usual:
    position 0 falls alone."""
    share = seen.facts.draft_vocabulary_ratio
    if share is None or share >= 0.9:
        return
    fact = Evidence(f"the draft can propose {percent(share)} of the target's tokens", 0.7)
    alone = list(_first_alone(seen, unlike=False))
    if not alone:
        return
    against: list[Evidence] = []
    if seen.change is not None:
        against.append(Evidence(_ago(seen.change), 1.0))
    yield Cause(
        "pruned_vocabulary",
        "acceptance",
        "texts need tokens that the draft's pruned vocabulary lacks (another language, code)",
        (fact, *alone),
        tuple(against),
    )


def _first_alone(seen: _AgainstUsual, *, unlike: bool) -> Iterator[Evidence]:
    """Whether position 0 fell and what follows an accepted token did not; with ``unlike``, what
    speaks against that."""
    first, second = seen.first, seen.second
    if first is None or second is None or not first.has_fallen:
        return
    text = (
        f"after an accepted token the next is accepted at {percent(second.now)}, "
        f"usually {percent(second.usual)}"
    )
    is_alone = second.lost < 0.25 * first.lost
    if is_alone and not unlike:
        yield Evidence(text, 1.8)
    if unlike and second.lost > first.lost:
        yield Evidence(text, 0.5)


def _mix(seen: _AgainstUsual, fall: Evidence) -> Iterator[Cause]:
    changed, same = _traffic(seen)
    supports, against = list(changed), []
    if not changed:
        against = [Evidence(evidence.text, 0.2) for evidence in same]
        supports.append(replace(fall, weight=0.8))
        supports.append(Evidence("the engine counts neither language nor temperature", 0.0))
        first = seen.first
        if first is not None and first.lost >= MOST:
            against.append(Evidence("a change of traffic seldom takes most of the rate", 1.0))
    if seen.change is not None:
        against.append(Evidence(_ago(seen.change), 0.7))
    yield Cause(
        "traffic_mix", "acceptance", "other requests than usual", tuple(supports), tuple(against)
    )


def _traffic(seen: _AgainstUsual) -> tuple[list[Evidence], list[Evidence]]:
    """What is different about the requests, and what is not."""
    changed: list[Evidence] = []
    same: list[Evidence] = []
    for what, lengths in (("prompts", seen.prompts), ("answers", seen.answers)):
        if lengths is None or lengths.usual <= 0:
            continue
        text = f"{what} have {lengths.now:,.0f} tokens, usually {lengths.usual:,.0f}"
        if max(lengths.times, 1 / max(lengths.times, 1e-9)) >= CHANGED:
            changed.append(Evidence(text, 1.2))
        else:
            same.append(Evidence(text, 1.0))
    for what, family, reference in (
        ("answers cut at their limit", "specserve_length_finish_ratio", "length_finish"),
        ("prefix cache hits", "specserve_prefix_cache_hit_ratio", "prefix_cache_hit"),
    ):
        share = seen.pair(family, f"specserve_{reference}_baseline", traffic=True)
        if share is not None and abs(share.now - share.usual) >= SHARE_CHANGED:
            text = f"{what}: {percent(share.now)}, usually {percent(share.usual)}"
            changed.append(Evidence(text, 0.8))
    return changed, same


def _wrong_output(seen: _AgainstUsual, fall: Evidence) -> Iterator[Cause]:
    """Most of the usual rate is gone and nothing that could explain it has changed."""
    first = seen.first or seen.acceptance
    if first is None or first.lost < MOST or seen.change is not None:
        return
    changed, same = _traffic(seen)
    if not changed and not same:
        # Unknown is not unchanged.
        return
    supports = [
        replace(fall, weight=1.8),
        Evidence("engine and configuration did not change", 0.4),
        *(Evidence(evidence.text, 0.4) for evidence in same),
    ]
    against = list(changed)
    for cause in _pruned(seen):
        against += [replace(evidence, weight=1.5) for evidence in cause.supports[1:]]
    yield Cause(
        "wrong_output",
        "acceptance",
        "the engine may produce wrong output: take this pod out and compare its answers with "
        "those of another (`specserve verify`)",
        tuple(supports),
        tuple(against),
    )


def _of_speed(seen: _AgainstUsual) -> Iterator[Cause]:
    """Why a step takes longer."""
    step = seen.step
    requests = seen.now("specserve_window_requests", seen.traffic_window)
    if step is None or step.times < SLOWER or requests is None or requests < MIN_REQUESTS:
        return
    effect = Evidence(
        f"a step takes {step.now * 1000:.3g} ms, usually {step.usual * 1000:.3g} ms "
        f"({seen.window})",
        1.5,
    )
    impact = 1 - 1 / step.times
    load = list(_load(seen, step))
    for cause in _changed(seen, "speed", replace(effect, weight=0.5)):
        yield replace(cause, against=tuple(load), impact=impact)
    supports, against = [effect], list(load)
    if not load:
        supports += _calm(seen)
    supports += _throttled(seen)
    rate = seen.acceptance
    if rate is not None and not rate.has_fallen:
        text = f"acceptance is as usual ({percent(rate.now)})"
        supports.append(Evidence(text, 0.3))
    if seen.change is not None:
        against.append(Evidence(_ago(seen.change), 1.2))
    yield Cause(
        "machine_slow",
        "speed",
        "the machine is slow (clocks held down, a neighbour, a fault)",
        tuple(supports),
        tuple(against),
        impact,
    )


def _load(seen: _AgainstUsual, step: _Pair) -> Iterator[Evidence]:
    """More work in a step than usual, where that can explain the time: it grows at most as the
    work does."""
    batch = seen.batch
    if batch is not None and batch.times >= 1.2:
        text = f"{batch.now:.1f} sequences in a step, usually {batch.usual:.1f}"
        weight = 2.5
        if step.times > 1.3 * batch.times:
            weight = 0.5
        yield Evidence(text, weight)
    prompts = seen.prompts
    if prompts is not None and prompts.times >= CHANGED:
        text = f"prompts have {prompts.now:,.0f} tokens, usually {prompts.usual:,.0f}"
        weight = 1.5
        if step.times > 1.3 * prompts.times:
            weight = 0.3
        yield Evidence(text, weight)


def _calm(seen: _AgainstUsual) -> Iterator[Evidence]:
    batch = seen.batch
    if batch is not None:
        text = f"{batch.now:.1f} sequences in a step, usually {batch.usual:.1f}"
        yield Evidence(text, 0.5)


def _throttled(seen: _AgainstUsual) -> Iterator[Evidence]:
    for (family, labels), value in sorted(seen.readings.items()):
        if family == "specserve_gpu_throttled" and value:
            names = dict(labels)
            yield Evidence(f"GPU {names['gpu']} holds its clocks down ({names['reason']})", 1.5)
