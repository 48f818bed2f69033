"""Causes from a running engine: a few reads of its metrics, held against the alert rules.

Two spans are looked at: the seconds between the reads, and the engine's whole life, since its
counters began at zero. A rule speaks of the newest span that has enough work in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specserve.alert import builtin
from specserve.alert.rules import SIGNS, Rule
from specserve.alert.rules import observe as inputs
from specserve.app.doctor.report import Confidence, DoctorCause, Fact, Look, Step
from specserve.app.doctor.rules import OWN, PLACES
from specserve.config.schema import Settings
from specserve.engine.canary import run as canary
from specserve.engine.http.client import EngineClient, EngineError, EngineUnreachable
from specserve.engine.http.servers import Recognised, recognise
from specserve.metric_families import WINDOWS, MetricKey, Readings, key, window_label
from specserve.sidecar import rates, speedup
from specserve.sidecar.contact import scrape
from specserve.sidecar.look import OTHER_TEXTS, Diagnosis, zeroed
from specserve.sidecar.look import look as compared
from specserve.sidecar.observer import Observer
from specserve.sidecar.presentation import seconds as latency
from specserve.sidecar.probe import Policy, Scrape
from specserve.sidecar.window import Window
from specserve.units import duration, percent

if TYPE_CHECKING:
    from specserve.engine.canary.run import CanaryResult
    from specserve.engine.http.metrics import EngineSnapshot
    from specserve.engine.inside.step_profile import StepProfile

READS = 3
"""As many as tell a step that takes long from one that never ends, within the pause."""
PAUSE_SECONDS = 2.0
"""From the first read to the last."""
READ_SECONDS = 3.0
PREEMPTED_SHARE = 0.05
"""Ours: requests put out of the KV cache, as a part of those that finished."""
_RATE_LOW = frozenset({"AcceptanceRateLow"})
_LABELS = tuple(window_label(seconds) for seconds in WINDOWS)
_INSTANT = {"QueueBacklog", "KVCachePressure", "GPUMemoryHigh"}
"""Alerts over what is so at this moment; a look of two seconds cannot tell whether it stays."""


@dataclass(frozen=True)
class Reads:
    """What the reads of one engine gave."""

    url: str
    scrapes: tuple[Scrape, ...]
    answers: bool = True
    """Whether anything answered at all."""
    other: Recognised | None = None
    """The server that it is instead of vLLM."""

    @property
    def snapshot(self) -> EngineSnapshot | None:
        """The newest."""
        return next((s.snapshot for s in reversed(self.scrapes) if s.snapshot is not None), None)


@dataclass(frozen=True)
class _Span:
    """Readings over some time, and that time in words."""

    readings: Readings
    words: str


def read(
    client: EngineClient, *, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Reads:
    """Read the metrics `READS` times within `PAUSE_SECONDS`; once where nothing comes."""
    found: list[Scrape] = []
    for number in range(READS):
        if number:
            sleep(PAUSE_SECONDS / (READS - 1))
        found.append(scrape(client, now=clock(), timeout=READ_SECONDS, clock=clock))
        if found[0].snapshot is None:
            break
    other = None
    answers = found[0].result != "unreachable"
    if found[0].snapshot is None and answers:
        try:
            other = recognise(client, timeout=READ_SECONDS)
        except EngineUnreachable:
            answers = False
    return Reads(client.base_url, tuple(found), answers, other)


def stand_in(snapshot: EngineSnapshot | None) -> Settings:
    """Settings for the rules where no config is given: what the metrics tell, and defaults."""
    tokens, name = 0, "unknown"
    if snapshot is not None:
        tokens = len(snapshot.accepted_per_position or ())
        name = next((s.model_name for s in snapshot.engines if s.model_name), name)
    spec: dict[str, bool | str | int] = {"enabled": False}
    if snapshot is not None and snapshot.speculates:
        # Of the methods the one that needs no second path; only its draft's length is used.
        spec = {"method": "mtp", "num_speculative_tokens": max(1, tokens)}
    return Settings.model_validate(
        {"models": {"target_model": {"path": name}}, "speculative_decoding": spec}
    )


def look(
    reads: Reads, config: Settings | None, profile: StepProfile | None, *, wall: float
) -> Look:
    """Everything that the reads say. ``wall`` is Unix time."""
    last = reads.snapshot
    if last is None:
        return Look(f"engine {reads.url}", frozenset({"load"}), (_silent(reads),))
    settings = config or stand_in(last)
    observer = Observer(
        policy=Policy(observations=READS - 1),
        profile=profile,
        speculation_configured=config is not None and config.method is not None,
    )
    seen = observer.observe(0.0, wall, reads.scrapes[0])
    for number, one in enumerate(reads.scrapes[1:], 1):
        seen = observer.observe(number * PAUSE_SECONDS / (READS - 1), wall, one)
    spans = [_Span(seen.readings, f"in the last {duration(PAUSE_SECONDS)}")]
    life = _life(last, seen.readings, profile, wall)
    if life is not None:
        spans.append(life)
    causes = [*_state(reads, last, seen.assessment.condition)]
    if not any(cause.stops for cause in causes):
        causes += _inactive(last, config)
        causes += _untangled(list(_by_rules(spans, settings, last)))
        causes += _preempted(reads, last)
        if not causes:
            causes += _worse(reads, last, wall)
    steps: set[Step] = {"load", "memory"}
    drafted = spans[-1].readings.get(key("specserve_window_draft_tokens", window=_LABELS[0]))
    if drafted is not None and drafted >= settings.alerts.acceptance_rate.min_draft_tokens:
        steps |= {"traffic", "parameters", "vocabulary"}
    if key("specserve_break_even_acceptance_rate") in seen.readings:
        steps.add("speed")
    facts = tuple(_facts(spans[-1], last))
    return Look(f"engine {reads.url}", frozenset(steps), tuple(causes), facts)


def _silent(reads: Reads) -> DoctorCause:
    """Why there are no metrics."""
    first = reads.scrapes[0]
    if first.result == "unreachable":
        return DoctorCause(
            "load",
            "not-listening",
            f"nothing listens at {reads.url}",
            "proven",
            (first.detail.splitlines()[0],),
            "specserve doctor CONFIG --log FILE   # why it ended; ss -ltnp shows what listens",
            stops=True,
        )
    if not reads.answers:
        return DoctorCause(
            "load",
            "no-answer",
            f"what listens at {reads.url} takes requests and gives no answer",
            "likely",
            (f"/metrics: {first.detail.splitlines()[0]}",),
            "py-spy dump --pid PID   # of the API server; then restart it",
            stops=True,
        )
    if reads.other is not None:
        return DoctorCause(
            "load",
            "not-vllm",
            f"at {reads.url} {reads.other.sentence}",
            "proven",
            (f"/metrics: {first.detail.splitlines()[0]}",),
            "specserve doctor --url URL   # of the engine itself, not of a proxy",
        )
    return DoctorCause(
        "load",
        "MetricsBlind",
        f"the engine at {reads.url} answers, but its metrics cannot be read",
        "proven",
        (first.detail.splitlines()[0],),
        f"curl -sS {reads.url}/metrics | tail   # blocked, cut off, or --disable-log-stats",
        _usually("MetricsBlind"),
    )


def _state(reads: Reads, last: EngineSnapshot, condition: str) -> Iterator[DoctorCause]:
    """Asleep, standing still, or with a queue that does not move."""
    if last.asleep:
        yield DoctorCause(
            "load",
            "asleep",
            "the engine was put to sleep: it takes requests and keeps them until it is woken",
            "proven",
            fix=f"curl -X POST {reads.url}/wake_up",
            stops=True,
        )
        return
    running, waiting = last.total("running") or 0.0, last.total("waiting") or 0.0
    said = (
        f"{running:.0f} running, {waiting:.0f} waiting; no token, step or finished request in "
        f"{READS} reads over {duration(PAUSE_SECONDS)}"
    )
    if condition == "starved":
        place = PLACES["EngineStarved"]
        message = "requests wait although none is running"
        yield DoctorCause(
            place.step,
            "EngineStarved",
            message,
            "likely",
            (said,),
            place.fix,
            _usually("EngineStarved"),
            stops=True,
        )
    elif condition in ("suspect", "stalled") or (running and _stands_still(reads)):
        place = PLACES["EngineStalled"]
        message = "requests are running and nothing progresses"
        yield DoctorCause(
            place.step,
            "EngineStalled",
            message,
            "possible",
            (said, "a single very long prefill looks the same: run it again"),
            place.fix,
            _usually("EngineStalled"),
            stops=True,
        )


def _stands_still(reads: Reads) -> bool:
    """Whether no counter of work moved; also where the engine never made a token."""
    seen = {
        (s.snapshot.total("generation_tokens"), s.snapshot.total("steps"))
        for s in reads.scrapes
        if s.snapshot is not None
    }
    return len(reads.scrapes) >= READS and len(seen) == 1


def _usually(alert: str) -> tuple[str, ...]:
    return next((d.causes for d in builtin.definitions() if d.name == alert), ())


def _inactive(last: EngineSnapshot, config: Settings | None) -> Iterator[DoctorCause]:
    if config is None or config.method is None or last.speculates:
        return
    place = PLACES["SpeculationInactive"]
    yield DoctorCause(
        place.step,
        "SpeculationInactive",
        f"the config asks for method {config.method}, and the engine runs without speculation",
        "proven",
        ("its metrics have no counters of drafts, which exist from the start of one that drafts",),
        place.fix,
    )


def _life(
    last: EngineSnapshot, now: Readings, profile: StepProfile | None, wall: float
) -> _Span | None:
    """The readings over the engine's whole life, in place of each window's."""
    age, words = 3600.0, "since its start"
    if last.process_start_seconds is not None and wall > last.process_start_seconds:
        age = wall - last.process_start_seconds
        words = f"since its start {duration(age)} ago"
    window = Window((age,))
    window.add(zeroed(last, last.at_seconds - age))
    window.add(last)
    found = rates.readings(window, age)
    if not found:
        return None
    readings = {name: value for name, value in now.items() if "window" not in dict(name.labels)}
    for name, value in found.items():
        for label in _LABELS:
            readings[_relabelled(name, label)] = value
    readings |= speedup.readings(profile, readings, _LABELS)
    return _Span(readings, words)


def _relabelled(name: MetricKey, label: str) -> MetricKey:
    labels = dict(name.labels)
    if "window" not in labels:
        return name
    return key(name.family, **(labels | {"window": label}))


def _by_rules(
    spans: Sequence[_Span], settings: Settings, last: EngineSnapshot
) -> Iterator[DoctorCause]:
    """The alert rules, without their waiting times."""
    for rule in builtin.rules(settings):
        if rule.name in ("EngineStalled", "EngineStarved", "EngineDown", "MetricsBlind"):
            continue
        if rule.name == "DraftPositionsWasted" and not _drafts_full(last):
            continue
        for span in spans:
            seen = inputs(rule, span.readings)
            known = {labels: one.value for labels, one in seen.items() if one.value is not None}
            if not known:
                continue
            for labels, value in known.items():
                if rule.breaches(value):
                    yield _breach(rule, MetricKey(rule.metric, labels), value, span, last)
            break


def _untangled(causes: Sequence[DoctorCause]) -> Iterator[DoctorCause]:
    """Of two causes that would each explain the other, the one that was found to explain it."""
    long = any(c.name == "DraftPositionsWasted" and c.explains >= _RATE_LOW for c in causes)
    for cause in causes:
        if long and cause.name == "AcceptanceRateLow":
            yield replace(cause, explains=cause.explains - {"DraftPositionsWasted"})
        else:
            yield cause


def _drafts_full(last: EngineSnapshot) -> bool:
    """Whether drafts are about as long as there are positions: a position that is rarely drafted
    is not wasted."""
    drafts, tokens = last.total("drafts"), last.total("draft_tokens")
    positions = len(last.accepted_per_position or ())
    return bool(drafts) and tokens is not None and tokens >= 0.9 * positions * (drafts or 0.0)


def _breach(
    rule: Rule, metric: MetricKey, value: float, span: _Span, last: EngineSnapshot
) -> DoctorCause:
    place = PLACES.get(rule.name, OWN)
    sign, _ = SIGNS[rule.direction]
    said = f"{metric.family} is {value:.3g} {span.words} (alert: {sign} {rule.fire:g})"
    evidence = [said]
    if rule.sample is not None and rule.sample in span.readings:
        what = rule.sample.family.removeprefix("specserve_window_").replace("_", " ")
        evidence.append(f"{span.readings[rule.sample]:,.0f} {what}")
    positions = _positions(last)
    if place.step in ("vocabulary", "traffic", "parameters") and positions:
        evidence.append(f"accepted by position: {', '.join(map(percent, positions))}")
    confidence: Confidence = "likely"
    if rule.name in _INSTANT:
        confidence = "possible"
    fix, explains = place.fix, rule_explains(rule.name)
    if rule.name == "DraftPositionsWasted":
        useful = sum(rate >= rule.fire for rate in positions)
        if useful:
            fix = f"set speculative_decoding.num_speculative_tokens: {useful}"
            # The first tokens are right: the rate is low because drafts are long.
            if positions[0] >= 0.5:
                explains |= _RATE_LOW
    return DoctorCause(
        place.step,
        rule.name,
        _lowered(rule.summary),
        confidence,
        tuple(evidence),
        fix,
        rule.causes,
        stops=place.stops,
        explains=explains,
    )


def _lowered(summary: str) -> str:
    """A summary within a sentence; a name in capitals stays."""
    if summary[1:2].isupper():
        return summary
    return summary[:1].lower() + summary[1:]


def rule_explains(alert: str) -> frozenset[str]:
    """The alerts that follow from this one, as the table of alerts has them."""
    return frozenset(d.name for d in builtin.definitions() if alert in d.inhibited_by)


def _positions(last: EngineSnapshot) -> tuple[float, ...]:
    drafts = last.total("drafts")
    if not drafts:
        return ()
    return tuple(accepted / drafts for accepted in last.accepted_per_position or ())


def _preempted(reads: Reads, last: EngineSnapshot) -> Iterator[DoctorCause]:
    """Requests that were put out of the KV cache and computed again."""
    total = last.total("preemptions") or 0.0
    finished = last.finished_requests or 0.0
    first = reads.scrapes[0].snapshot
    recent = 0.0
    if first is not None:
        recent = total - (first.total("preemptions") or 0.0)
    if recent <= 0 and (finished < 20 or total < PREEMPTED_SHARE * finished):
        return
    place = PLACES["KVCachePressure"]
    evidence = [f"{total:,.0f} preemptions for {finished:,.0f} finished requests"]
    if recent > 0:
        evidence.append(f"{recent:.0f} of them in the last {duration(PAUSE_SECONDS)}")
    if last.kv_cache_usage_ratio is not None:
        evidence.append(f"KV cache {percent(last.kv_cache_usage_ratio)} in use")
    yield DoctorCause(
        place.step,
        "preemptions",
        "under load the KV cache is too small: running requests are put out and computed again",
        "likely",
        tuple(evidence),
        place.fix,
        _usually("KVCachePressure"),
        explains=frozenset({"KVCachePressure", "QueueBacklog"}),
    )


def _worse(reads: Reads, last: EngineSnapshot, wall: float) -> Iterator[DoctorCause]:
    """What is worse at this moment than since the start, as `specserve status --engine-url` says
    it."""
    first, start = reads.scrapes[0].snapshot, last.process_start_seconds
    if first is None or first is last or start is None or wall <= start:
        return
    seen = compared(first, last, age_seconds=wall - start)
    found: Diagnosis = seen.diagnosis
    # Requests that wait for a moment are no fault of a server by themselves.
    if found.word != "degraded" or seen.usual is None or seen.usual.since not in found.sentence:
        return
    step: Step = "speed"
    if found.likely == OTHER_TEXTS:
        step = "traffic"
    usually: tuple[str, ...] = ()
    if found.likely is not None:
        usually = (found.likely,)
    message = f"worse than usual: {found.sentence}"
    evidence = (f"over {duration(seen.covered_seconds)}",)
    advice = found.advice or "specserve status --engine-url URL --interval 30"
    yield DoctorCause(step, "worse-than-usual", message, "possible", evidence, advice, usually)


def _facts(span: _Span, last: EngineSnapshot) -> Iterator[Fact]:
    def value(family: str, **labels: str) -> float | None:
        return span.readings.get(key(f"specserve_{family}", **labels))

    window = _LABELS[0]
    running, waiting = last.total("running"), last.total("waiting")
    if running is not None:
        yield Fact("load", f"{running:.0f} requests running, {waiting or 0.0:.0f} waiting")
    usage = last.kv_cache_usage_ratio
    if usage is not None:
        preempted = last.total("preemptions") or 0.0
        yield Fact("memory", f"KV cache {percent(usage)} in use, {preempted:,.0f} preemptions")
    if not last.speculates:
        yield Fact("parameters", "the engine runs without speculation: it counts no drafts")
    drafted = value("window_draft_tokens", window=window)
    rate = value("acceptance_rate", window=window)
    if drafted and rate is not None:
        said = f"{percent(rate)} of {drafted:,.0f} draft tokens accepted {span.words}"
        yield Fact("traffic", said)
        shares = ", ".join(map(percent, _positions(last)))
        yield Fact("parameters", f"accepted by position: {shares}")
    per_step = value("tokens_per_step", window=window)
    tpot = value("time_per_output_token_seconds", window=window, stat="p50")
    if per_step is not None:
        words = f"{per_step:.2f} tokens per step"
        if tpot is not None:
            words += f", TPOT P50 {latency(tpot)}"
        yield Fact("speed", words)
    gain = value("estimated_speedup_ratio", window=window)
    if gain is not None:
        yield Fact("speed", f"estimated speedup {gain:.2f}x at this load")
    requests, cut = (
        value("window_requests", window=window),
        value("length_finish_ratio", window=window),
    )
    if requests and cut is not None:
        yield Fact("output", f"{percent(cut)} of {requests:,.0f} answers ended at max_tokens")


def look_by_canary(client: EngineClient, settings: Settings) -> Look:
    """Run the canary of a launch against a server that serves already."""
    source = f"canary at {client.base_url}"
    try:
        found = canary.run(client, settings)
    except EngineError as error:
        first = str(error).splitlines()[0]
        fact = Fact("output", f"the canary could not run: {first}")
        return Look(source, frozenset(), (), (fact,))
    steps: set[Step] = set()
    if found.verdict != "unproven":
        steps = {"output", "vocabulary"}
    return Look(source, frozenset(steps), tuple(of_canary(found)), tuple(_canary_facts(found)))


def of_canary(found: CanaryResult) -> Iterator[DoctorCause]:
    """What a canary's verdict means."""
    yield from of_verdict(found.verdict, found.reasons, proof=found.is_proof)


def of_verdict(verdict: str, reasons: Sequence[str], *, proof: bool) -> Iterator[DoctorCause]:
    """The same for a verdict in words, as /status has it."""
    evidence = tuple(reasons)
    if verdict == "corrupt" and proof:
        place = PLACES["SpecOutputMismatch"]
        message = "speculation changes the output: answers are not what the target alone would say"
        yield DoctorCause(
            place.step,
            "SpecOutputMismatch",
            message,
            "proven",
            evidence,
            place.fix,
            _usually("SpecOutputMismatch"),
            stops=True,
        )
    elif verdict == "corrupt":
        yield DoctorCause(
            "load",
            "request-failed",
            "the engine failed on a request of the canary",
            "proven",
            evidence,
            "specserve doctor --log FILE   # the engine's log",
            stops=True,
        )
    elif verdict == "ineffective":
        place = PLACES["DraftHeadIneffective"]
        message = "the draft guesses almost nothing of a repetitive text"
        yield DoctorCause(
            place.step,
            "DraftHeadIneffective",
            message,
            "likely",
            evidence,
            place.fix,
            _usually("DraftHeadIneffective"),
            explains=frozenset({"AcceptanceRateLow", "AcceptanceCollapsed"}),
        )
    elif verdict == "inactive":
        place = PLACES["SpeculationInactive"]
        message = "speculation is configured, and nothing was drafted for the canary"
        yield DoctorCause(place.step, "SpeculationInactive", message, "proven", evidence, place.fix)


def _canary_facts(found: CanaryResult) -> Iterator[Fact]:
    words = f"canary {found.verdict}: {found.compared_tokens} tokens compared"
    if found.reasons and found.verdict == "unproven":
        words += f"; {found.reasons[0]}"
    yield Fact("output", words)
    if found.position0_acceptance is not None:
        rate = percent(found.position0_acceptance)
        yield Fact("vocabulary", f"{rate} of first draft tokens accepted on repetitive text")


def of_profile(profile: StepProfile) -> Look:
    """A profile alone: where speculation could pay at all."""
    facts: list[Fact] = []
    hopeless: list[str] = []
    for batch, worth in profile.cells:
        words = f"at {batch:g} running a step takes {worth.cost:.2f}x"
        if worth.break_even is None:
            hopeless.append(f"{words}, more than full acceptance brings")
        else:
            words += f", so it pays above an acceptance rate of {percent(worth.break_even)}"
        facts.append(Fact("speed", words))
    causes: tuple[DoctorCause, ...] = ()
    if hopeless and len(hopeless) == len(profile.cells):
        causes = (
            DoctorCause(
                "speed",
                "draft-too-slow",
                "the draft is too slow for this target: not even full acceptance pays",
                "proven",
                tuple(hopeless),
                "a smaller draft, fewer num_speculative_tokens, or method: ngram",
            ),
        )
    return Look("profile", frozenset({"speed"}), causes, tuple(facts))
