"""The check between "answers" and "ready": is text made under speculation the target's own, and do
drafts help?

A greedy text, and sampled texts in a batch with greedy ones, are each compared with what the same
server says without drafts (:mod:`specserve.engine.canary.corruption`). Drafts are counted by the
engine's own counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specserve.config.schema import Settings
from specserve.config.serving import Canary
from specserve.config.speculation import WITHOUT_DRAFT
from specserve.engine.canary import corruption
from specserve.engine.canary.reference import COOL, DEFAULT, FULL, GREEDY, WARM, Asker, OutOfTime
from specserve.engine.http.client import Completion, EngineClient, EngineRefused, EngineUnreachable
from specserve.engine.http.metrics import EngineSnapshot, MetricsError, parse
from specserve.units import percent

CanaryVerdict = Literal["ok", "corrupt", "inactive", "ineffective", "unproven"]

LATE = "the canary ran out of time (engine.canary.timeout_seconds)"
MIN_DRAFTS = 5
"""Fewer say nothing about acceptance."""


@dataclass(frozen=True)
class CanaryResult:
    """What the canary found. ``corrupt`` is proven; ``unproven`` means that a comparison could not
    be made.

    ``inactive``: speculation is configured but nothing was drafted. ``ineffective``: the acceptance
    rate at position 0 is under the floor, as when the weights of a draft head were not applied.
    """

    verdict: CanaryVerdict
    reasons: tuple[str, ...] = ()
    position0_acceptance: float | None = None
    """On greedy text; None when too little was drafted."""
    default_position0_acceptance: float | None = None
    """The same at the sampling that a client gets who asks for none."""
    drafts: int | None = None
    """Drafts of all greedy texts; None when the engine counts none."""
    compared_tokens: int = 0
    """Tokens that were compared with the same server without drafts."""
    seconds: float = 0.0
    failed: bool = False
    """Corrupt only in that a request ended with 500, as when the engine dies: no proof about any
    text.
    """

    @property
    def is_proof(self) -> bool:
        """Whether text was proven not to be the target's own."""
        return self.verdict == "corrupt" and not self.failed

    def blocks(self, policy: Canary) -> bool:
        """Whether the server must not be called ready."""
        match self.verdict:
            case "corrupt":
                return policy.policy == "block"
            case "inactive" | "ineffective":
                return policy.acceptance_policy == "block"
            case "ok" | "unproven":
                return False


def run(
    client: EngineClient,
    settings: Settings,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> CanaryResult:
    """Run the canary.

    Raises EngineUnreachable when the engine is gone before it has said anything.
    """
    started = clock()
    asker = Asker(
        client, settings, clock, deadline=started + settings.engine.canary.timeout_seconds
    )
    return replace(_Canary(asker, sleep).result(), seconds=clock() - started)


@dataclass(frozen=True)
class _Counted:
    """What was drafted during one text; None where the engine does not say."""

    drafts: float | None
    accepted_at_0: float | None

    @property
    def position0(self) -> float | None:
        if self.drafts is None or self.accepted_at_0 is None or self.drafts < MIN_DRAFTS:
            return None
        return self.accepted_at_0 / self.drafts


@dataclass
class _Canary:
    asker: Asker
    sleep: Callable[[float], None]
    greedy: list[_Counted] = field(default_factory=list)
    forced: _Counted | None = None
    """With the model held to one token: every lookup method finds drafts then."""
    default: _Counted | None = None
    notes: list[str] = field(default_factory=list)
    """Why something could not be compared."""

    def result(self) -> CanaryResult:
        """The verdict; the first proof of corruption ends the canary."""
        corrupt: str | None = None
        failed = False
        try:
            corrupt = self._corrupt()
            if corrupt is None and self.asker.settings.method is not None:
                self._counted(lambda: self.asker.ask_raw(DEFAULT))
                self.default = self.greedy.pop()
        except OutOfTime:
            self.notes.append(LATE)
        except EngineUnreachable:
            if not self.greedy or self.asker.clock() < self.asker.deadline:
                raise
            self.notes.append(LATE)
        except EngineRefused as error:
            if error.status == 500:
                corrupt, failed = f"the engine failed on a request: {error.body}", True
            else:
                self.notes.append(str(error))
        verdict, reasons = self._verdict(corrupt)
        if self.default:
            default = self.default.position0
        else:
            default = None
        drafts = self._drafts(self.greedy)
        return CanaryResult(
            verdict, reasons, self._position0(), default, drafts, self.asker.compared, failed=failed
        )

    def _verdict(self, corrupt: str | None) -> tuple[CanaryVerdict, tuple[str, ...]]:
        notes = tuple(self.notes)
        if corrupt:
            return "corrupt", (corrupt, *notes)
        if (
            self._drafts_expected()
            and self._drafts([*self.greedy, *([self.forced] if self.forced else [])]) == 0
        ):
            return "inactive", ("speculation is configured, but nothing was drafted", *notes)
        floor, found = self.asker.settings.engine.canary.min_position0_acceptance, self._position0()
        if found is not None and found < floor:
            so = (
                f"{percent(found)} of drafts are accepted at position 0 of "
                f"repetitive text, floor {percent(floor)}"
            )
            return "ineffective", (
                f"{so}; the draft's weights were not applied, or are not for this target",
                *notes,
            )
        return ("unproven" if notes else "ok"), notes

    def _position0(self) -> float | None:
        """Of the text where it is best, or of all together where each drafts little."""
        known = [
            (c.drafts, c.accepted_at_0)
            for c in self.greedy
            if c.drafts and c.accepted_at_0 is not None
        ]
        together = _Counted(
            sum(drafts for drafts, _ in known), sum(accepted for _, accepted in known)
        )
        return max(
            (p for c in (*self.greedy, together) if (p := c.position0) is not None), default=None
        )

    def _drafts(self, texts: Sequence[_Counted]) -> int | None:
        known = [c.drafts for c in texts if c.drafts is not None]
        if known:
            return int(sum(known))
        return None

    def _drafts_expected(self) -> bool:
        """Whether a request that runs alone is drafted for: by the schedule, and by the method."""
        settings = self.asker.settings
        if settings.drafts_at(1) == 0:
            return False
        return settings.method not in WITHOUT_DRAFT or self.forced is not None

    def _corrupt(self) -> str | None:
        """A proof of corruption, or None. A target by itself only has to answer."""
        if self.asker.settings.method is None:
            self.asker.ask_raw(GREEDY)
            return None
        texts = [
            self._counted(lambda: self.asker.chat_or_raw(GREEDY)),
            self._counted(lambda: self.asker.ask_raw(FULL)),
        ]
        if any(text.token_ids is None or text.prompt_token_ids is None for text in texts):
            return self._corrupt_by_signs(texts)
        raw = texts[-1].prompt_token_ids or ()
        self._force_drafts(texts[-1])
        for text in texts:
            if reason := self._corrupt_greedy(text):
                return reason
        # Greedy and sampled in one batch: a sampler may mix them up. The greedy one now meets the
        # prefix cache.
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(self.asker.ask_raw, FULL)
            if self.asker.settings.server.max_concurrent_requests == 1:
                wait([beside])
            cool = self.asker.samples(raw, COOL, 24)
        judged = [self.asker.judge(cool, COOL)]
        if reason := corruption.sampled_reason(judged) or self._corrupt_greedy(beside.result()):
            return reason
        # Not before: an engine that mistakes top_k may die of it, and the proof above says more.
        judged.append(self.asker.judge(self.asker.samples(raw, WARM, 8), WARM))
        return corruption.sampled_reason(judged)

    def _corrupt_by_signs(self, texts: Sequence[Completion]) -> str | None:
        """For engines that do not list tokens: what collapse looks like from outside."""
        greedy = self._position0()
        text = self._counted(lambda: self.asker.ask_raw(COOL))
        cool = self.greedy.pop()
        self.notes.append(
            "the engine does not list its tokens, so texts could not be compared token by token"
        )
        if reason := corruption.collapse_reason(greedy, cool.position0, cool.drafts or 0):
            return reason
        return next(
            (r for t in (*texts, text) if (r := corruption.unprintable_reason(t.text))), None
        )

    def _corrupt_greedy(self, text: Completion) -> str | None:
        judged = self.asker.judge([text], None)
        if not corruption.suspicious(judged):
            return None
        # Near-ties or not: the first request for scores may compile something, so it is made only
        # now.
        ids, made = text.prompt_token_ids or (), text.token_ids or ()
        scores = self._scores([*ids, *made])
        if scores is None:
            self.notes.append(
                "greedy text leaves the target's choices, and the engine gives no scores to "
                "weigh "
                "it"
            )
            return None
        return corruption.greedy_reason(corruption.gaps(made, scores[len(ids) :]))

    def _scores(
        self, tokens: Sequence[int]
    ) -> Sequence[Mapping[str, Mapping[str, Any]] | None] | None:
        try:
            return self.asker.ask(tokens, GREEDY, tokens=1, prompt_logprobs=1).prompt_logprobs
        except EngineRefused as error:
            if error.status != 400:  # as with --max-logprobs 0
                raise
            return None

    def _force_drafts(self, text: Completion) -> None:
        """Lookup methods draft only where text repeats: make it, before anything is called
        inactive.
        """
        if (
            self.asker.settings.method in WITHOUT_DRAFT
            and self._drafts(self.greedy) == 0
            and text.token_ids
        ):
            self._counted(
                lambda: self.asker.ask_raw(
                    {**FULL, "allowed_token_ids": list(text.token_ids or ())[-1:]}
                )
            )
            self.forced = self.greedy.pop()

    def _counted(self, ask: Callable[[], Completion]) -> Completion:
        """Make one text; what was drafted meanwhile is kept in ``greedy``."""
        before = self._snapshot()
        text = ask()
        after = self._snapshot()
        for _ in range(20):  # the counters are written just after the answer
            if (
                after is None
                or before is None
                or after.finished_requests != before.finished_requests
            ):
                break
            self.sleep(0.05)
            after = self._snapshot()
        self.greedy.append(_between(before, after))
        return text

    def _snapshot(self) -> EngineSnapshot | None:
        try:
            return parse(
                self.asker.client.metrics_text(timeout=self.asker.left()),
                at_seconds=self.asker.clock(),
            )
        except (MetricsError, EngineRefused) as error:
            if str(error) not in self.notes:
                self.notes.append(str(error))
            return None


def _between(before: EngineSnapshot | None, after: EngineSnapshot | None) -> _Counted:
    """Some counters are there and these are not: the engine was started without speculation."""
    if before is None or after is None:
        return _Counted(None, None)
    drafts = (after.total("drafts") or 0) - (before.total("drafts") or 0)
    at_0 = [
        s.accepted_per_position[0] if s.accepted_per_position else None for s in (before, after)
    ]
    return _Counted(drafts, None if at_0[0] is None or at_0[1] is None else at_0[1] - at_0[0])
