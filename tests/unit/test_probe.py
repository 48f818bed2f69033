"""Verdicts from progress, in virtual time: what hangs is found, what works is left alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from specserve.engine.http.metrics import parse
from specserve.sidecar.probe import (
    Assessment,
    CanaryOutcome,
    Context,
    Policy,
    ProgressProbe,
    Scrape,
)
from tests.virtual_engine import VirtualEngine

INTERVAL = 5.0


@dataclass
class Life:
    """An engine and its probe, one read every five seconds. Canaries take as long and end as the test says."""

    engine: VirtualEngine = field(default_factory=VirtualEngine)
    probe: ProgressProbe = field(
        default_factory=lambda: ProgressProbe(Policy(canary_interval_seconds=60.0))
    )
    context: Context = field(default_factory=Context)
    now: float = 0.0
    start: float = 1000.0
    canary: str = "ok"
    full: bool = False
    canary_seconds: float = 1.0
    last: str = "ok"
    """Of the reads; while nobody listens no canary succeeds, unless the test says so."""
    serves: bool = False
    sent: list[float] = field(default_factory=list)
    log: list[Assessment] = field(default_factory=list)
    _due: float | None = None

    def step(self, result: str = "ok", detail: str = "") -> Assessment:
        """One read; a canary that is due comes back before it."""
        self.now += INTERVAL
        if self._due is not None and self.now >= self._due:
            sent = self.sent[-1]
            result_of_canary = self.canary
            if self.last == "unreachable" and not self.serves:
                result_of_canary = "failed"
            outcome = CanaryOutcome(
                result_of_canary, sent, self.now - sent, "no answer within 60 s", self.full
            )  # type: ignore[arg-type]
            self.probe.canary_done(self.now, outcome)
            self._due = None
            if result_of_canary == "ok":
                self.engine.work(plain=1)
        self.last = result
        snapshot = (
            parse(self.engine.text(start=self.start), at_seconds=self.now)
            if result == "ok"
            else None
        )
        seen = self.probe.observe(self.now, Scrape(result, detail, snapshot), self.context)  # type: ignore[arg-type]
        if seen.wants_canary:
            self.probe.canary_sent(self.now)
            self.sent.append(self.now)
            self._due = self.now + self.canary_seconds
        self.log.append(seen)
        return seen

    def steps(self, n: int, result: str = "ok", work: float = 0.0) -> Assessment:
        """Several reads, with that many plain tokens before each."""
        for _ in range(n):
            self.engine.work(plain=work)
            seen = self.step(result)
        return seen

    def conditions(self) -> list[str]:
        return [seen.condition for seen in self.log]


@pytest.fixture
def life() -> Life:
    """A server that has just answered its first canary, idle."""
    made = Life()
    made.steps(3)
    made.log.clear()
    made.sent.clear()
    return made


def busy(life: Life, running: float = 4, waiting: float = 0) -> None:
    life.engine.running, life.engine.waiting = running, waiting
    life.steps(3, work=100)


def hang(life: Life) -> None:
    """From now on no counter moves and no canary is answered."""
    life.canary, life.canary_seconds = "failed", 60.0


def test_ready_after_the_first_completion_not_before() -> None:
    """A server that answers is not ready until a completion made a token; the reason says what is missing."""
    life = Life()
    first = life.step()
    assert (first.condition, first.started.ok, first.ready.ok, first.live.ok) == (
        "starting",
        False,
        False,
        True,
    )
    assert first.ready.reason.startswith("no completion has succeeded since the engine started")
    assert first.wants_canary
    second = life.step()
    assert (second.condition, second.started.ok, second.ready.ok) == ("idle", True, True)


def test_an_engine_that_has_worked_needs_no_canary() -> None:
    """A sidecar that is started late sees tokens and takes them for what they are."""
    life = Life()
    life.engine.work(plain=500)
    seen = life.step()
    assert seen.ready.ok
    assert life.sent == []


def test_a_hung_engine_fails_liveness_within_three_reads_and_a_canary(life: Life) -> None:
    """Work running, nothing moves, the canary times out: not alive. And not before that."""
    busy(life)
    frozen_at = life.now
    hang(life)
    for _ in range(40):
        seen = life.step()
        if not seen.live.ok:
            break
    assert seen.condition == "stalled"
    # A hang just after a read shows progress once more, so one interval less is left than the figure says.
    assert life.now - frozen_at <= 2 * INTERVAL + life.canary_seconds
    assert life.now - life.sent[0] >= life.canary_seconds
    assert "4 requests running" in seen.live.reason
    assert "no answer within 60 s" in seen.live.reason
    assert not seen.ready.ok


def test_no_progress_without_a_failed_canary_is_only_suspect(life: Life) -> None:
    """One long step (a huge prefill) moves no counter; the canary that comes through proves the engine alive."""
    busy(life)
    life.canary_seconds = 40.0
    life.steps(8)
    assert all(seen.live.ok for seen in life.log)
    assert "suspect" in life.conditions()
    assert life.steps(3, work=100).condition == "progressing"


def test_a_saturated_engine_is_never_stalled(life: Life) -> None:
    """Full batch, long queue, canaries would time out: tokens come, so it lives and is ready, for an hour."""
    life.engine.running, life.engine.waiting = 256, 5000
    hang(life)
    life.steps(720, work=1)
    assert {seen.condition for seen in life.log} == {"progressing"}
    assert all(seen.live.ok and seen.ready.ok for seen in life.log)
    assert life.sent == []


def test_a_sleeping_engine_is_not_hung(life: Life) -> None:
    """Put to sleep with requests inside: alive, not ready, not disturbed by canaries; ready again when awake."""
    busy(life)
    hang(life)
    life.engine.awake = 0
    seen = life.steps(60)
    assert (seen.live.ok, seen.ready.ok, seen.ready.reason) == (
        True,
        False,
        "the engine was put to sleep",
    )
    assert life.sent == []
    life.engine.awake = 1
    assert life.steps(2, work=10).ready.ok


def test_aborted_requests_are_no_progress(life: Life) -> None:
    """Clients of a hung engine give up and come again: their aborts and prompts do not make it alive."""
    busy(life)
    hang(life)
    for _ in range(30):
        life.engine.finished["abort"] += 3
        life.engine.counters["prompt_tokens"] += 100
        life.step()
    assert life.log[-1].condition == "stalled"


def test_slow_steps_are_not_hangs(life: Life) -> None:
    """A token every fourth read, canaries late: progress between any two failures clears them."""
    life.engine.running = 8
    hang(life)
    for i in range(400):
        life.engine.work(plain=1 if i % 4 == 0 else 0)
        life.step()
    assert all(seen.live.ok for seen in life.log)


def test_starved_is_said_and_is_not_hung(life: Life) -> None:
    """Requests wait and none runs: alive, not ready, named."""
    life.engine.running, life.engine.waiting = 0, 7
    hang(life)
    seen = life.steps(40)
    assert seen.condition == "starved"
    assert seen.live.ok
    assert "not a hang by itself" in seen.live.reason
    assert not seen.ready.ok
    life.engine.running, life.engine.waiting = 5, 2
    assert life.steps(3, work=10).ready.ok


def test_an_engine_that_froze_between_two_requests_is_found(life: Life) -> None:
    """Its gauges say that nothing runs, for ever. The canary is the work that does not move; as fast as under load,
    unless a canary was sent in the last minute."""
    life.steps(20, work=100)
    frozen_at = life.now
    hang(life)
    for _ in range(40):
        seen = life.step()
        if not seen.live.ok:
            break
    assert seen.condition == "stalled"
    assert life.now - frozen_at <= 3 * INTERVAL + life.canary_seconds
    assert "did not complete one" in seen.live.reason


def test_one_canary_that_breaks_off_is_no_hang(life: Life) -> None:
    """A connection reset on an idle engine: not ready until the next one succeeds, alive all the time."""
    life.canary, life.canary_seconds = "failed", 1.0
    life.now += 60
    life.step()
    life.canary = "ok"
    life.steps(10)
    assert all(seen.live.ok for seen in life.log)
    assert life.log[-1].ready.ok


def test_an_idle_engine_is_asked_now_and_then(life: Life) -> None:
    """One canary a minute, and it stays idle and ready."""
    life.steps(120)
    assert 8 <= len(life.sent) <= 10
    assert {seen.condition for seen in life.log} <= {"idle"}
    assert all(seen.ready.ok for seen in life.log)


def test_blind_is_not_dead(life: Life) -> None:
    """Metrics that cannot be read: alive, still ready, said after two reads; canaries that succeed keep it so."""
    busy(life)
    life.log.clear()
    life.steps(60, "timeout")
    assert life.conditions()[0] == "progressing"
    assert set(life.conditions()[1:]) == {"blind"}
    assert all(seen.live.ok and seen.ready.ok for seen in life.log)


def test_neither_metrics_nor_completions_is_dead(life: Life) -> None:
    """A frozen API server: no read succeeds, and two canaries in a row fail."""
    busy(life)
    hang(life)
    life.log.clear()
    life.steps(60, "timeout")
    assert life.log[-1].condition == "stalled"
    first = next(i for i, seen in enumerate(life.log) if not seen.live.ok)
    assert first * INTERVAL >= 2 * life.canary_seconds


def test_an_engine_that_is_gone_is_down(life: Life) -> None:
    """Nobody listens: down and not alive after three refused reads, not ready after two."""
    busy(life)
    life.log.clear()
    life.steps(4, "unreachable")
    assert life.conditions() == ["progressing", "blind", "down", "down"]
    assert [seen.live.ok for seen in life.log] == [True, True, False, False]
    assert [seen.ready.ok for seen in life.log] == [True, False, False, False]


@pytest.mark.parametrize("result", ["broken", "timeout", "status", "malformed"])
def test_what_comes_after_an_accepted_connection_is_blind(life: Life, result: str) -> None:
    """Closed, reset, late, an error, garbage, for five minutes: alive and ready while canaries
    succeed."""
    busy(life)
    life.log.clear()
    life.steps(60, result)
    assert set(life.conditions()[1:]) == {"blind"}
    assert all(seen.live.ok and seen.ready.ok for seen in life.log)


@pytest.mark.parametrize("other", ["broken", "timeout", "status", "malformed"])
def test_refusals_that_are_not_in_a_row_prove_nothing(life: Life, other: str) -> None:
    """Two refused, then one that was taken, and canaries that prove nothing: alive all the time."""
    busy(life)
    life.serves, life.canary = True, "refused"
    life.log.clear()
    for _ in range(20):
        life.steps(2, "unreachable")
        life.step(other)
    assert "down" not in life.conditions()
    assert all(seen.live.ok for seen in life.log)


def test_a_canary_that_succeeds_overrules_refused_reads(life: Life) -> None:
    """A completion came after the first refusal: somebody is there, whoever refuses the reads."""
    busy(life)
    life.serves = True
    life.log.clear()
    life.steps(60, "unreachable")
    assert "down" not in life.conditions()
    assert all(seen.live.ok for seen in life.log)


def test_a_canary_of_before_the_refusals_overrules_nothing(life: Life) -> None:
    """It was answered while the engine still lived."""
    busy(life)
    life.log.clear()
    life.step("unreachable")
    life.probe.canary_done(life.now, CanaryOutcome("ok", life.now - 20, 1.0))
    life.probe.canary_sent(life.now)
    life.steps(2, "unreachable")
    assert life.log[-1].condition == "down"
    assert not life.log[-1].live.ok


def test_a_stall_ends_with_the_engine_that_stalled(life: Life) -> None:
    """Restarted by the supervisor: the next engine is not called stalled for the last one's sake."""
    life.context = Context(state="running")
    busy(life)
    hang(life)
    life.steps(60)
    assert life.log[-1].condition == "stalled"
    for state in ("stopping", "backoff", "starting"):
        life.context = Context(state=state)
        life.step("unreachable")
        assert life.log[-1].condition in ("draining", "starting")


def test_a_restarted_engine_must_prove_itself_again(life: Life) -> None:
    """New process start time, counters at zero: not ready until a completion has succeeded."""
    busy(life)
    life.steps(3, "unreachable")
    life.engine.reset()
    life.start, life.engine.running = 2000.0, 0
    seen = life.step()
    assert (seen.started.ok, seen.ready.ok, seen.live.ok) == (False, False, True)
    assert life.steps(2).ready.ok


def test_one_failed_read_changes_nothing(life: Life) -> None:
    """A dropped connection or half a body now and then: the verdicts do not flap."""
    busy(life)
    life.log.clear()
    for _ in range(20):
        life.step("malformed")
        life.steps(2, work=10)
        life.step("unreachable")
        life.steps(2, work=10)
    assert all(seen.live.ok and seen.ready.ok for seen in life.log)


def test_draining_is_not_ready_at_once_and_alive(life: Life) -> None:
    """Readiness goes first, before any request is refused; liveness stays to the end."""
    busy(life)
    life.context = Context(state="stopping")
    seen = life.step()
    assert (seen.condition, seen.ready.ok, seen.live.ok) == ("draining", False, True)
    assert not seen.wants_canary


def test_the_supervisor_restarts_what_crashed(life: Life) -> None:
    """While the supervisor is at work, nobody else is to restart the pod; once it has given up, somebody must."""
    busy(life)
    life.context = Context(state="backoff")
    seen = life.steps(10, "unreachable")
    assert (seen.condition, seen.live.ok, seen.ready.ok) == ("starting", True, False)
    life.context = Context(state="fatal")
    assert not life.step("unreachable").live.ok


def test_a_restart_is_no_outage_and_a_crash_loop_is(life: Life) -> None:
    """Once a restart has failed too the engine is down, so that an alert can say so; alive all the same, since the
    supervisor is still at work. Once it runs, the next loss is the first again."""
    life.context = Context(state="running")
    busy(life)
    seen = []
    for state in ("backoff", "starting", "backoff", "starting", "running", "backoff", "starting"):
        life.context = Context(state=state)
        seen.append(life.steps(5, "ok" if state == "running" else "unreachable", work=10))
    conditions = ["starting", "starting", "down", "down", "progressing", "starting", "starting"]
    assert [one.condition for one in seen] == conditions
    assert all(one.live.ok for one in seen)


def test_no_canary_disturbs_the_supervisors_start(life: Life) -> None:
    """The supervisor asks the new engine itself; once it says running, the tokens it saw count as proof."""
    new = Life(context=Context(state="starting"))
    new.steps(5)
    new.engine.work(plain=40)
    assert (new.step().ready.ok, new.sent) == (False, [])
    new.context = Context(state="running")
    assert new.step().ready.ok
    assert new.sent == []


def test_a_blocked_server_is_not_ready(life: Life) -> None:
    """The acceptance canary's reason is readiness' reason."""
    life.context = Context(blocked="start-up canary: ineffective: 3 % at position 0")
    seen = life.step()
    assert not seen.ready.ok
    assert seen.ready.reason == "start-up canary: ineffective: 3 % at position 0"


def test_refused_canaries_prove_nothing(life: Life) -> None:
    """A queue that is full, or a key that is wrong, is no hang."""
    busy(life)
    life.canary = "refused"
    life.steps(100)
    assert all(seen.live.ok for seen in life.log)


def test_a_hang_behind_a_full_queue_is_found(life: Life) -> None:
    """Clients that come again keep the queue full, so every canary gets 503: after its time-out the requests that
    stand still in execution are proof enough. While they move, a full queue proves nothing."""
    busy(life, running=8, waiting=24)
    life.canary, life.full = "refused", True
    for i in range(97):
        life.engine.work(plain=i % 8 == 0)
        life.step()
    assert all(seen.live.ok for seen in life.log)
    life.log.clear()
    life.steps(40)
    found = next(i for i, seen in enumerate(life.log) if not seen.live.ok)
    assert 120 <= found * INTERVAL <= 150
    assert "8 requests running" in life.log[-1].live.reason


def test_recovery_is_immediate_for_liveness_and_damped_for_readiness(life: Life) -> None:
    """The first token after a stall clears it; readiness wants two reads that agree."""
    busy(life)
    hang(life)
    life.steps(30)
    assert not life.log[-1].live.ok
    life.canary, life.canary_seconds = "ok", 1.0
    first = life.steps(1, work=50)
    second = life.steps(1, work=50)
    assert (first.live.ok, first.ready.ok) == (True, False)
    assert (second.live.ok, second.ready.ok) == (True, True)


def test_time_since_progress_is_unknown_while_idle(life: Life) -> None:
    """Zero while tokens come, growing while work stands still, absent when there is nothing to do."""
    assert life.step().since_progress_seconds is None
    busy(life)
    assert life.log[-1].since_progress_seconds == 0
    hang(life)
    assert life.steps(2).since_progress_seconds == 10
