"""Canary completions: sent from threads of their own, so that a hung engine holds up nobody.

Three kinds. One token, to see whether a completion makes progress. For an engine that no supervisor has looked at,
the start-up canary of `specserve.engine.canary.run` before the first readiness. And, where it is asked for, its
comparison of drafted text with the target's own again and again while serving; nothing waits for that one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from specserve.config.schema import Settings
from specserve.engine.canary import run as canary
from specserve.engine.http.client import EngineClient, EngineError
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
        self._client, self._settings, self._alone, self._clock, self._late = (
            client,
            settings,
            alone,
            clock,
            late,
        )
        self._outcomes: queue.SimpleQueue[tuple[CanaryOutcome, canary.CanaryResult | None]] = (
            queue.SimpleQueue()
        )
        self._looking = False
        self._result: canary.CanaryResult | None = None
        self._comparison: canary.CanaryResult | None = None
        self._compares, self._compared_at = False, clock()

    def send(self, found: Scrape) -> None:
        """Start one; returns at once. An engine that has not finished a request yet gets the start-up canary."""
        self._looking = (
            self._alone and found.snapshot is not None and found.snapshot.finished_requests == 0
        )
        threading.Thread(
            target=self._run, args=(self._looking,), name="sidecar-canary", daemon=True
        ).start()

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
        LOG.log(
            level,
            "canary %s",
            outcome.result,
            extra={"detail": outcome.detail, "seconds": outcome.seconds},
        )
        return outcome, looked

    def forget(self) -> None:
        """The engine is another one: what was found about the one before says nothing."""
        self._result = self._comparison = None

    def compare(self, now: float) -> None:
        """Start a comparison if one is due; returns at once."""
        every = self._settings.sidecar.comparison_interval_seconds
        if every is None or self._compares or now - self._compared_at < every:
            return
        self._compares = True
        threading.Thread(target=self._compare, name="sidecar-comparison", daemon=True).start()

    @property
    def withholds(self) -> bool:
        """Whether the last comparison keeps readiness away; then only the next one can give it back."""
        return self._comparison is not None and self._comparison.blocks(
            self._settings.engine.canary
        )

    def facts(self) -> dict[str, Any]:
        """``canary`` (JSON of the start-up canary), ``comparison`` (of the last one while serving) and ``blocked``
        (why readiness is withheld), where known."""
        if self._looking:
            return {"blocked": "the start-up canary is under way"}
        facts: dict[str, Any] = {}
        for name, result in (("canary", self._result), ("comparison", self._comparison)):
            if result is None:
                continue
            facts[name] = asdict(result)
            if result.blocks(self._settings.engine.canary):
                what = "start-up canary" if name == "canary" else "comparison while serving"
                facts["blocked"] = f"{what}: {result.verdict}: {'; '.join(result.reasons)}"
        return facts

    def _run(self, look: bool) -> None:
        """Whatever happens, one comes back: as long as none does, no other is sent."""
        back: tuple[CanaryOutcome, canary.CanaryResult | None]
        back = (
            CanaryOutcome("refused", self._clock(), 0.0, "a mistake of specserve's, see its log"),
            None,
        )
        try:
            back = self._look() if look else (self._one(), None)
        finally:
            self._outcomes.put(back)
        if back[0].seconds >= self._settings.sidecar.scrape_interval_seconds:
            self._late()

    def _one(self) -> CanaryOutcome:
        return complete_one(
            self._client, timeout=self._settings.sidecar.canary_timeout_seconds, clock=self._clock
        )

    def _look(self) -> tuple[CanaryOutcome, canary.CanaryResult | None]:
        sent = self._clock()
        try:
            result = canary.run(self._client, self._settings)
        except EngineError as error:
            return CanaryOutcome(
                "failed", sent, self._clock() - sent, error.problems[0].message
            ), None
        if result.verdict != "ok":
            LOG.warning(
                "start-up canary: %s", result.verdict, extra={"reason": "; ".join(result.reasons)}
            )
        return self._one(), result

    def _compare(self) -> None:
        """What was drafted meanwhile is users' too, so nothing but the comparison counts. Found twice, or not at all:
        one failed request under load is no proof."""
        try:
            result = canary.run(self._client, self._settings)
            if result.is_proof:
                result = canary.run(self._client, self._settings)
            if result.is_proof:
                LOG.error(
                    "drafted text is not the target's own",
                    extra={"reason": "; ".join(result.reasons)},
                )
                self._comparison = result
            elif result.verdict not in ("corrupt", "unproven") and result.compared_tokens:
                self._comparison = replace(
                    result,
                    verdict="ok",
                    reasons=(),
                    position0_acceptance=None,
                    default_position0_acceptance=None,
                    drafts=None,
                )
        except EngineError as error:
            LOG.debug("no comparison", extra={"detail": error.problems[0].message})
        finally:
            self._compared_at, self._compares = self._clock(), False


def output_mismatch(facts: Mapping[str, Any]) -> float | None:
    """1 when drafted text was last proven not to be the target's own, 0 when it was compared and is; None otherwise.

    >>> output_mismatch({"canary": {"verdict": "corrupt"}}), output_mismatch({"canary": {"verdict": "unproven"}})
    (1.0, None)
    """
    found = facts.get("comparison") or facts.get("canary") or {}
    if found.get("verdict") == "corrupt":
        return None if found.get("failed") else 1.0
    return 0.0 if found.get("compared_tokens") and found["verdict"] != "unproven" else None
