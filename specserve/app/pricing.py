"""What would make a deployment fit that does not, each with its price in memory and requests.

Every remedy is planned as a whole deployment; only those that fit are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specserve.checkpoint.quantization import quant_method
from specserve.errors import Change, Problem
from specserve.findings import Finding
from specserve.units import gib

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.app.plan import Planning
    from specserve.config.schema import Settings
    from specserve.memory.result import MemoryPlan

_SPECULATION = "speculative_decoding"
_MOST_GPUS = 16
_HEAD = ("would fit", "a GPU", "requests")


@dataclass(frozen=True)
class Remedy:
    """One change with which the deployment fits."""

    what: str
    changes: tuple[Change, ...]
    """The edits of the config file; empty where it takes another checkpoint."""
    saved_bytes: int
    """Of what the fullest GPU needs for one request; negative where it needs more."""
    requests: float
    """Of the context served, at once."""
    max_model_len: int

    @property
    def row(self) -> tuple[str, ...]:
        """The remedy as columns."""
        what = self.what
        if self.changes:
            what = ", ".join(map(str, self.changes))
            if self.what:
                what += f" ({self.what})"
        saved = f"{gib(self.saved_bytes)} less"
        if self.saved_bytes < 0:
            saved = f"{gib(-self.saved_bytes)} more"
        return what, saved, f"{self.requests:.1f} of {self.max_model_len} tokens"

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        changes: dict[str, JsonValue] = {change.key: change.value for change in self.changes}
        return {
            "what": self.what,
            "set": changes,
            "saved_bytes": self.saved_bytes,
            "requests": round(self.requests, 2),
            "max_model_len": self.max_model_len,
        }


@dataclass(frozen=True)
class _Proposal:
    """Changed settings, not yet planned."""

    settings: Settings
    changes: tuple[Change, ...] = ()
    what: str = ""
    draft: bool = True
    same_models: bool = False
    """Whether what an earlier start measured holds for it too."""


def remedies(planning: Planning, refused: MemoryPlan) -> tuple[Remedy, ...]:
    """Every change of the usual kinds that makes ``refused`` fit, in the order of their cost."""
    found = []
    for proposal in _proposals(planning, refused):
        made = planning.plan(proposal.settings, draft=proposal.draft, measured=proposal.same_models)
        if made.fits:
            found.append(
                Remedy(
                    proposal.what,
                    proposal.changes,
                    _need(refused) - _need(made),
                    made.capacity.requests,
                    made.max_model_len,
                )
            )
    return tuple(found)


def table(found: Sequence[Remedy]) -> tuple[tuple[str, ...], ...]:
    """Remedies as rows under a heading; none without any."""
    if not found:
        return ()
    return (_HEAD, *(remedy.row for remedy in found))


def priced(finding: Finding, found: Sequence[Remedy]) -> Finding:
    """A refusal for lack of memory with its remedies under it."""
    if finding.code != "does-not-fit" or not found:
        return finding
    return replace(finding, message=str(Problem(finding.message, facts=table(found))))


def _need(plan: MemoryPlan) -> int:
    return max(gpu.fixed_bytes for gpu in plan.gpus) + plan.request_bytes


def _proposals(planning: Planning, refused: MemoryPlan) -> Iterator[_Proposal]:
    settings = planning.settings
    if refused.shape.drafts_with_a_model:
        yield from _smaller_drafts(planning)
        yield from _fewer_tokens(settings)
        yield _lookup(settings)
    yield from _shorter(settings, refused)
    if refused.backend == "gpu":
        if refused.shape.kv_dtype == "auto":
            change = Change("engine.kv_cache_dtype", "fp8")
            yield _Proposal(_engine(settings, kv_cache_dtype="fp8"), (change,), same_models=True)
        if quant_method(planning.target.config) is None and refused.shape.quantization is None:
            change = Change("models.target_model.quantization", "fp8")
            yield _Proposal(
                _target(settings, quantization="fp8"), (change,), "the target in 8 bits"
            )
        yield from _more_gpus(planning, refused)


def _smaller_drafts(planning: Planning) -> Iterator[_Proposal]:
    """The draft in fewer bits, where it is a checkpoint of its own in full precision."""
    settings, draft = planning.settings, planning.draft
    own = settings.models.draft_model
    if draft is None or own is None or quant_method(draft.config) or own.quantization:
        return
    # Vllm quantizes a draft to fp8 while it loads; 4 bits take a checkpoint that has them.
    for bits, quantization in ((8, "fp8"), (4, "bitsandbytes")):
        models = settings.models.model_copy(
            update={"draft_model": own.model_copy(update={"quantization": quantization})}
        )
        changed = settings.model_copy(update={"models": models})
        changes: tuple[Change, ...] = ()
        what = f"a checkpoint of the draft in {bits} bits"
        if bits == 8:
            changes = (Change("models.draft_model.quantization", "fp8"),)
            what = "the draft in 8 bits"
        yield _Proposal(changed, changes, what)


def _fewer_tokens(settings: Settings) -> Iterator[_Proposal]:
    """Half as many tokens a draft, and one."""
    spec = settings.speculative_decoding
    tokens = settings.num_speculative_tokens
    for fewer in sorted({tokens // 2, 1} - {0, tokens}, reverse=True):
        changed = spec.model_copy(update={"num_speculative_tokens": fewer})
        change = Change(f"{_SPECULATION}.num_speculative_tokens", fewer)
        yield _Proposal(settings.model_copy(update={_SPECULATION: changed}), (change,))


def _lookup(settings: Settings) -> _Proposal:
    """N-gram lookup, which has neither weights nor a cache."""
    spec = settings.speculative_decoding.model_copy(update={"method": "ngram"})
    models = settings.models.model_copy(update={"draft_model": None})
    changes = [Change(f"{_SPECULATION}.method", "ngram")]
    if settings.models.draft_model is not None:
        changes.append(Change("models.draft_model"))
    changed = settings.model_copy(update={_SPECULATION: spec, "models": models})
    return _Proposal(changed, tuple(changes), "lookup in the prompt", draft=False)


def _shorter(settings: Settings, refused: MemoryPlan) -> Iterator[_Proposal]:
    longest = refused.largest_max_model_len
    if 1 <= longest < refused.max_model_len:
        change = Change("engine.max_model_len", longest)
        yield _Proposal(_engine(settings, max_model_len=longest), (change,), same_models=True)


def _more_gpus(planning: Planning, refused: MemoryPlan) -> Iterator[_Proposal]:
    """Twice as many GPUs of the same kind, and on, until it fits."""
    settings, tp = planning.settings, refused.shape.tp
    hardware, name = settings.hardware, refused.gpu_name
    memory = hardware.gpu_memory_gib
    if planning.devices:
        name, memory = planning.devices[0].name, refused.gpus[0].total_bytes
        memory = (memory or 0) / 2**30
    while tp * 2 * refused.shape.pp <= _MOST_GPUS:
        tp *= 2
        count = tp * refused.shape.pp
        described = hardware.model_copy(
            update={"gpu_name": name, "gpu_memory_gib": memory, "gpu_count": count}
        )
        changed = _target(settings, tensor_parallel_size=tp)
        changed = changed.model_copy(update={"hardware": described})
        change = Change("models.target_model.tensor_parallel_size", tp)
        proposal = _Proposal(changed, (change,), f"{count} such GPUs")
        yield proposal
        if planning.plan(changed, measured=False).fits:
            return


def _engine(settings: Settings, **update: JsonValue) -> Settings:
    engine = settings.engine.model_copy(update=update)
    return settings.model_copy(update={"engine": engine})


def _target(settings: Settings, **update: JsonValue) -> Settings:
    target = settings.models.target_model.model_copy(update=update)
    models = settings.models.model_copy(update={"target_model": target})
    return settings.model_copy(update={"models": models})
