"""The supervisor's state machine: pure, so every road is walked without a process or a clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.supervise.state import (
    Action,
    EngineState,
    Event,
    Exited,
    Failed,
    Lifecycle,
    Limits,
    Ready,
    Start,
    Stop,
    Tick,
    advance,
)

LIMITS = Limits(start_timeout_seconds=100, drain_timeout_seconds=70, max_restarts=0)
RESTARTS = Limits(
    start_timeout_seconds=100, drain_timeout_seconds=70, max_restarts=2, backoff_seconds=2
)
CRASH = Exited("exited with status 1")
TERM = Stop("SIGTERM")


def walk(
    limits: Limits, *events: tuple[float, Event]
) -> tuple[Lifecycle, list[tuple[str, Action]]]:
    """The machine after the events, and (state, action) of every step."""
    machine, seen = Lifecycle(), []
    for now, event in events:
        step = advance(machine, event, now, limits)
        machine = step.machine
        seen.append((machine.state.value, step.action))
    return machine, seen


def test_a_start_becomes_running_when_a_completion_made_progress():
    """stopped -> starting -> running; the start deadline is gone once it runs."""
    machine, seen = walk(LIMITS, (0, Start()), (5, Tick()), (9, Ready()), (500, Tick()))
    assert seen == [
        ("starting", Action.START),
        ("starting", Action.NONE),
        ("running", Action.NONE),
        ("running", Action.NONE),
    ]
    assert (machine.was_ready, machine.deadline, machine.since) == (True, None, 9)


def test_a_crash_before_ready_is_fatal_without_restarts():
    """The cause is kept, and it was never ready."""
    machine, _ = walk(LIMITS, (0, Start()), (3, CRASH))
    assert (machine.state, machine.was_ready, machine.cause) == (
        EngineState.FATAL,
        False,
        "exited with status 1",
    )
    assert machine.over


def test_a_start_that_hangs_is_ended_at_the_deadline():
    """TERM at the deadline, KILL five seconds later, fatal when it has gone."""
    machine, seen = walk(
        LIMITS,
        (0, Start()),
        (99.9, Tick()),
        (100, Tick()),
        (104, Tick()),
        (105, Tick()),
        (106, CRASH),
    )
    assert [a for _, a in seen] == [
        Action.START,
        Action.NONE,
        Action.TERMINATE,
        Action.NONE,
        Action.KILL,
        Action.NONE,
    ]
    assert (machine.state, machine.cause) == (EngineState.FATAL, "not ready within 100 s")


def test_restarts_wait_twice_as_long_each_time_and_then_end():
    """Two restarts after 2 and 4 seconds; the third loss is fatal and remembers that it once was ready."""
    machine, seen = walk(
        RESTARTS,
        (0, Start()), (10, Ready()), (20, CRASH),
        (21.9, Tick()), (22, Tick()), (23, CRASH),
        (26.9, Tick()), (27, Tick()), (28, CRASH),
    )  # fmt: skip
    assert [s for s, _ in seen] == [
        "starting", "running", "backoff", "backoff", "starting", "backoff", "backoff", "starting", "fatal",
    ]  # fmt: skip
    assert (machine.was_ready, machine.restarts) == (True, 2)


def test_ten_quiet_minutes_forgive_earlier_restarts():
    """A loss after 600 s of running starts the count anew; after 599 s it does not."""
    used_up = ((0, Start()), (1, CRASH), (3, Tick()), (4, CRASH), (8, Tick()), (10, Ready()))
    assert walk(RESTARTS, *used_up, (610, CRASH))[0].state is EngineState.BACKOFF
    assert walk(RESTARTS, *used_up, (609, CRASH))[0].state is EngineState.FATAL
    assert (
        walk(RESTARTS, *used_up, (610, Failed("dead")), (611, CRASH))[0].state
        is EngineState.BACKOFF
    )
    assert (
        walk(RESTARTS, *used_up, (609, Failed("dead")), (611, CRASH))[0].state is EngineState.FATAL
    )


def test_a_final_failure_is_not_tried_again():
    """A refused canary ends it although restarts are left."""
    machine, seen = walk(
        RESTARTS, (0, Start()), (5, Failed("the text is corrupt", retry=False)), (6, CRASH)
    )
    assert seen[1:] == [("stopping", Action.TERMINATE), ("fatal", Action.NONE)]
    assert machine.cause == "the text is corrupt"


def test_a_dead_engine_core_is_ended_and_restarted():
    """Dead inside: the process is ended first, then the restart is due."""
    machine, seen = walk(RESTARTS, (0, Start()), (5, Ready()), (9, Failed("dead")), (10, CRASH))
    assert seen[2:] == [("stopping", Action.TERMINATE), ("backoff", Action.NONE)]
    assert machine.cause == "dead"


def test_a_stop_while_running_drains():
    """TERM, the whole drain time, then stopped with nothing to complain about."""
    machine, seen = walk(
        LIMITS, (0, Start()), (5, Ready()), (10, TERM), (79, Tick()), (79.5, CRASH)
    )
    assert seen[2:] == [
        ("stopping", Action.TERMINATE),
        ("stopping", Action.NONE),
        ("stopped", Action.NONE),
    ]
    assert (machine.stopped_from, machine.killed, machine.cut_short) == (
        EngineState.RUNNING,
        False,
        False,
    )
    assert machine.over


def test_a_drain_that_does_not_end_is_killed():
    """KILL when the drain time is over, once."""
    machine, seen = walk(
        LIMITS, (0, Start()), (5, Ready()), (10, TERM), (80, Tick()), (81, Tick()), (82, CRASH)
    )
    assert [a for _, a in seen[2:]] == [Action.TERMINATE, Action.KILL, Action.NONE, Action.NONE]
    assert (machine.state, machine.killed, machine.cut_short) == (EngineState.STOPPED, True, False)


def test_a_second_signal_skips_the_drain():
    """KILL at once; a third signal adds nothing."""
    machine, seen = walk(
        LIMITS,
        (0, Start()),
        (5, Ready()),
        (10, TERM),
        (11, Stop("SIGINT")),
        (11.1, Stop("SIGINT")),
        (12, CRASH),
    )
    assert [a for _, a in seen[2:]] == [Action.TERMINATE, Action.KILL, Action.NONE, Action.NONE]
    assert (machine.state, machine.cut_short) == (EngineState.STOPPED, True)


def test_sigquit_does_not_drain_at_all():
    """Ctrl-\\ means now."""
    machine, seen = walk(LIMITS, (0, Start()), (5, Ready()), (10, Stop("SIGQUIT", at_once=True)))
    assert seen[2] == ("stopping", Action.KILL)
    assert machine.cut_short


def test_a_stop_while_starting_gives_five_seconds_only():
    """Nobody is served, so there is nothing to wait for."""
    machine, seen = walk(
        LIMITS, (0, Start()), (10, TERM), (14.9, Tick()), (15, Tick()), (16, CRASH)
    )
    assert [a for _, a in seen[1:]] == [Action.TERMINATE, Action.NONE, Action.KILL, Action.NONE]
    assert (machine.state, machine.stopped_from) == (EngineState.STOPPED, EngineState.STARTING)


def test_a_stop_during_backoff_ends_at_once():
    """There is no process to end."""
    machine, seen = walk(RESTARTS, (0, Start()), (1, CRASH), (2, TERM))
    assert seen[2] == ("stopped", Action.NONE)
    assert machine.over


def test_a_stop_while_a_failed_engine_ends_only_cancels_the_restart():
    """It is the first signal of the user, not a second one."""
    machine, seen = walk(RESTARTS, (0, Start()), (5, Failed("dead")), (6, TERM), (7, CRASH))
    assert seen[2:] == [("stopping", Action.NONE), ("stopped", Action.NONE)]
    assert machine.killed is False


def test_sigquit_while_a_failed_engine_ends_does_not_wait_for_it():
    """At once is at once, whatever goes on."""
    _, seen = walk(
        RESTARTS, (0, Start()), (5, Failed("dead")), (6, Stop("SIGQUIT", at_once=True)), (7, CRASH)
    )
    assert seen[2:] == [("stopping", Action.KILL), ("stopped", Action.NONE)]


def test_a_process_that_outlives_kill_is_given_up():
    """Twenty seconds after KILL the supervisor stops waiting and says so."""
    machine, _ = walk(LIMITS, (0, Start()), (5, Ready()), (10, TERM), (80, Tick()), (100, Tick()))
    assert (machine.state, machine.cause) == (EngineState.FATAL, "still there 20 s after SIGKILL")


QUIT = Stop("SIGQUIT", at_once=True)
EVENTS = st.sampled_from(
    [
        Start(),
        Ready(),
        Failed("x"),
        Failed("x", retry=False),
        CRASH,
        TERM,
        QUIT,
        Tick(),
        Tick(),
        Tick(),
    ]
)


@given(st.lists(st.tuples(st.floats(0, 50), EVENTS), max_size=30), st.integers(0, 3))
def test_whatever_happens_the_end_is_final_and_restarts_are_bounded(steps, max_restarts):
    """No event leaves stopped-by-signal or fatal; the engine is started at most 1 + max_restarts times between
    two stretches of ten quiet minutes."""
    limits = Limits(start_timeout_seconds=100, drain_timeout_seconds=70, max_restarts=max_restarts)
    times = itertools.accumulate(pause for pause, _ in steps)
    machine, starts = Lifecycle(), 0
    for now, (_, event) in zip(times, steps, strict=True):
        step = advance(machine, event, now, limits)
        if machine.over:
            assert step.machine == machine
        if step.action is Action.START:
            starts += 1
        if step.machine.restarts < machine.restarts:
            starts = 0
        assert step.machine.restarts <= max_restarts
        assert (step.reason is None) == (step.machine == machine)
        machine = step.machine
    assert starts <= 1 + max_restarts


@pytest.mark.parametrize(
    ("restarts", "pause"), [(0, 2), (1, 4), (2, 8), (3, 16), (4, 32), (5, 60), (30, 60)]
)
def test_backoff_doubles_up_to_a_minute(restarts, pause):
    """2 s, doubling, never more than 60 s."""
    assert RESTARTS.backoff(restarts) == pause
