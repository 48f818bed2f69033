"""Canary completions: sent from threads of their own, so that a hung engine holds up nothing here.

Three kinds. One token, to see whether a completion makes progress. For an engine that no supervisor
has looked at, the start-up canary of `specserve.engine.canary.run` before the first readiness. And,
where it is asked for, its comparison of drafted text with the target's own again and again while
serving; nothing waits for that one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from specserve.config.schema import Settings
from specserve.engine.canary import run as canary
from specserve.engine.http.client import EngineClient, EngineError
from specserve.sidecar.contact import complete_one
from specserve.sidecar.launch_state import LaunchState
from specserve.sidecar.probe import CanaryOutcome, Scrape

LOG = logging.getLogger("specserve.sidecar")


@dataclass(frozen=True, slots=True)
class Returned:
    """A canary that is back."""

    outcome: CanaryOutcome
    started_up: bool = False
    """Whether it was the start-up canary."""
    result: canary.CanaryResult | None = None
    """What the start-up canary found; None when it failed before."""


class Canaries:
    """At most one at a time; the caller sees to that."""

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        *,
        alone: bool,
        clock: Callable[[], float],
        late: Callable[[], None],
    ) -> None:
        """``alone``: no supervisor has run the start-up canary. ``late`` is called when one comes
        back that took an interval or more: what waits for it should not wait for the next read as
        well."""
        self._client, self._settings = client, settings
        self._alone, self._clock, self._late = alone, clock, late
        self._returned: queue.SimpleQueue[Returned] = queue.SimpleQueue()
        self._starting_up = False
        self._result: canary.CanaryResult | None = None
        self._comparison: canary.CanaryResult | None = None
        self._comparing, self._compared_at = False, clock()

    def send(self, found: Scrape) -> None:
        """Start one; returns at once. An engine that has not finished a request yet gets the
        start-up canary."""
        snapshot = found.snapshot
        fresh = snapshot is not None and snapshot.finished_requests == 0
        self._starting_up = self._alone and fresh
        threading.Thread(
            target=self._run, args=(self._starting_up,), name="sidecar-canary", daemon=True
        ).start()

    def collect(self) -> Returned | None:
        """The one that is back; None while none is."""
        try:
            back = self._returned.get_nowait()
        except queue.Empty:
            return None
        self._starting_up = False
        if back.result is not None:
            self._result = back.result
        outcome, level = back.outcome, logging.WARNING
        if outcome.result == "ok":
            level = logging.DEBUG
        extra = {"detail": outcome.detail, "seconds": outcome.seconds}
        LOG.log(level, "canary %s", outcome.result, extra=extra)
        return back

    def forget(self) -> None:
        """The engine is another one: what was found about the one before says nothing."""
        self._result = self._comparison = None

    def compare(self, now: float) -> None:
        """Start a comparison if one is due; returns at once."""
        every = self._settings.sidecar.comparison_interval_seconds
        if every is None or self._comparing or now - self._compared_at < every:
            return
        self._comparing = True
        threading.Thread(target=self._compare, name="sidecar-comparison", daemon=True).start()

    @property
    def withholds(self) -> bool:
        """Whether the last comparison withholds readiness; then only the next one can give it
        back."""
        return self._blocks(self._comparison)

    def added_to(self, state: LaunchState) -> LaunchState:
        """``state`` with what the canaries found, and with why readiness is withheld."""
        context = state.context
        if self._starting_up:
            return replace(
                state, context=replace(context, blocked="the start-up canary is under way")
            )
        for name, result in (
            ("start-up canary", self._result),
            ("comparison while serving", self._comparison),
        ):
            if result is not None and self._blocks(result):
                reason = f"{name}: {result.verdict}: {'; '.join(result.reasons)}"
                context = replace(context, blocked=reason)
        return replace(
            state,
            context=context,
            canary=state.canary or self._result,
            comparison=self._comparison,
        )

    def _blocks(self, result: canary.CanaryResult | None) -> bool:
        return result is not None and result.blocks(self._settings.engine.canary)

    def _run(self, starting_up: bool) -> None:
        """Whatever happens, one comes back: as long as none does, no other is sent."""
        mistake = CanaryOutcome("refused", self._clock(), 0.0, "a bug in specserve, see its log")
        back = Returned(mistake, starting_up)
        try:
            if starting_up:
                back = self._start_up()
            else:
                back = Returned(self._one())
        finally:
            self._returned.put(back)
        if back.outcome.seconds >= self._settings.sidecar.scrape_interval_seconds:
            self._late()

    def _one(self) -> CanaryOutcome:
        return complete_one(
            self._client, timeout=self._settings.sidecar.canary_timeout_seconds, clock=self._clock
        )

    def _start_up(self) -> Returned:
        sent = self._clock()
        try:
            result = canary.run(self._client, self._settings)
        except EngineError as error:
            why = error.problems[0].message
            failed = CanaryOutcome("failed", sent, self._clock() - sent, why)
            return Returned(failed, started_up=True)
        if result.verdict != "ok":
            extra = {"reason": "; ".join(result.reasons)}
            LOG.warning("start-up canary: %s", result.verdict, extra=extra)
        return Returned(self._one(), True, result)

    def _compare(self) -> None:
        """Users' requests are drafted meanwhile too, so nothing but the comparison counts. Only a
        finding that a second run repeats is believed: one failed request under load is no proof."""
        try:
            result = canary.run(self._client, self._settings)
            if result.is_proof:
                result = canary.run(self._client, self._settings)
            if result.is_proof:
                extra = {"reason": "; ".join(result.reasons)}
                LOG.error("drafted text is not the target's own", extra=extra)
                self._comparison = result
            elif result.verdict not in ("corrupt", "unproven") and result.compared_tokens:
                self._comparison = canary.CanaryResult(
                    "ok", compared_tokens=result.compared_tokens, seconds=result.seconds
                )
        except EngineError as error:
            LOG.debug("no comparison", extra={"detail": error.problems[0].message})
        finally:
            self._compared_at, self._comparing = self._clock(), False
