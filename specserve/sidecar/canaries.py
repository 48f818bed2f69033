"""Canary completions: sent from threads of their own, so that a hung engine holds up nobody.

Two kinds. One token, to see whether a completion makes progress. And, for an engine that no supervisor has looked
at, the start-up canary of `specserve.engine.canary` before the first readiness.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from specserve.config.schema import Settings
from specserve.engine import canary
from specserve.engine.client import EngineClient, EngineError
from specserve.sidecar.contact import complete_one
from specserve.sidecar.probe import CanaryOutcome, Scrape

LOG = logging.getLogger("specserve.sidecar")


class Canaries:
    """At most one at a time; the caller keeps to it."""

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        *,
        alone: bool,
        clock: Callable[[], float],
        late: Callable[[], None],
    ) -> None:
        """``alone``: no supervisor has run the start-up canary. ``late`` is called when one comes back that took an
        interval or more: whoever waits for it should not wait for the next read as well."""
        self._client, self._settings, self._alone, self._clock, self._late = client, settings, alone, clock, late
        self._outcomes: queue.SimpleQueue[tuple[CanaryOutcome, canary.CanaryResult | None]] = queue.SimpleQueue()
        self._looking = False
        self._result: canary.CanaryResult | None = None

    def send(self, found: Scrape) -> None:
        """Start one; returns at once. An engine that has not finished a request yet gets the start-up canary."""
        self._looking = self._alone and found.snapshot is not None and found.snapshot.finished_requests == 0
        target = self._look if self._looking else self._complete
        threading.Thread(target=target, name="sidecar-canary", daemon=True).start()

    def collect(self) -> tuple[CanaryOutcome, bool] | None:
        """The one that is back, and whether it was the start-up canary; None while none is."""
        try:
            outcome, result = self._outcomes.get_nowait()
        except queue.Empty:
            return None
        looked, self._looking = self._looking, False
        if result is not None:
            self._result = result
        level = logging.DEBUG if outcome.result == "ok" else logging.WARNING
        LOG.log(level, "canary %s", outcome.result, extra={"detail": outcome.detail, "seconds": outcome.seconds})
        return outcome, looked

    def forget(self) -> None:
        """The engine is another one: what was found about the one before says nothing."""
        self._result = None

    def facts(self) -> dict[str, Any]:
        """``canary`` (JSON of the start-up canary) and ``blocked`` (why readiness is withheld), where known."""
        if self._looking:
            return {"blocked": "the start-up canary is under way"}
        if self._result is None:
            return {}
        facts: dict[str, Any] = {"canary": asdict(self._result)}
        if self._result.blocks(self._settings.engine.canary):
            facts["blocked"] = f"start-up canary: {self._result.verdict}: {'; '.join(self._result.reasons)}"
        return facts

    def _complete(self) -> None:
        outcome = self._one()
        self._outcomes.put((outcome, None))
        if outcome.seconds >= self._settings.sidecar.scrape_interval_seconds:
            self._late()

    def _one(self) -> CanaryOutcome:
        return complete_one(self._client, timeout=self._settings.sidecar.canary_timeout_seconds, clock=self._clock)

    def _look(self) -> None:
        sent = self._clock()
        try:
            result = canary.run(self._client, self._settings)
        except EngineError as error:
            outcome = CanaryOutcome("failed", sent, self._clock() - sent, error.problems[0].message)
            self._outcomes.put((outcome, None))
        else:
            if result.verdict != "ok":
                LOG.warning("start-up canary: %s", result.verdict, extra={"reason": "; ".join(result.reasons)})
            self._outcomes.put((self._one(), result))
