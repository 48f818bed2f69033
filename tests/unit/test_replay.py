"""Whole sequences of reads in virtual time, in the words of every version: windows, verdicts and alerts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.soak_sidecar import Soak
from specserve.alert import builtin
from specserve.alert.evaluate import Evaluator
from specserve.config.schema import Settings
from specserve.metric_families import key
from specserve.sidecar.window import EngineCounter
from tests.replay import WALL, observe, recorded, replay
from tests.virtual_engine import STYLES, VirtualEngine

DATA = Path(__file__).parents[1] / "data" / "metrics"
SETTINGS = Settings.model_validate(
    {"models": {"target_model": {"path": "/models/t"}}, "speculative_decoding": {"method": "ngram"}}
)
INTERVAL = 15.0


def reads(
    engine: VirtualEngine, style: str, *phases: tuple[float, float | None], drafts: int = 200
) -> Iterator[tuple[float, str]]:
    """Minutes of traffic at an acceptance rate, one phase after the other; None is minutes without any."""
    at = 0.0
    for minutes, rate in phases:
        for _ in range(round(minutes * 60 / INTERVAL)):
            at += INTERVAL
            engine.running = 0 if rate is None else 4
            if rate is not None:
                engine.work(drafts=drafts, rates=(rate, rate, rate), requests=3)
                engine.observe("ttft", 0.05, 3)
            yield at, engine.text(style)


def firing(observations: list, *names: str) -> dict[str, list[float]]:
    """Alert -> minutes at which it began and ended to fire."""
    rules, changes = Evaluator(builtin.rules(SETTINGS)), {name: [] for name in names}
    for i, seen in enumerate(observations):
        now = (i + 1) * INTERVAL
        active = {
            a.name
            for a in rules.evaluate(seen.readings, now=now, at=WALL + now).active
            if a.state.value == "firing"
        }
        for name, edges in changes.items():
            if (name in active) != (len(edges) % 2 == 1):
                edges.append(now / 60)
    return changes


@pytest.mark.parametrize("style", STYLES)
def test_low_acceptance_fires_and_resolves_in_every_version(style: str) -> None:
    """Ten good minutes, fifteen bad, fifteen good: fires some minutes into the bad part, ends some into the good."""
    seen = observe(reads(VirtualEngine(), style, (10, 0.8), (15, 0.2), (15, 0.8)))
    assert seen[39].readings[key("specserve_acceptance_rate", window="5m")] == pytest.approx(0.8)
    assert seen[99].readings[key("specserve_acceptance_rate", window="5m")] == pytest.approx(0.2)
    assert seen[79].readings[key("specserve_acceptance_rate", window="1m")] == pytest.approx(0.2)
    began, ended = firing(seen, "AcceptanceRateLow")["AcceptanceRateLow"]
    assert 12 < began < 18
    assert 25 < ended < 33
    assert all(s.assessment.live.ok and s.assessment.ready.ok for s in seen)


def test_nothing_fires_while_idle() -> None:
    """A server without traffic, after a bad minute of little traffic: no alert at all about speculation."""
    seen = observe(reads(VirtualEngine(), "0.32", (1, 0.0), (60, None), drafts=20))
    names = (
        "AcceptanceRateLow",
        "AcceptanceCollapsed",
        "SpeculationInactive",
        "EngineStalled",
        "AcceptanceDrift",
    )
    assert firing(seen, *names) == {name: [] for name in names}


def test_speculation_that_never_drafts_is_inactive() -> None:
    """Configured, generating, nothing drafted."""

    def plain() -> Iterator[tuple[float, str]]:
        engine = VirtualEngine()
        for i in range(80):
            engine.running = 4
            engine.work(plain=2000, requests=5)
            yield (i + 1) * INTERVAL, engine.text()

    (began,) = firing(observe(plain()), "SpeculationInactive")["SpeculationInactive"]
    assert 5 < began < 12


@pytest.mark.parametrize(("stopped", "named"), [({2}, ["2"]), ({0, 1, 2, 3}, [])])
def test_the_rank_that_hangs_among_others_is_named(stopped: set[int], named: list[str]) -> None:
    """One of four ranks stands still with requests: alive, and an alert names it. All of them: not this alert."""
    ranks = [VirtualEngine(engine=str(n), running=4) for n in range(4)]

    def hang() -> Iterator[tuple[float, str]]:
        for i in range(40):
            for n, rank in enumerate(ranks):
                rank.work(plain=0 if i >= 20 and n in stopped else 100)
            yield (i + 1) * INTERVAL, "".join(rank.text(start=None) for rank in ranks)

    rules, found = Evaluator(builtin.rules(SETTINGS)), set()
    for i, seen in enumerate(observe(hang())):
        active = rules.evaluate(seen.readings, now=i * INTERVAL, at=WALL).active
        found |= {
            dict(a.labels)["engine"]
            for a in active
            if a.name == "EngineRankStalled" and a.state.value == "firing"
        }
        assert seen.assessment.live.ok
    assert sorted(found) == named


def test_an_hour_of_trouble_leave_no_trace() -> None:
    """Resets, restarts, late and half answers: totals are the engine's, windows its ratios, nobody is called dead."""
    soak = Soak(seed=3)
    for _ in range(720):
        soak.step()
    assert soak.not_live == 0
    assert soak.compared > 300
    assert soak.worst_drift < 1e-9
    seen = soak.observer._window.totals()[EngineCounter("drafts")]
    assert seen == soak.drafts - soak.unread


@pytest.mark.parametrize(
    "path", sorted(DATA.glob("*.jsonl.gz")), ids=lambda p: p.name.removesuffix(".jsonl.gz")
)
def test_recordings_of_real_engines(path: Path) -> None:
    """Each read is understood; rates are those of the first and last counters; the engine is alive and ready."""
    seen = replay(path)
    assert all(s.assessment.live.ok for s in seen)
    assert seen[-1].assessment.ready.ok
    counted = {}
    for name in ("draft", "accepted"):
        values = []
        for _, text in recorded(path):
            lines = [
                line
                for line in text.splitlines()
                if line.startswith(f"vllm:spec_decode_num_{name}_tokens_total{{")
            ]
            values.append(sum(float(line.rpartition(" ")[2]) for line in lines))
        counted[name] = values[-1] - values[0]
    window = seen[-1].readings[key("specserve_acceptance_rate", window="30m")]
    assert window == pytest.approx(counted["accepted"] / counted["draft"])
