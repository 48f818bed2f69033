"""Counters to rates: weighted by tokens, right across resets, restarts, gaps and several engines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.engine.http.metrics import EngineSnapshot, parse
from specserve.metric_families import key
from specserve.sidecar.rates import quantile, readings
from specserve.sidecar.window import RESOLUTION, EngineCounter, Window
from tests.virtual_engine import VirtualEngine


def snapshot(
    at: float, *engines: VirtualEngine, start: float | None = 1000.0, **http: int
) -> EngineSnapshot:
    """One read of these engines."""
    text = "".join(e.text(start=None, http=http if i == 0 else None) for i, e in enumerate(engines))
    return parse(
        text + ("" if start is None else f"process_start_time_seconds {start}\n"), at_seconds=at
    )


def minute(window: Window, name: str, **labels: str) -> float | None:
    """One reading of the one-minute window."""
    return readings(window, 60.0).get(key(f"specserve_{name}", window="1m", **labels))


def test_acceptance_is_weighted_by_tokens() -> None:
    """Two intervals with very different traffic: the busy one decides."""
    engine, window = VirtualEngine(), Window()
    window.add(snapshot(0, engine))
    engine.work(drafts=1000, rates=(0.9, 0.6, 0.3))
    window.add(snapshot(5, engine))
    engine.work(drafts=10, rates=(0.0, 0.0, 0.0))
    window.add(snapshot(10, engine))
    assert minute(window, "acceptance_rate") == pytest.approx(1800 / 3030)
    assert minute(window, "mean_acceptance_length") == pytest.approx(1 + 1800 / 1010)
    assert minute(window, "window_draft_tokens") == 3030
    assert minute(window, "draft_tokens_per_second") == 303
    assert minute(window, "accepted_output_ratio") == pytest.approx(1800 / 2810)
    assert minute(window, "tokens_per_step") == pytest.approx(2810 / 1010)
    assert minute(window, "verified_token_yield_ratio") == pytest.approx(1800 / 4040)
    assert minute(window, "window_seconds") == 10


def test_positions_unconditional_and_conditional() -> None:
    """Position 2: 30 % of all drafts, but half of those whose token before was accepted."""
    engine, window = VirtualEngine(), Window()
    window.add(snapshot(0, engine))
    engine.work(drafts=100, rates=(0.9, 0.6, 0.3))
    window.add(snapshot(5, engine))
    found = [minute(window, "acceptance_rate_per_position", position=str(i)) for i in range(3)]
    assert found == [0.9, 0.6, 0.3]
    conditional = [
        minute(window, "conditional_acceptance_rate_per_position", position=str(i))
        for i in range(3)
    ]
    assert conditional == pytest.approx([0.9, 0.6 / 0.9, 0.5])


def test_nothing_drafted_is_absent_not_zero() -> None:
    """An idle engine and one without speculation have no acceptance rate; the sample size says why."""
    for engine in (VirtualEngine(), VirtualEngine(positions=0)):
        window = Window()
        window.add(snapshot(0, engine))
        window.add(snapshot(5, engine))
        assert minute(window, "acceptance_rate") is None
        assert minute(window, "mean_acceptance_length") is None
        assert minute(window, "window_draft_tokens") == (0 if engine.positions else None)
        assert minute(window, "requests_per_second") == 0


def test_one_read_says_nothing() -> None:
    """What was counted before the first read belongs to no window, and to the totals."""
    engine, window = VirtualEngine(), Window()
    engine.work(drafts=100, rates=(0.9, 0.6, 0.3))
    window.add(snapshot(0, engine))
    assert readings(window, 60.0) == {}
    assert window.totals()[EngineCounter("draft_tokens")] == 300


def test_a_reset_counts_from_zero() -> None:
    """A counter that fell was reset: its new value is what was added, for every counter of that engine."""
    engine, window = VirtualEngine(), Window()
    engine.work(drafts=1000, rates=(0.9, 0.6, 0.3))
    window.add(snapshot(0, engine))
    engine.reset()
    engine.work(drafts=10, rates=(0.5, 0.5, 0.5))
    engine.counters["prompt_tokens"] = 70  # higher than before the reset, and reset all the same
    window.add(snapshot(5, engine))
    assert minute(window, "window_draft_tokens") == 30
    assert minute(window, "acceptance_rate") == 0.5
    assert minute(window, "prompt_tokens_per_second") == 14
    assert window.totals()[EngineCounter("draft_tokens")] == 3030


def test_a_restart_empties_the_windows_and_keeps_the_totals() -> None:
    """A new process start time: nothing of the old process is averaged with the new one."""
    engine, window = VirtualEngine(), Window()
    window.add(snapshot(0, engine))
    engine.work(drafts=1000, rates=(0.9, 0.6, 0.3))
    window.add(snapshot(5, engine))
    engine.reset()
    engine.work(drafts=2000, rates=(0.1, 0.0, 0.0))
    window.add(snapshot(10, engine, start=1010.0))
    assert readings(window, 60.0) == {}
    assert window.restarts == 1
    assert window.totals()[EngineCounter("draft_tokens")] == 9000
    engine.work(drafts=10, rates=(0.5, 0.5, 0.5))
    window.add(snapshot(15, engine, start=1010.0))
    assert minute(window, "acceptance_rate") == 0.5


def test_an_older_process_is_not_this_one() -> None:
    """Several API servers behind one port answer in turn: only the newest is followed, so nothing looks reset."""
    ours, other, window = VirtualEngine(), VirtualEngine(), Window()
    assert window.add(snapshot(0, ours, start=1001.0))
    other.work(drafts=7, rates=(0.0, 0.0, 0.0))
    assert not window.add(snapshot(5, other, start=1000.0))
    ours.work(drafts=100, rates=(0.9, 0.6, 0.3))
    assert window.add(snapshot(10, ours, start=1001.0))
    assert minute(window, "acceptance_rate") == pytest.approx(0.6)
    assert [window.add(snapshot(15 + i, other, start=1000.0)) for i in range(4)] == [
        False,
        False,
        False,
        True,
    ]


def test_engines_are_summed_before_dividing() -> None:
    """Acceptance of a data parallel server is a ratio of sums; the spread tells how far apart the engines are."""
    a, b, window = VirtualEngine(engine="0"), VirtualEngine(engine="1"), Window()
    window.add(snapshot(0, a, b))
    a.work(drafts=900, rates=(0.9, 0.9, 0.9))
    b.work(drafts=100, rates=(0.1, 0.1, 0.1))
    window.add(snapshot(5, a, b))
    assert minute(window, "acceptance_rate") == pytest.approx((2430 + 30) / 3000)
    assert minute(window, "engine_acceptance_rate", engine="0") == pytest.approx(0.9)
    assert minute(window, "engine_acceptance_rate", engine="1") == pytest.approx(0.1)
    assert minute(window, "acceptance_rate_spread") == pytest.approx(0.8)


def test_an_engine_that_appears_later_makes_no_jump() -> None:
    """A rank whose counters already stand at a million was at a million before, as far as anybody knows."""
    a, b, window = VirtualEngine(engine="0"), VirtualEngine(engine="1"), Window()
    b.work(drafts=1_000_000, rates=(0.1, 0.0, 0.0))
    window.add(snapshot(0, a))
    a.work(drafts=100, rates=(0.9, 0.6, 0.3))
    window.add(snapshot(5, a, b))
    assert minute(window, "window_draft_tokens") == 300
    assert window.totals()[EngineCounter("draft_tokens")] == 3_000_300


def test_the_first_error_counts() -> None:
    """A status class exists only from its first answer on; that answer is not lost."""
    engine, window = VirtualEngine(), Window()
    window.add(snapshot(0, engine, **{"2xx": 100}))
    window.add(snapshot(5, engine, **{"2xx": 103, "5xx": 1}))
    assert minute(window, "http_error_ratio", status="5xx") == 0.25
    assert minute(window, "http_error_ratio", status="4xx") == 0


def test_a_gap_in_the_reads_loses_nothing_and_bends_nothing() -> None:
    """After ten blind minutes the minute starts anew instead of averaging over the gap; the total has it all."""
    engine, window = VirtualEngine(), Window()
    window.add(snapshot(0, engine))
    engine.work(drafts=6000, rates=(0.9, 0.6, 0.3))
    window.add(snapshot(600, engine))
    assert minute(window, "acceptance_rate") is None
    assert readings(window, 300.0)[key("specserve_acceptance_rate", window="5m")] == pytest.approx(
        0.6
    )
    engine.work(drafts=10, rates=(0.3, 0.3, 0.3))
    window.add(snapshot(605, engine))
    assert minute(window, "acceptance_rate") == pytest.approx(0.3)
    assert window.totals()[EngineCounter("drafts")] == 6010


def test_latency_quantiles_come_from_the_window_alone() -> None:
    """Slow requests of an hour ago do not show in the last minute."""
    engine, window = VirtualEngine(), Window()
    engine.observe("ttft", 9.0, 1000)
    window.add(snapshot(0, engine))
    engine.observe("ttft", 0.03, 100)
    engine.work(requests=100)
    window.add(snapshot(5, engine))
    assert minute(window, "time_to_first_token_seconds", stat="p50") == pytest.approx(0.03)
    assert minute(window, "time_to_first_token_seconds", stat="p99") == pytest.approx(0.0398)
    assert minute(window, "time_to_first_token_seconds", stat="mean") == pytest.approx(0.03)
    assert minute(window, "request_latency_seconds", stat="p50") is None


def test_own_canaries_are_no_traffic() -> None:
    """A completion of one token that the sidecar made leaves requests, tokens and latencies of users alone."""
    engine, window = VirtualEngine(), Window()
    window.add(snapshot(0, engine))
    engine.work(plain=1)
    engine.finished["length"] += 1
    engine.observe("ttft", 0.03)
    window.exclude(requests=1, tokens=1)
    window.add(snapshot(5, engine))
    assert minute(window, "window_requests") == 0
    assert minute(window, "generation_tokens_per_second") == 0
    assert minute(window, "length_finish_ratio") is None
    assert minute(window, "time_to_first_token_seconds", stat="p50") is None


@pytest.mark.parametrize("longest", [1_800.0, 86_400.0])
def test_every_window_is_exact_and_memory_bounded(longest: float) -> None:
    """A window of a day, or reads every half second, leave the minute and the half hour as they are."""
    engine, window = VirtualEngine(), Window((60.0, 300.0, 1_800.0, longest))
    base = snapshot(0, engine)
    for i in range(7_000):
        window.add(EngineSnapshot(i / 2, base.engines, base.process_start_seconds))
        for seconds in (60.0, 1_800.0):
            if i % 7 == 0 and i / 2 >= seconds:
                span = window.span(seconds)
                assert span is not None
                assert seconds <= span.seconds <= seconds * (1 + 1 / RESOLUTION)
    assert len(window._history) <= 1_200


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.booleans(), st.integers(1, 30)), min_size=2, max_size=40
    )
)
def test_totals_are_what_was_done_whatever_the_counters_did(
    steps: list[tuple[int, bool, int]],
) -> None:
    """Resets anywhere: totals never fall, never lose what a read saw, and no window is ever negative."""
    engine, window, done, at = VirtualEngine(), Window(), 0, 0.0
    window.add(snapshot(0.0, engine))
    for drafts, reset, seconds in steps:
        if reset and engine.counters["spec_decode_num_drafts"] > drafts:
            engine.reset()
        engine.work(drafts=drafts, rates=(0.5, 0.25, 0.25))
        done, at = done + drafts, at + seconds
        window.add(snapshot(at, engine))
        rate = minute(window, "acceptance_rate")
        assert rate is None or rate == pytest.approx(1 / 3)
        assert window.totals()[EngineCounter("drafts")] == done


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((10, 10, 10), 0.5, 0.5),
        ((0, 10, 10), 0.9, 1.9),
        ((5, 5, 10), 0.99, 2.0),
        ((0, 4, 4), 1.0, 2.0),
    ],
    ids=["none", "first", "inside", "beyond", "edge"],
)
def test_quantiles(counts: tuple[float, ...], q: float, expected: float | None) -> None:
    """Linear inside a bucket, the highest finite bound beyond, None without observations."""
    assert quantile((1.0, 2.0, math.inf), counts, q) == expected
