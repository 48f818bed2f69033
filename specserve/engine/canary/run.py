"""The last check before "ready": is text made under speculation the target's own, and do drafts
help?

A greedy text, and sampled texts in a batch with greedy ones, are each compared with what the same
server says without drafts (:mod:`specserve.engine.canary.corruption`). Drafts are counted by the
engine's own counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Literal

from specserve.config.schema import Settings
from specserve.config.serving import Canary
from specserve.config.speculation import WITHOUT_DRAFT
from specserve.engine.canary import corruption
from specserve.engine.canary.reference import (
    COOL,
    DEFAULT,
    FULL,
    GREEDY,
    WARM,
    CanaryClient,
    OutOfTime,
)
from specserve.engine.http.client import Completion, EngineClient, EngineRefused, EngineUnreachable
from specserve.engine.http.metrics import EngineSnapshot, MetricsError, parse
from specserve.engine.http.transport import TokenScore
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
    deadline = started + settings.engine.canary.timeout_seconds
    canary = _Canary(CanaryClient(client, settings, clock, deadline), settings, sleep)
    return replace(canary.result(), seconds=clock() - started)


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
    client: CanaryClient
    settings: Settings
    sleep: Callable[[float], None]
    greedy: list[_Counted] = field(default_factory=list)
    forced: _Counted | None = None
    """While the model was held to one token: every lookup method finds drafts then."""
    default: _Counted | None = None
    notes: list[str] = field(default_factory=list)
    """Why something could not be compared."""

    def result(self) -> CanaryResult:
        """The verdict; the first proof of corruption ends the canary."""
        corrupt: str | None = None
        failed = False
        try:
            corrupt = self._corrupt()
            if corrupt is None and self.settings.method is not None:
                _, self.default = self._counted(lambda: self.client.ask_raw(DEFAULT))
        except OutOfTime:
            self.notes.append(LATE)
        except EngineUnreachable:
            if not self.greedy or self.client.clock() < self.client.deadline:
                raise
            self.notes.append(LATE)
        except EngineRefused as error:
            if error.status == 500:
                corrupt = f"the engine failed on a request: {error.body}"
                failed = True
            else:
                self.notes.append(str(error))
        verdict, reasons = self._verdict(corrupt)
        default = None
        if self.default is not None:
            default = self.default.position0
        return CanaryResult(
            verdict,
            reasons,
            self._position0(),
            default,
            _drafts(self.greedy),
            self.client.compared,
            failed=failed,
        )

    def _verdict(self, corrupt: str | None) -> tuple[CanaryVerdict, tuple[str, ...]]:
        notes = tuple(self.notes)
        if corrupt:
            return "corrupt", (corrupt, *notes)
        counted = self.greedy
        if self.forced is not None:
            counted = [*self.greedy, self.forced]
        if self._drafts_expected() and _drafts(counted) == 0:
            return "inactive", ("speculation is configured, but nothing was drafted", *notes)
        floor = self.settings.engine.canary.min_position0_acceptance
        found = self._position0()
        if found is not None and found < floor:
            reason = (
                f"{percent(found)} of drafts are accepted at position 0 of repetitive text, "
                f"floor {percent(floor)}; the draft's weights were not applied, or are not for "
                "this target"
            )
            return "ineffective", (reason, *notes)
        if notes:
            return "unproven", notes
        return "ok", ()

    def _position0(self) -> float | None:
        """Of the text where it is best, or of all together where each drafts little."""
        known = [c for c in self.greedy if c.drafts and c.accepted_at_0 is not None]
        drafts = sum(counted.drafts or 0 for counted in known)
        accepted = sum(counted.accepted_at_0 or 0 for counted in known)
        rates = [counted.position0 for counted in (*known, _Counted(drafts, accepted))]
        return max((rate for rate in rates if rate is not None), default=None)

    def _drafts_expected(self) -> bool:
        """Whether a request that runs alone is drafted for: by the schedule, and by the method."""
        if self.settings.drafts_at(1) == 0:
            return False
        return self.settings.method not in WITHOUT_DRAFT or self.forced is not None

    def _corrupt(self) -> str | None:
        """A proof of corruption, or None. A target by itself only has to answer."""
        if self.settings.method is None:
            self.client.ask_raw(GREEDY)
            return None
        texts = []
        asks = (lambda: self.client.chat_or_raw(GREEDY), lambda: self.client.ask_raw(FULL))
        for ask in asks:
            text, counted = self._counted(ask)
            texts.append(text)
            self.greedy.append(counted)
        if any(text.token_ids is None or text.prompt_token_ids is None for text in texts):
            return self._corrupt_by_signs(texts)
        raw = texts[-1].prompt_token_ids or ()
        self._force_drafts(texts[-1])
        for text in texts:
            reason = self._corrupt_greedy(text)
            if reason:
                return reason
        # Greedy and sampled in one batch: a sampler may mix them up. The greedy one now meets the
        # prefix cache.
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(self.client.ask_raw, FULL)
            if self.settings.server.max_concurrent_requests == 1:
                wait([beside])
            cool = self.client.samples(raw, COOL, 24)
        judged = [self.client.judge(cool, COOL)]
        reason = corruption.sampled_reason(judged) or self._corrupt_greedy(beside.result())
        if reason:
            return reason
        # Not before: an engine that mistakes top_k may die of it, and the proof above says more.
        judged.append(self.client.judge(self.client.samples(raw, WARM, 8), WARM))
        return corruption.sampled_reason(judged)

    def _corrupt_by_signs(self, texts: Sequence[Completion]) -> str | None:
        """For engines that do not list tokens: what collapse looks like from outside."""
        greedy = self._position0()
        text, cool = self._counted(lambda: self.client.ask_raw(COOL))
        self.notes.append(
            "the engine does not list its tokens, so texts could not be compared token by token"
        )
        reason = corruption.collapse_reason(greedy, cool.position0, cool.drafts or 0)
        for completion in (*texts, text):
            reason = reason or corruption.unprintable_reason(completion.text)
        return reason

    def _corrupt_greedy(self, text: Completion) -> str | None:
        judged = self.client.judge([text], None)
        if not corruption.suspicious(judged):
            return None
        # Near-ties or not? Not asked before, because the first request for scores may compile.
        ids = text.prompt_token_ids or ()
        made = text.token_ids or ()
        scores = self._scores([*ids, *made])
        if scores is None:
            self.notes.append(
                "greedy text leaves the target's choices, and the engine gives no scores to weigh "
                "it"
            )
            return None
        return corruption.greedy_reason(corruption.gaps(made, scores[len(ids) :]))

    def _scores(self, tokens: Sequence[int]) -> Sequence[Mapping[str, TokenScore] | None] | None:
        try:
            return self.client.ask(tokens, GREEDY, tokens=1, prompt_logprobs=1).prompt_logprobs
        except EngineRefused as error:
            if error.status != 400:  # as with --max-logprobs 0
                raise
            return None

    def _force_drafts(self, text: Completion) -> None:
        """Lookup methods draft only where text repeats: make it, before anything is called
        inactive.
        """
        last = (text.token_ids or ())[-1:]
        if self.settings.method in WITHOUT_DRAFT and _drafts(self.greedy) == 0 and last:
            sampling = {**FULL, "allowed_token_ids": last}
            _, self.forced = self._counted(lambda: self.client.ask_raw(sampling))

    def _counted(self, ask: Callable[[], Completion]) -> tuple[Completion, _Counted]:
        """One text, and what was drafted for it."""
        before = self._snapshot()
        text = ask()
        after = self._snapshot()
        for _ in range(20):  # the counters are written just after the answer
            if before is None or after is None:
                break
            if after.finished_requests != before.finished_requests:
                break
            self.sleep(0.05)
            after = self._snapshot()
        return text, _between(before, after)

    def _snapshot(self) -> EngineSnapshot | None:
        try:
            text = self.client.engine.metrics_text(timeout=self.client.left())
            return parse(text, at_seconds=self.client.clock())
        except (MetricsError, EngineRefused) as error:
            if str(error) not in self.notes:
                self.notes.append(str(error))
            return None


def _drafts(texts: Sequence[_Counted]) -> int | None:
    known = [counted.drafts for counted in texts if counted.drafts is not None]
    if known:
        return int(sum(known))
    return None


def _between(before: EngineSnapshot | None, after: EngineSnapshot | None) -> _Counted:
    """Some counters are there and these are not: the engine was started without speculation."""
    if before is None or after is None:
        return _Counted(None, None)
    drafts = (after.total("drafts") or 0) - (before.total("drafts") or 0)
    accepted = None
    if before.accepted_per_position and after.accepted_per_position:
        accepted = after.accepted_per_position[0] - before.accepted_per_position[0]
    return _Counted(drafts, accepted)
