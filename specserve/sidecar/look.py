"""One look at an engine: two reads of its metrics, what is usual since its start, a verdict.

Pure: snapshots in, words and numbers out. It needs no config and keeps nothing, so all that it can
hold the present against is what the engine's own counters and histograms say since they began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from specserve.engine.http.metrics import EngineSample, EngineSnapshot, Histogram
from specserve.metric_families import Readings, window_label
from specserve.sidecar import rates
from specserve.sidecar.presentation import Numbers, seconds
from specserve.sidecar.status import by_window
from specserve.sidecar.window import Window
from specserve.units import duration, percent

YOUNGEST_SECONDS = 300.0
"""Age below which an engine has no usual value: what it did first is loading and warming up."""
FEWEST_REQUESTS = 20.0
"""Finished requests below which the time since the start says nothing about the usual."""
FEWEST_DRAFTS = rates.RECENT_DRAFTS
FALLEN_SHARE, FALLEN_RATIO = 0.75, 0.1
"""Acceptance counts as fallen below this part of the usual, and by more than this much."""
SLOWER = 1.5
"""A latency of this many times the usual is said."""
SAME_STEP = 1.25
"""Gaps between chunks up to this many times the usual count as unchanged."""
FULL_CACHE = 0.95
FAILING_SHARE = 0.01
ODD_RATIO = 0.2
"""Acceptance of one engine this far below the others' names it."""

OTHER_TEXTS = "the draft, or other texts than usual"
"""Why acceptance falls while a step takes as long as ever."""

VerdictWord = Literal["ok", "idle", "degraded", "down"]


@dataclass(frozen=True, slots=True)
class Usual:
    """What the present is held against."""

    since: str
    """Where it comes from, in words: ``since the start 3 h ago``."""
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one look says in words."""

    word: VerdictWord
    sentence: str
    likely: str | None = None
    """The cause that the numbers point to; None where they point to none."""
    advice: str | None = None
    """A command to type, or a thing to look at."""


@dataclass(frozen=True, slots=True)
class EngineLook:
    """Everything that one look knows."""

    model_names: tuple[str, ...]
    engines: int
    num_speculative_tokens: int | None
    """Positions of its drafts; None when it does not speculate."""
    covered_seconds: float
    """Time between the two reads."""
    age_seconds: float | None
    """Of the engine; None when it does not say when it started."""
    now: Numbers
    usual: Usual | None
    no_usual: str | None
    """Why there is no usual."""
    diagnosis: Diagnosis


def look(first: EngineSnapshot, last: EngineSnapshot, *, age_seconds: float | None) -> EngineLook:
    """Judge two reads of one engine. ``age_seconds`` is its age at the first."""
    window = Window((last.at_seconds - first.at_seconds,))
    window.add(first)
    taken = window.add(last)
    now = _gauges(last) | _windowed(window, window.spans_seconds[0])
    usual, why_not = since_start(first, age_seconds)
    tokens = None
    if last.speculates:
        tokens = len(last.accepted_per_position or ())
    restarted = not taken or window.restarts > 0
    queued = min(first.total("waiting") or 0.0, last.total("waiting") or 0.0)
    return EngineLook(
        model_names=tuple(sorted({s.model_name for s in last.engines if s.model_name})),
        engines=len({s.engine for s in last.engines}),
        num_speculative_tokens=tokens,
        covered_seconds=window.spans_seconds[0],
        age_seconds=age_seconds,
        now=now,
        usual=usual,
        no_usual=why_not,
        diagnosis=diagnose(
            last,
            now,
            usual,
            queued=queued,
            covered_seconds=window.spans_seconds[0],
            restarted=restarted,
        ),
    )


def since_start(
    snapshot: EngineSnapshot, age_seconds: float | None
) -> tuple[Usual | None, str | None]:
    """What the counters say since the engine began, or why that is no usual value."""
    if age_seconds is None:
        return None, "the engine does not say when it started (several API servers)"
    if age_seconds < YOUNGEST_SECONDS:
        return None, f"the engine started {duration(age_seconds)} ago"
    window = Window((age_seconds,))
    window.add(zeroed(snapshot, snapshot.at_seconds - age_seconds))
    window.add(snapshot)
    numbers = _windowed(window, age_seconds)
    requests = _number(numbers, "window_requests") or 0.0
    if requests < FEWEST_REQUESTS:
        return None, f"it has finished {requests:.0f} requests since its start"
    return Usual(f"since the start {duration(age_seconds)} ago", numbers), None


def diagnose(
    last: EngineSnapshot,
    now: Numbers,
    usual: Usual | None,
    *,
    queued: float,
    covered_seconds: float,
    restarted: bool = False,
) -> Diagnosis:
    """The verdict: what stands still first, then what is worse than usual.

    ``queued``: requests that waited at both reads; one that waits for a moment is no queue.
    """
    running, waiting = last.total("running") or 0.0, last.total("waiting") or 0.0
    over = duration(covered_seconds)
    if restarted:
        return Diagnosis(
            "degraded",
            "the engine restarted between the two reads, or two processes share the address",
            advice="look again; if it repeats, read the engine's log",
        )
    if last.asleep:
        return Diagnosis(
            "down",
            "the engine sleeps: it keeps requests until it is woken",
            advice="POST /wake_up to the engine",
        )
    still = not _number(now, "window_generation_tokens") and not _number(now, "steps_per_second")
    if still and waiting and not running:
        return Diagnosis(
            "down",
            f"{_requests(waiting)} waiting, none runs, and no token came in {over}",
            "the scheduler cannot start any: no room in the KV cache, or the engine hangs",
            "look again; if it stays so, restart the engine",
        )
    if still and running:
        return Diagnosis(
            "down",
            f"{_requests(running)} running, and not one token or step in {over}",
            "the engine hangs, or is in one very long prefill",
            "look again with --interval 30; if nothing moves then, restart the engine",
        )
    if still and not waiting:
        return Diagnosis(
            "idle",
            "no request runs or waits; whether a completion would succeed was not tried",
        )
    return _judged(last, now, usual, running=running, waiting=queued)


def _judged(
    last: EngineSnapshot, now: Numbers, usual: Usual | None, *, running: float, waiting: float
) -> Diagnosis:
    """The verdict on an engine that makes progress."""
    said: list[str] = []
    causes: list[tuple[str, str | None]] = []
    before: Numbers = {}
    since = ""
    if usual is not None:
        before, since = usual.numbers, usual.since
    fallen = _acceptance_fell(now, before)
    stopped = _speculation_stopped(last, now, before)
    tpot = _against(now, before, "time_per_output_token_seconds")
    gap = _against(now, before, "inter_token_latency_seconds")
    ttft = _against(now, before, "time_to_first_token_seconds")
    if tpot is not None and tpot.is_slower:
        said.append(f"TPOT {seconds(tpot.now)}, {seconds(tpot.usual)} {since}")
    if ttft is not None and ttft.is_slower:
        said.append(f"TTFT {seconds(ttft.now)}, {seconds(ttft.usual)} {since}")
    if fallen is not None:
        said.append(f"acceptance {percent(fallen.now)}, {percent(fallen.usual)} {since}")
    if stopped:
        said.append(f"nothing is drafted, though it was {since}")
    step_is_slower = gap is not None and gap.now > SAME_STEP * gap.usual
    if gap is not None and gap.is_slower:
        said.append(f"a step takes {seconds(gap.now)}, {seconds(gap.usual)} {since}")
    elif gap is not None and said and not step_is_slower:
        said.append(f"a step is as fast as usual ({seconds(gap.now)})")
    usage = last.kv_cache_usage_ratio
    if usage is not None and usage >= FULL_CACHE and waiting:
        said.append(f"KV cache {percent(usage)} full")
        causes.append(("the KV cache is full", "fewer or shorter requests, or more replicas"))
    if waiting:
        said.append(f"{_requests(waiting)} waiting behind {running:.0f} running")
    failing = _failing(now)
    if failing is not None:
        said.append(f"{percent(failing)} of its answers are errors (5xx)")
        causes.append(("requests fail in the engine", "read the engine's log"))
    odd = _odd_engine(now)
    if odd is not None:
        said.append(odd)
        causes.append(("that one engine", "restart it, and compare its GPU with the others"))
    if fallen is not None and not step_is_slower:
        causes.insert(0, (OTHER_TEXTS, "specserve verify --url URL"))
    if stopped:
        causes.insert(0, ("the batch is larger than the schedule speculates for", None))
    if step_is_slower and not causes:
        causes.append(_slow_step(waiting))
    if waiting and not causes:
        causes.append(("more requests than it can run at once", "add a replica, or admit fewer"))
    if not said:
        return Diagnosis("ok", _calm(running, usual))
    likely = advice = None
    if causes:
        likely, advice = causes[0]
    return Diagnosis("degraded", "; ".join(said), likely, advice)


def _slow_step(waiting: float) -> tuple[str, str | None]:
    if waiting:
        return "load: a larger batch makes each step longer", "add a replica, or admit fewer"
    return (
        "the GPU (clocks held down, another process), a larger batch or longer texts",
        "nvidia-smi --query-gpu=clocks_event_reasons.active,utilization.gpu --format=csv",
    )


def _calm(running: float, usual: Usual | None) -> str:
    if usual is None:
        return f"serving: {_requests(running)} running, none waiting"
    return f"serving: {_requests(running)} running, none waiting; nothing is worse than usual"


@dataclass(frozen=True, slots=True)
class _Compared:
    """A number beside its usual value."""

    now: float
    usual: float

    @property
    def is_slower(self) -> bool:
        return self.now > SLOWER * self.usual


def _against(now: Numbers, usual: Numbers, name: str) -> _Compared | None:
    """The means of a latency: exact, whatever the histogram's buckets."""
    found, before = _number(now, name, "mean"), _number(usual, name, "mean")
    if found is None or not before:
        return None
    return _Compared(found, before)


def _acceptance_fell(now: Numbers, usual: Numbers) -> _Compared | None:
    found, before = _number(now, "acceptance_rate"), _number(usual, "acceptance_rate")
    if found is None or before is None or _few_drafts(now) or _few_drafts(usual):
        return None
    if found < FALLEN_SHARE * before and before - found > FALLEN_RATIO:
        return _Compared(found, before)
    return None


def _few_drafts(numbers: Numbers) -> bool:
    return (_number(numbers, "window_drafts") or 0.0) < FEWEST_DRAFTS


def _speculation_stopped(last: EngineSnapshot, now: Numbers, usual: Numbers) -> bool:
    """Whether tokens come and none of them from a draft, though that was otherwise."""
    tokens = _number(now, "window_generation_tokens") or 0.0
    drafted = _number(now, "window_drafts") or 0.0
    return last.speculates and tokens >= FEWEST_DRAFTS and not drafted and not _few_drafts(usual)


def _failing(now: Numbers) -> float | None:
    share = _number(now, "http_error_ratio", "5xx")
    if share is None or share <= FAILING_SHARE:
        return None
    return share


def _odd_engine(now: Numbers) -> str | None:
    """The engine that accepts far less than the others."""
    rates_now = now.get("engine_acceptance_rate")
    if not isinstance(rates_now, Mapping) or len(rates_now) < 2:
        return None
    if _few_drafts(now):
        return None
    worst = min(rates_now, key=lambda engine: rates_now[engine])
    others = [rate for engine, rate in rates_now.items() if engine != worst]
    if min(others) - rates_now[worst] <= ODD_RATIO:
        return None
    return (
        f"engine {worst} accepts {percent(rates_now[worst])}, the others "
        f"{percent(min(others))} or more"
    )


def _requests(number: float) -> str:
    if number == 1:
        return "1 request"
    return f"{number:.0f} requests"


def _number(numbers: Numbers, name: str, stat: str = "") -> float | None:
    found = numbers.get(name)
    if isinstance(found, Mapping):
        return found.get(stat)
    return found


def _gauges(snapshot: EngineSnapshot) -> dict[str, float | dict[str, float]]:
    found = {
        "requests_running": snapshot.total("running"),
        "requests_waiting": snapshot.total("waiting"),
        "kv_cache_usage_ratio": snapshot.kv_cache_usage_ratio,
    }
    return {name: value for name, value in found.items() if value is not None}


def _windowed(window: Window, covered: float) -> dict[str, float | dict[str, float]]:
    """Short name -> value over one window."""
    readings: Readings = rates.readings(window, covered)
    label = window_label(covered)
    assert all(dict(labels).get("window") == label for _, labels in readings)
    return by_window(readings).get(label, {})


def zeroed(snapshot: EngineSnapshot, at_seconds: float) -> EngineSnapshot:
    """The same engine before it did anything."""
    http = None
    if snapshot.http is not None:
        http = dict.fromkeys(snapshot.http, 0.0)
    engines = tuple(_nothing_done(sample) for sample in snapshot.engines)
    return replace(snapshot, at_seconds=at_seconds, engines=engines, http=http)


def _nothing_done(sample: EngineSample) -> EngineSample:
    positions = finished = None
    if sample.accepted_per_position is not None:
        positions = (0.0,) * len(sample.accepted_per_position)
    if sample.finished is not None:
        finished = dict.fromkeys(sample.finished, 0.0)
    histograms = {
        name: Histogram(found.bounds, (0.0,) * len(found.bounds), 0.0)
        for name, found in sample.histograms.items()
    }
    return replace(
        sample,
        values=dict.fromkeys(sample.values, 0.0),
        accepted_per_position=positions,
        finished=finished,
        histograms=histograms,
    )
