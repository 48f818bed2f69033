"""What a check proved, what it did not look at and why, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from specserve.checkpoint.context import native_length
from specserve.findings import Finding, Judgement, Verdicts, subject_of
from specserve.memory import text
from specserve.pair import heads, match, mtp
from specserve.units import size

if TYPE_CHECKING:
    from specserve.checkpoint.facts import ModelFacts
    from specserve.config.load import Loaded
    from specserve.config.schema import Settings
    from specserve.engine.installed.chosen import Chosen
    from specserve.engine.installed.introspect import EngineFacts
    from specserve.memory.result import MemoryPlan
    from specserve.pair.vocabulary import Comparison

UNREAD = {
    "checkpoint-missing",
    "config-missing",
    "hub-access",
    "hub-modelscope",
    "hub-revision",
    "hub-unreachable",
}
"""What says nothing about a pair: it was not seen."""
UNCOMPARED = {"tokenizer-missing", "tokenizer-unreadable", "pickle-weights", "gguf-weights"}
"""What leaves a part of the pair unseen."""


def verdicts(
    findings: Sequence[Finding],
    plan: MemoryPlan | None,
    engine: EngineFacts | None,
    chosen: Chosen,
) -> Verdicts:
    """The three verdicts, from everything that was found, skipped or not."""
    refused = {subject_of(f.code) for f in findings if f.severity == "error"}
    codes = {f.code for f in findings}
    seen = {f.code for f in findings if f.severity == "error" and subject_of(f.code) == "pair"}
    pair: Judgement = "fits"
    engine_said: Judgement = "fits"
    memory: Judgement = "unknown"
    if seen - UNREAD - UNCOMPARED:
        pair = "does not fit"
    elif codes & (UNREAD | UNCOMPARED):
        pair = "unknown"
    if "engine" in refused:
        engine_said = "does not fit"
    elif engine is None or chosen.source in ("assumed", "memory-only"):
        engine_said = "unknown"
    if plan is not None:
        memory = plan.judgement
    return Verdicts(pair, engine_said, memory)


def proven(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    *,
    vocabularies: Comparison | None,
    chosen: Chosen,
    verdict: Verdicts,
    plan: MemoryPlan | None,
) -> Iterator[str]:
    """One line for each thing that was looked at and is in order."""
    if verdict.pair != "does not fit":
        for name, facts in (("target", target), ("draft", draft)):
            if facts is not None and facts.tensors:
                held = ""
                if facts.total_size_bytes is not None:
                    held = f", {size(facts.total_size_bytes)}"
                yield f"{name}: {len(facts.tensors):,} tensors{held}, layers as config.json says"
        yield from _compared(vocabularies)
        yield from _drafter(settings, target, draft)
        yield from _context(settings, target)
    if verdict.engine == "fits":
        known = ["every flag"]
        if settings.method is not None:
            known.insert(0, f"method {settings.method}")
        if target is not None and (draft is not None or not settings.uses_draft_model):
            known.append("the architectures")
        yield f"engine: {chosen.engine} has {', '.join(known)}"
    if plan is not None and verdict.memory == "fits":
        yield f"memory: {text.conclusion(plan)}"


def _compared(vocabularies: Comparison | None) -> Iterator[str]:
    if vocabularies is None or vocabularies.relation == "different":
        return
    whole = vocabularies.target_tokens
    line = f"vocabulary: {vocabularies.equal_tokens:,} of {whole:,} tokens equal"
    if vocabularies.same_file:
        line += " (the same tokenizer file)"
    yield line


def _drafter(
    settings: Settings, target: ModelFacts | None, draft: ModelFacts | None
) -> Iterator[str]:
    if settings.method == "mtp" and draft is None and target is not None:
        modules = mtp.modules(target)
        if modules:
            yield f"MTP: {modules} module{'s' * (modules > 1)} in the target's config"
        return
    if draft is None or settings.method in (None, "draft_model"):
        return
    if draft.tensors:
        kind = heads.kind_of(draft) or settings.method
        yield f"head: its tensors are those of method {kind} and fit the target"


def _context(settings: Settings, target: ModelFacts | None) -> Iterator[str]:
    if target is None:
        return
    served = match.served_length(settings, target)
    own = native_length(target)
    if served is not None and own is not None and served <= own:
        yield f"context: {served:,} of the {own:,} tokens that the target allows"


def unproven(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    *,
    findings: Sequence[Finding],
    vocabularies: Comparison | None,
    chosen: Chosen,
    verdict: Verdicts,
    plan: MemoryPlan | None,
) -> Iterator[str]:
    """One line for each thing that was not looked at, with the reason."""
    for name, facts in (("target", target), ("draft", draft)):
        if facts is None and (name == "target" or settings.uses_draft_model):
            yield f"{name}: not read; see the finding"
        elif facts is not None and not facts.tensors:
            yield f"{name}'s tensors: no headers of its weights are here, so shapes are unchecked"
    if draft is not None and vocabularies is None:
        reason = "see the finding"
        if settings.method != "draft_model":
            reason = "the head ships no tokenizer of its own"
        yield f"vocabulary: not compared; {reason}"
    if verdict.engine == "unknown":
        yield engine_unsaid(findings, chosen).replace(" not checked", "")
    if verdict.memory == "unknown":
        yield memory_unsaid(plan).replace(" not checked", "")
    if settings.method is not None and verdict.pair == "fits":
        yield "acceptance: only a measurement tells (specserve bench)"


def pair_unsaid(findings: Sequence[Finding]) -> str:
    """Why the pair was not judged."""
    codes = {f.code for f in findings}
    if codes & UNREAD:
        return "pair not checked: a model could not be read"
    if codes & {"tokenizer-missing", "tokenizer-unreadable"}:
        return "vocabulary not compared: a tokenizer is missing, or its library"
    return "shapes not compared: the weights are not safetensors"


def engine_unsaid(findings: Sequence[Finding], chosen: Chosen | None) -> str:
    """Why the engine that will run was not judged."""
    if chosen is not None and chosen.source == "assumed":
        return f"engine not checked: which will run is not known, assumed is {chosen.engine}"
    if chosen is not None and chosen.source == "memory-only":
        return f"engine not checked: of {chosen.engine} only memory is known"
    if any(f.code == "engine-broken" for f in findings):
        return "engine not checked: it cannot be imported"
    return "engine not checked: it did not answer in time"


def memory_unsaid(plan: MemoryPlan | None) -> str:
    """Why memory was not judged."""
    if plan is None:
        return "memory not checked: a model could not be read"
    return text.unsaid(plan)


def price(plan: MemoryPlan | None) -> str | None:
    """What the draft costs: its part of the KV cache, and the requests that it takes the place of.

    None where nothing with a cache of its own proposes.
    """
    if plan is None or not plan.draft_kv_bytes_per_token or not plan.knows("KV cache"):
        return None
    whole, own = size(plan.kv_bytes_per_token), size(plan.draft_kv_bytes_per_token)
    if whole.split()[1] == own.split()[1]:
        own = own.split()[0]
    line = f"{whole} of KV per token, {own} of them the draft's"
    if not plan.fits:
        return line
    return (
        f"{line}: {plan.capacity.requests:.1f} requests instead of "
        f"{plan.without_draft.requests:.1f} (of {plan.max_model_len:,} tokens)"
    )


def next_command(
    loaded: Loaded, verdict: Verdicts, plan: MemoryPlan | None, *, has_gpu: bool
) -> str:
    """What to type after a check that refused nothing."""
    config = shlex.quote(str(loaded.path))
    if verdict.memory == "unknown" and plan is not None and not plan.unknown:
        if plan.gpu_name is not None:
            return "specserve gpus"
        return f"specserve plan {config} --set hardware.gpu_name='H100 80GB'   # or your GPU"
    if verdict.engine == "unknown" or not has_gpu:
        return f"specserve launch {config} --dry-run"
    return f"specserve launch {config}"
