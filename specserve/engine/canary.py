"""The check between "answers" and "ready": is text made under speculation the target's own, and do drafts help?

A greedy text, and sampled texts in a batch with greedy ones, are each compared with what the same server says
without drafts (:mod:`specserve.engine.corruption`). Drafts are counted by the engine's own counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specserve.config.schema import Settings
from specserve.config.serving import Canary
from specserve.config.speculation import WITHOUT_DRAFT
from specserve.engine import corruption
from specserve.engine.args import schedule
from specserve.engine.client import Completion, EngineClient, EngineRefused, EngineUnreachable, Prompt
from specserve.engine.corruption import Judged
from specserve.engine.metrics import EngineSnapshot, MetricsError, parse
from specserve.units import percent

Verdict = Literal["ok", "corrupt", "inactive", "ineffective", "unproven"]

TOKENS = 40
"""Of each text. Two sampled texts decide from about 20 tokens on that differ; see corruption.disagreement."""
MIN_DRAFTS = 5
"""Fewer say nothing about acceptance."""
LINE = "The quick brown fox jumps over the lazy dog. "
RAW = LINE * 3
SHORT = "1 2 1 2 1 2"
CHAT = ({"role": "user", "content": f"Write this sentence five times, and nothing else: {LINE.strip()}"},)

PLAIN: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
}
"""Said out loud, because a checkpoint's generation_config.json changes the defaults."""
GREEDY = {**PLAIN, "temperature": 0.0}
FULL = {**GREEDY, "ignore_eos": True}
COOL = {**PLAIN, "temperature": 0.3, "ignore_eos": True}
WARM = {**PLAIN, "temperature": 1.0, "top_p": 0.95, "top_k": 20, "ignore_eos": True}


@dataclass(frozen=True)
class CanaryResult:
    """What the canary found. ``corrupt`` is proven; ``unproven`` means that a comparison could not be made.

    ``inactive``: speculation is configured but nothing was drafted. ``ineffective``: the acceptance rate at
    position 0 is under the floor, as when the weights of a draft head were not applied.
    """

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    position0_acceptance: float | None = None
    """Of the better greedy text; None when too little was drafted."""
    drafts: int | None = None
    """Drafts of all greedy texts; None when the engine counts none."""
    compared_tokens: int = 0
    """Tokens that were compared with the same server without drafts."""
    seconds: float = 0.0

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
    """Run the canary. Raises EngineUnreachable when the engine is gone before it has said anything."""
    started = clock()
    canary = _Canary(client, settings, clock, sleep, deadline=started + settings.engine.canary.timeout_seconds)
    return replace(canary.result(), seconds=clock() - started)


class _OutOfTime(Exception):
    """Raised when the canary's time is up."""


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
    client: EngineClient
    settings: Settings
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    deadline: float
    raw: str = RAW
    greedy: list[_Counted] = field(default_factory=list)
    forced: _Counted | None = None
    """With the model held to one token: every lookup method finds drafts then."""
    notes: list[str] = field(default_factory=list)
    """Why something could not be compared."""
    compared: int = 0

    def result(self) -> CanaryResult:
        """The verdict; the first proof of corruption ends the canary."""
        corrupt: str | None = None
        try:
            corrupt = self._corrupt()
        except _OutOfTime:
            self.notes.append("the canary ran out of time (engine.canary.timeout_seconds)")
        except EngineUnreachable:
            if not self.greedy or self.clock() < self.deadline:
                raise
            self.notes.append("the canary ran out of time (engine.canary.timeout_seconds)")
        except EngineRefused as error:
            if error.status == 500:
                corrupt = f"the engine failed on a request: {error.body}"
            else:
                self.notes.append(str(error))
        verdict, reasons = self._verdict(corrupt)
        return CanaryResult(verdict, reasons, self._position0(), self._drafts(self.greedy), self.compared)

    def _verdict(self, corrupt: str | None) -> tuple[Verdict, tuple[str, ...]]:
        notes = tuple(self.notes)
        if corrupt:
            return "corrupt", (corrupt, *notes)
        if self._drafts_expected() and self._drafts([*self.greedy, *([self.forced] if self.forced else [])]) == 0:
            return "inactive", ("speculation is configured, but nothing was drafted", *notes)
        floor, found = self.settings.engine.canary.min_position0_acceptance, self._position0()
        if found is not None and found < floor:
            so = f"{percent(found)} of drafts are accepted at position 0 of repetitive text, floor {percent(floor)}"
            return "ineffective", (f"{so}; the draft's weights were not applied, or are not for this target", *notes)
        return ("unproven" if notes else "ok"), notes

    def _position0(self) -> float | None:
        return max((p for c in self.greedy if (p := c.position0) is not None), default=None)

    def _drafts(self, texts: Sequence[_Counted]) -> int | None:
        known = [c.drafts for c in texts if c.drafts is not None]
        return int(sum(known)) if known else None

    def _drafts_expected(self) -> bool:
        """Whether a request that runs alone is drafted for: by the schedule, and by the method."""
        rows = schedule(self.settings)
        scheduled = rows is None or any(first <= 1 <= last and tokens for first, last, tokens in rows)
        return scheduled and (self.settings.method not in WITHOUT_DRAFT or self.forced is not None)

    def _corrupt(self) -> str | None:
        """A proof of corruption, or None. A target by itself only has to answer."""
        if self.settings.method is None:
            self._ask_raw(GREEDY)
            return None
        texts = [self._counted(lambda: self._chat_or_raw(GREEDY)), self._counted(lambda: self._ask_raw(FULL))]
        if any(text.token_ids is None or text.prompt_token_ids is None for text in texts):
            return self._corrupt_by_signs(texts)
        self._force_drafts(texts[-1])
        # Greedy and sampled in one batch: a sampler may mix them up. The greedy one now meets the prefix cache.
        again, cool = self._together(FULL, COOL)
        for text in texts:
            if reason := self._corrupt_greedy(text):
                return reason
        judged = [self._judge(cool, COOL)]
        if reason := corruption.sampled_reason(judged) or self._corrupt_greedy(again):
            return reason
        # Not before: an engine that mistakes top_k may die of it, and the proof above says more.
        judged.append(self._judge(self._ask_raw(WARM), WARM))
        return corruption.sampled_reason(judged)

    def _corrupt_by_signs(self, texts: Sequence[Completion]) -> str | None:
        """For engines that do not list tokens: what collapse looks like from outside."""
        greedy = self._position0()
        text = self._counted(lambda: self._ask_raw(COOL))
        cool = self.greedy.pop()
        self.notes.append("the engine does not list its tokens, so texts could not be compared token by token")
        if reason := corruption.collapse_reason(greedy, cool.position0, cool.drafts or 0):
            return reason
        return next((r for t in (*texts, text) if (r := corruption.unprintable_reason(t.text))), None)

    def _corrupt_greedy(self, text: Completion) -> str | None:
        judged = self._judge(text, None)
        if not corruption.suspicious(judged):
            return None
        # Near-ties or not: the first request for scores may compile something, so it is made only now.
        ids, made = text.prompt_token_ids or (), text.token_ids or ()
        scored = self._ask([*ids, *made], GREEDY, tokens=1, prompt_logprobs=1)
        if scored.prompt_logprobs is None:
            self.notes.append("greedy text leaves the target's choices, and the engine gives no scores to weigh it")
            return None
        return corruption.greedy_reason(corruption.gaps(made, scored.prompt_logprobs[len(ids) :]))

    def _judge(self, text: Completion, sampling: Mapping[str, Any] | None) -> Judged:
        """Ask for one token after each prefix: such a request ends before anything is drafted."""
        ids, made = text.prompt_token_ids or (), text.token_ids or ()
        prefixes = [[*ids, *made[:i]] for i in range(len(made))]
        self.compared += len(made)
        sampled = self._next_tokens(prefixes, sampling) if sampling else ()
        return Judged(made, self._next_tokens(prefixes, FULL), sampled)

    def _next_tokens(self, prefixes: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> tuple[int, ...]:
        """The salt keeps KV entries that were written while drafting out of the reference."""
        found: list[int] = []
        width = self._width()
        for start in range(0, len(prefixes), width):
            answers = self.client.complete_each(
                prefixes[start : start + width],
                max_tokens=1,
                timeout=self._left(),
                cache_salt="specserve-canary",
                **sampling,
            )
            found += [answer.token_ids[0] if answer.token_ids else -1 for answer in answers]
        return tuple(found)

    def _force_drafts(self, text: Completion) -> None:
        """Lookup methods draft only where text repeats: make it, before anything is called inactive."""
        if self.settings.method in WITHOUT_DRAFT and self._drafts(self.greedy) == 0 and text.token_ids:
            self._counted(lambda: self._ask_raw({**FULL, "allowed_token_ids": list(text.token_ids or ())[-1:]}))
            self.forced = self.greedy.pop()

    def _width(self) -> int:
        """Requests at a time, below server.max_concurrent_requests."""
        return min(16, self.settings.server.max_concurrent_requests or 16)

    def _together(self, *samplings: Mapping[str, Any]) -> list[Completion]:
        with ThreadPoolExecutor(min(self._width(), len(samplings))) as pool:
            return list(pool.map(self._ask_raw, samplings))

    def _chat_or_raw(self, sampling: Mapping[str, Any]) -> Completion:
        """A chat where there is a chat template: draft heads are trained on those."""
        try:
            return self.client.chat(CHAT, max_tokens=TOKENS, timeout=self._left(), **sampling)
        except EngineRefused as error:
            if error.status not in (400, 404):
                raise
        return self._ask_raw(sampling)

    def _ask_raw(self, sampling: Mapping[str, Any]) -> Completion:
        """The repetitive text; a short one where the model's context has no room for it."""
        try:
            return self._ask(self.raw, sampling)
        except EngineRefused as error:
            if error.status != 400 or self.raw == SHORT:
                raise
        self.raw = SHORT
        return self._ask(self.raw, sampling, tokens=TOKENS // 2)

    def _ask(self, prompt: Prompt, sampling: Mapping[str, Any], *, tokens: int = TOKENS, **extra: Any) -> Completion:
        return self.client.complete(prompt, max_tokens=tokens, timeout=self._left(), **sampling, **extra)

    def _left(self) -> float:
        seconds = self.deadline - self.clock()
        if seconds <= 0:
            raise _OutOfTime
        return seconds

    def _counted(self, ask: Callable[[], Completion]) -> Completion:
        """Make one text; what was drafted meanwhile is kept in ``greedy``."""
        before = self._snapshot()
        text = ask()
        after = self._snapshot()
        for _ in range(20):  # the counters are written just after the answer
            if after is None or before is None or after.finished_requests != before.finished_requests:
                break
            self.sleep(0.05)
            after = self._snapshot()
        self.greedy.append(_between(before, after))
        return text

    def _snapshot(self) -> EngineSnapshot | None:
        try:
            return parse(self.client.metrics_text(timeout=self._left()), at_seconds=self.clock())
        except (MetricsError, EngineRefused) as error:
            if str(error) not in self.notes:
                self.notes.append(str(error))
            return None


def _between(before: EngineSnapshot | None, after: EngineSnapshot | None) -> _Counted:
    if before is None or after is None:
        return _Counted(None, None)
    old, new = before.total("drafts"), after.total("drafts")
    at_0 = [s.accepted_per_position[0] for s in (before, after) if s.accepted_per_position]
    return _Counted(
        None if old is None or new is None else new - old,
        at_0[1] - at_0[0] if len(at_0) == 2 else None,
    )
