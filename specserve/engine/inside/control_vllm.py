"""The live control inside vLLM: a factory for ``--scheduler-cls``.

vLLM calls what the flag names where it would call its own scheduler's class
(``v1/engine/core.py``; read in 0.28 to 0.32, 2026-12-01). :func:`scheduler` makes vLLM's own
scheduler, the asynchronous one where vLLM would take that, and lays three methods of it over with
ours: ``schedule`` writes the length of the next draft into ``dynamic_sd_lookup`` before,
``update_from_output`` tells the law what the step showed, ``update_draft_token_ids`` cuts drafts
that the method itself cannot shorten. Names and signatures are checked before that. Whatever is
unknown, and any exception of ours, takes the three off again: what is left is plain vLLM, and one
warning.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Protocol

from specserve.engine.command.environment import ControlOrder, control_order
from specserve.engine.inside.control import Law, SeenStep

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOOKUPS = frozenset({"ngram", "suffix"})
"""Methods of which a draft costs next to nothing."""
LENGTH_IS_TOLD = frozenset({"ngram", "draft_model", "eagle", "eagle3", "mtp"})
"""Methods whose proposer drafts as many tokens as the scheduler says."""
CUT = frozenset({"suffix"})
"""Methods whose drafts are cut after they were made: told another length, they end the engine."""
REQUEST_KEY = "num_speculative_tokens"
"""In ``vllm_xargs`` of a request: the most tokens per draft for it."""
IDLE_SECONDS = 5.0
"""A longer step says nothing of the engine's speed."""

# A child of vLLM's logger: written by its handler, with the process named in front.
_log = logging.getLogger("vllm.specserve")

_HOOKS: Mapping[str, tuple[str, ...]] = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "update_draft_token_ids": ("draft_token_ids",),
}
"""Methods that are laid over -> parameters that a caller must give."""
_ATTRIBUTES = ("dynamic_sd_lookup", "num_spec_tokens", "requests", "running", "waiting")


class Output(Protocol):
    """What the control reads of vLLM's SchedulerOutput."""

    num_scheduled_tokens: Mapping[str, int]
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    num_spec_tokens_to_schedule: int


class Sampled(Protocol):
    """What the control reads of vLLM's ModelRunnerOutput."""

    req_id_to_index: Mapping[str, int]
    sampled_token_ids: Sequence[Sequence[int]]


class Drafts(Protocol):
    """What the control reads, and cuts, of vLLM's DraftTokenIds."""

    req_ids: Sequence[str]
    draft_token_ids: list[list[int]]


class SamplingParams(Protocol):
    """What the control reads of a request's SamplingParams."""

    extra_args: Mapping[str, int] | None


class ScheduledRequest(Protocol):
    """What the control reads of vLLM's Request."""

    sampling_params: SamplingParams | None


class VllmScheduler(Protocol):
    """What the control reads and sets of vLLM's Scheduler."""

    dynamic_sd_lookup: list[int] | None
    num_spec_tokens: int
    requests: Mapping[str, ScheduledRequest]
    running: Sized
    waiting: Sized
    schedule: Callable[..., Output]
    update_from_output: Callable[..., Mapping[int, Sized]]
    update_draft_token_ids: Callable[[Drafts], None]


def scheduler(vllm_config: VllmConfig, **given: Sized | bool | int | None) -> VllmScheduler:
    """vLLM's scheduler, under control where that is possible."""
    made: VllmScheduler = _plain_class(vllm_config)(vllm_config=vllm_config, **given)
    speculative = vllm_config.speculative_config
    try:
        reason = unfit(made, None if speculative is None else speculative.method)
        if reason is None:
            Control(
                made,
                speculative.method,
                most_running=vllm_config.scheduler_config.max_num_seqs,
                synchronous=not vllm_config.scheduler_config.async_scheduling,
                order=control_order(),
            ).take_over()
    except Exception as error:  # noqa: BLE001 whatever it is, vLLM must serve on
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        _log.warning("specserve control: off, vLLM runs as it is: %s", reason)
    return made


def _plain_class(vllm_config: VllmConfig) -> Callable[..., VllmScheduler]:
    """The class that vLLM takes where nobody names one (``config/scheduler.py`` of 0.32)."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        asynchronous: Callable[..., VllmScheduler] = AsyncScheduler
        return asynchronous
    from vllm.v1.core.sched.scheduler import Scheduler

    synchronous: Callable[..., VllmScheduler] = Scheduler
    return synchronous


def unfit(made: VllmScheduler, method: str | None) -> str | None:
    """Why this scheduler cannot be controlled; None where it can."""
    if method is None:
        return "nothing is drafted"
    if method not in LENGTH_IS_TOLD | CUT:
        return f"method {method} drafts one length only"
    missing = [name for name in _ATTRIBUTES if not hasattr(made, name)]
    if missing:
        return f"this vLLM's scheduler has no {missing[0]}"
    for name, needed in _HOOKS.items():
        hook = getattr(made, name, None)
        if not callable(hook):
            return f"this vLLM's scheduler has no {name}()"
        required = tuple(
            parameter.name
            for parameter in inspect.signature(hook).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        )
        if required != needed:
            return f"{name}() of this vLLM's scheduler takes ({', '.join(required)})"
    code = getattr(type(made).schedule, "__code__", None)
    if code is None or "dynamic_sd_lookup" not in code.co_names:
        return "schedule() of this vLLM's scheduler does not read dynamic_sd_lookup"
    return None


class Control:
    """The law at work in one scheduler."""

    def __init__(
        self,
        made: VllmScheduler,
        method: str,
        *,
        most_running: int,
        synchronous: bool,
        order: ControlOrder,
    ) -> None:
        if method in CUT and not synchronous:
            raise ValueError(f"method {method} under asynchronous scheduling")
        self._scheduler = made
        self._cuts = method in CUT
        self._synchronous = synchronous
        self._order = order
        self._before = made.dynamic_sd_lookup
        self._longest = made.num_spec_tokens
        first: list[int] = []
        if order.rows:
            first = [order.first_at(batch, self._longest) for batch in range(most_running + 1)]
        self._law = Law(made.num_spec_tokens, lookup=method in LOOKUPS, first=first)
        self._method = method
        self._rows = [[k] * (most_running + 1) for k in range(self._longest + 1)]
        self._most_running = most_running
        self._asked = self._longest
        self._under_way: dict[int, tuple[int, int]] = {}
        self._ended: float | None = None
        self._plain_schedule = made.schedule
        self._plain_update = made.update_from_output
        self._plain_drafts = made.update_draft_token_ids

    def take_over(self) -> None:
        """Lays the three methods over."""
        self._scheduler.schedule = self._schedule
        self._scheduler.update_from_output = self._update_from_output
        self._scheduler.update_draft_token_ids = self._update_draft_token_ids
        _log.info(
            "specserve control: live, method %s, 0 to %d tokens per draft",
            self._method,
            self._longest,
        )

    def let_go(self, error: Exception) -> None:
        """Leaves plain vLLM behind, for good."""
        for name in _HOOKS:
            vars(self._scheduler).pop(name, None)
        self._scheduler.dynamic_sd_lookup = self._before
        _log.warning(
            "specserve control: off, vLLM runs on as it is: %s: %s", type(error).__name__, error
        )

    def _schedule(self, *args: bool, **named: bool) -> Output:
        chosen = self._longest
        try:
            chosen = self._choose()
        except Exception as error:  # noqa: BLE001 whatever it is, vLLM must serve on
            self.let_go(error)
            return self._plain_schedule(*args, **named)
        output = self._plain_schedule(*args, **named)
        if len(output.num_scheduled_tokens) > 0:
            self._under_way[id(output)] = (self._asked, chosen)
            self._asked = chosen
        else:
            self._ended = None
        return output

    def _choose(self) -> int:
        """Tokens for the drafts of the step that is about to be scheduled.

        How many requests it will hold is not known before; all that run, and those that wait as
        far as there is room, comes near.
        """
        batch = len(self._scheduler.running) + len(self._scheduler.waiting)
        batch = max(1, min(batch, self._most_running))
        most = self._longest
        if self._order.largest_batch is not None and batch > self._order.largest_batch:
            most = 0
        chosen = self._law.choose(batch, most).tokens
        if not self._cuts:
            self._scheduler.dynamic_sd_lookup = self._rows[chosen]
        return chosen

    def _update_from_output(
        self, scheduler_output: Output, model_runner_output: Sampled
    ) -> Mapping[int, Sized]:
        try:
            self._learn(scheduler_output, model_runner_output)
        except Exception as error:  # noqa: BLE001 whatever it is, vLLM must serve on
            self.let_go(error)
        return self._plain_update(scheduler_output, model_runner_output)

    def _learn(self, output: Output, sampled: Sampled) -> None:
        now, before = time.monotonic(), self._ended
        self._ended = now
        under_way = self._under_way.pop(id(output), None)
        if under_way is None:
            return
        asked, following = under_way
        drafted, accepted, decodes_only = [], [], True
        for request, scheduled in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(request, ()))
            if scheduled != 1 + drafts:
                decodes_only = False
                continue
            place = sampled.req_id_to_index.get(request)
            if place is None or not sampled.sampled_token_ids:
                continue
            given = len(sampled.sampled_token_ids[place])
            drafted.append(drafts)
            accepted.append(max(0, min(given - 1, drafts)))
        seconds = None
        if before is not None and decodes_only and now - before < IDLE_SECONDS:
            seconds = now - before
        told = following
        if self._law.lookup:
            told = asked
        self._law.observe(SeenStep(asked, drafted, accepted, seconds, told))

    def _update_draft_token_ids(self, draft_token_ids: Drafts) -> None:
        try:
            self._cut(draft_token_ids)
        except Exception as error:  # noqa: BLE001 whatever it is, vLLM must serve on
            self.let_go(error)
        self._plain_drafts(draft_token_ids)

    def _cut(self, drafts: Drafts) -> None:
        """Called under synchronous scheduling only."""
        for place, name in enumerate(drafts.req_ids):
            most = self._limit_of(name)
            if self._cuts:
                most = min(most, self._asked)
            if len(drafts.draft_token_ids[place]) > most:
                drafts.draft_token_ids[place] = list(drafts.draft_token_ids[place][:most])

    def _limit_of(self, name: str) -> int:
        """The most tokens per draft that a request asks for, clamped; vLLM does not check it."""
        request = self._scheduler.requests.get(name)
        if request is None or request.sampling_params is None:
            return self._longest
        given = (request.sampling_params.extra_args or {}).get(REQUEST_KEY)
        if isinstance(given, bool) or not isinstance(given, int | float):
            return self._longest
        return max(0, min(int(given), self._longest))
