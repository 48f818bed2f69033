"""How a run ends for the user: which exception, which words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specserve.commands.launch import block
from specserve.errors import EngineLost, EngineStartError, Interrupted
from specserve.supervise.report import Serving
from specserve.supervise.state import EngineState, Lifecycle, Limits
from specserve.supervise.verdict import Drained, LastSeen, judge

LIMITS = Limits(start_timeout_seconds=100, drain_timeout_seconds=70)
LOG = Path("/logs/engine.log")


def test_a_clean_drain_says_nothing():
    """Stopped from running, by one signal, without KILL."""
    judge(
        Lifecycle(EngineState.STOPPED, stop_signal="SIGTERM", stopped_from=EngineState.RUNNING),
        LastSeen(LOG),
        LIMITS,
    )


STOPPED = Lifecycle(
    EngineState.STOPPED, stop_signal="SIGTERM", stopped_from=EngineState.RUNNING, was_ready=True
)
OOM = "(out of memory, or somebody ended it)"
CUT = "running requests were cut off"
UNKNOWN = f"{CUT}, their number is not known"
HEALTH = "(/health returned an error)"
DRAIN = Limits(start_timeout_seconds=100, drain_timeout_seconds=70, engine_drain_seconds=60)


@pytest.mark.parametrize(
    ("status", "drained"),
    [
        (0, Drained()),
        (0, Drained(0, seconds=59.9)),
        (0, Drained(3, seconds=20)),  # they have ended since that look: it had the time
        (-15, Drained(3, seconds=20)),  # uvicorn ends itself by the signal that it was sent
        (-9, Drained(0, seconds=20)),
        (1, Drained(0, seconds=20)),
        (0, Drained(0, is_core_dead=True, seconds=1)),  # the core has ended before its API process
    ],
)
def test_a_drain_that_cut_nothing_off_says_nothing(status, drained):
    """However it ended: no request was lost."""
    judge(STOPPED, LastSeen(LOG, status=status, drained=drained), DRAIN)


@pytest.mark.parametrize(
    ("status", "drained", "words"),
    [
        (-9, Drained(2), f"was killed by SIGKILL {OOM} while it drained; 2 {CUT}"),
        (-11, Drained(None), f"was killed by SIGSEGV while it drained; {UNKNOWN}"),
        (1, Drained(1), "exited with status 1 while it drained; 1 running request was cut off"),
        (0, Drained(4, seconds=59.9), f"gave up after 60 s of draining; 4 {CUT}"),
        (0, Drained(2, ended_seconds=0.1), f"ended at once, without draining; 2 {CUT}"),
        (
            0,
            Drained(4, is_core_dead=True),
            f"its engine core died while it drained {HEALTH}; 4 {CUT}",
        ),
    ],
)
def test_requests_that_a_drain_cut_off_are_counted(status, drained, words):
    """Exit code 5, with the number where it is known."""
    with pytest.raises(EngineLost) as caught:
        judge(STOPPED, LastSeen(LOG, status=status, drained=drained), DRAIN)
    assert caught.value.problems[0].message == words


def test_a_failed_start_names_cause_phase_and_remedy():
    """The sentence, the last twenty lines without the noise of the exit, the whole log, and the fix of the cause."""
    lines = [
        *(f"INFO line {n}" for n in range(25)),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
    ]
    noise = [
        "nanobind: leaked 514 functions!",
        ' - leaked function "x"',
        " - ... skipped remainder",
    ]
    end = LastSeen(LOG, "loading draft", ("Loading drafter model...", *lines, *noise), 1)
    with pytest.raises(EngineStartError) as caught:
        judge(Lifecycle(EngineState.FATAL, cause="exited with status 1"), end, LIMITS)
    (problem,) = caught.value.problems
    assert problem.message == (
        "exited with status 1, in phase 'loading draft'; memory ran out while the draft was loaded"
    )
    assert problem.facts == (
        *((f"INFO line {n}",) for n in range(6, 25)),
        (lines[-1],),
        (f"whole log: {LOG}",),
    )
    assert problem.fix == "lower the target's share: more GPUs, or quantize"


def test_what_the_last_check_met_stands_in_for_a_cause():
    """A log that says nothing, but an engine that answered an error."""
    end = LastSeen(
        LOG, "starting server", ("INFO all well",), -15, "http://h/v1/completions: answered 500: no"
    )
    with pytest.raises(
        EngineStartError, match="the last check met: http://h/v1/completions: answered 500: no"
    ):
        judge(Lifecycle(EngineState.FATAL, cause="not ready within 100 s"), end, LIMITS)


def test_a_refusal_of_our_own_shows_no_engine_lines():
    """The canary's words and remedy; the engine's log has nothing to add."""
    machine = Lifecycle(EngineState.FATAL, cause="canary: corrupt: x", retry=False, fix="--set a=b")
    with pytest.raises(EngineStartError) as caught:
        judge(machine, LastSeen(LOG, "canary", ("INFO all well",), 0), LIMITS)
    assert str(caught.value) == f"engine: canary: corrupt: x\n  whole log: {LOG}\nFix: --set a=b"


def test_a_loss_after_ready_is_another_exception():
    """Exit code 5, and it says that it had been ready."""
    machine = Lifecycle(EngineState.FATAL, cause="was killed by SIGKILL", was_ready=True)
    with pytest.raises(EngineLost, match="was killed by SIGKILL, after it had been ready"):
        judge(machine, LastSeen(LOG), LIMITS)


@pytest.mark.parametrize(
    "stopped_from", [EngineState.STOPPING, EngineState.BACKOFF, EngineState.STARTING]
)
def test_a_signal_after_a_loss_does_not_hide_it(stopped_from):
    """Stopped by hand while it ended, waited or loaded again: lost all the same, with the cause."""
    machine = Lifecycle(
        EngineState.STOPPED, cause="its core is dead", was_ready=True, stop_signal="SIGTERM"
    )
    with pytest.raises(EngineLost, match="its core is dead, after it had been ready"):
        judge(replace(machine, stopped_from=stopped_from), LastSeen(LOG), LIMITS)


def test_a_signal_after_a_failed_start_does_not_hide_it():
    """Exit code 4 and the canary's words, not 130."""
    machine = Lifecycle(
        EngineState.STOPPED, cause="canary: corrupt", fix="x", stopped_from=EngineState.STOPPING
    )
    with pytest.raises(EngineStartError, match="canary: corrupt"):
        judge(machine, LastSeen(LOG), LIMITS)


def test_a_drain_that_was_cut_off_by_kill_is_a_loss():
    """Requests may have been lost, so 0 would be a lie."""
    machine = Lifecycle(
        EngineState.STOPPED, stop_signal="SIGTERM", stopped_from=EngineState.RUNNING, killed=True
    )
    with pytest.raises(EngineLost, match="did not end within 70 s after SIGTERM and was killed"):
        judge(machine, LastSeen(LOG), LIMITS)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (
            Lifecycle(EngineState.STOPPED, stop_signal="SIGINT", stopped_from=EngineState.STARTING),
            "SIGINT before the engine was ready",
        ),
        (
            Lifecycle(
                EngineState.STOPPED,
                stop_signal="SIGINT",
                stopped_from=EngineState.RUNNING,
                killed=True,
                cut_short=True,
            ),
            "ended without draining, as asked; running requests were cut off",
        ),
    ],
)
def test_what_the_user_cut_short_is_an_interrupt(machine, words):
    """Exit code 130."""
    with pytest.raises(Interrupted, match=words):
        judge(machine, LastSeen(LOG), LIMITS)


def test_the_block_leaves_out_what_is_not_known():
    """No KV tokens, no sidecar: no rows for them; a target alone says so."""
    serving = Serving("http://127.0.0.1:8000/v1", "tiny", None, None, None, 41.3, None, LOG)
    assert block(serving) == (
        "Ready\n"
        "  URL                     http://127.0.0.1:8000/v1\n"
        "  model                   tiny\n"
        "  method                  none, the target alone\n"
        "  time to ready           41.3 s\n"
        "  engine log              /logs/engine.log"
    )


def test_the_block_says_what_is_not_as_asked() -> None:
    """Each difference is a line of its own; without the engine's statement there is none."""
    serving = Serving("http://127.0.0.1:8000/v1", "tiny", None, None, None, 41.3, None, LOG)
    assert "Warning" not in block(serving)
    assert "as asked" not in block(serving)
    different = "engine.max_model_len: 4096 was asked for, and the engine says 2048"
    shown = block(replace(serving, as_asked="method", differences=(different,)))
    assert "  as asked                method" in shown
    assert f"  Warning                 {different}" in shown
