"""A config for checkpoints and hardware that nobody wrote a command for yet: method, numbers and
layout, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from specserve.app.init.sheet import Sheet
from specserve.app.plan import Planning
from specserve.checkpoint import read as checkpoint
from specserve.checkpoint.access import access
from specserve.checkpoint.facts import CheckpointRefused, ModelFacts
from specserve.config.load import Loaded
from specserve.config.models import DraftModel, Models, TargetModel
from specserve.config.schema import Settings
from specserve.config.serving import Hardware
from specserve.config.speculation import DEFAULT_TOKENS, Method, SpeculativeDecoding
from specserve.errors import ConfigError
from specserve.gpu import names
from specserve.memory import text
from specserve.memory.result import MemoryPlan
from specserve.pair import derive, mtp
from specserve.pair.heads import kind_of

_SPEC = "speculative_decoding"
_TP = "models.target_model.tensor_parallel_size"
_HARDWARE = "hardware.gpu_name"
_COUNTED = re.compile(r"(\d{1,3})\s*x\s*(\S.*)|(\S.*?)\s*x\s*(\d{1,3})", re.IGNORECASE)
_PARALLEL = (1, 2, 4, 8, 16)
"""Tensor parallel sizes that are tried: heads and layers of nearly every model divide by them."""
_LOOKUP_TOKENS = 4
_LEAST_CONTEXT = 2048
"""Shorter contexts are not proposed: the model is too large for the GPUs."""


def propose(
    sheet: Sheet,
    target: str,
    draft: str | None,
    gpu: str | None,
    environ: Mapping[str, str],
) -> None:
    """Write a proposal into the sheet. Raises ConfigError for a GPU name that nobody knows."""
    name, count = _hardware(gpu)
    sheet.put("models.target_model.path", _config(target))
    served = _facts(target, environ, sheet)
    if served is not None and draft is None:
        _say_head(served, sheet)
    proposer = None
    if draft is not None:
        sheet.put("models.draft_model.path", _config(draft))
        proposer = _facts(draft, environ, sheet)
    method, tokens = _speculation(sheet, served, proposer, has_draft=draft is not None)
    if name is not None:
        sheet.put(
            _HARDWARE,
            _config(name),
            "given to init; remove it to plan for the GPUs here",
        )
    settings = Settings(
        models=Models(
            target_model=TargetModel(path=target),
            draft_model=None if draft is None else DraftModel(path=draft),
        ),
        speculative_decoding=SpeculativeDecoding(method=method, num_speculative_tokens=tokens),
        hardware=Hardware(gpu_name=name, gpu_count=count),
    )
    if served is not None and (draft is None or proposer is not None):
        _layout(sheet, settings, environ, count)


def _config(path: str) -> str:
    return path.replace("$", "$$")


def _hardware(gpu: str | None) -> tuple[str | None, int | None]:
    """Name and number of GPUs: ``8x H100`` is both. Raises ConfigError."""
    if gpu is None:
        return None, None
    match = _COUNTED.fullmatch(gpu.strip())
    name, count = gpu.strip(), None
    if match is not None and names.read(gpu).capacity is None:
        name = match[2] or match[3]
        count = int(match[1] or match[4])
    reading = names.read(name)
    if reading.problem is not None:
        raise ConfigError(reading.problem, where="--gpu", fix=reading.fix)
    return name, count


def _facts(path: str, environ: Mapping[str, str], sheet: Sheet) -> ModelFacts | None:
    """What a checkpoint says; None, with a note, where it cannot be read."""
    settings = Settings(models=Models(target_model=TargetModel(path=path)))
    try:
        return checkpoint.read_config(path, access=access(settings, environ))
    except CheckpointRefused as refused:
        first = refused.findings[0]
        sheet.say(f"{path} could not be read, so nothing follows from it: {first.message}")
        return None


def _say_head(served: ModelFacts, sheet: Sheet) -> None:
    kind = kind_of(served)
    if kind not in (None, "draft_model", "mtp"):
        sheet.say(
            f"{served.path} is a head of kind {kind}: give it as --draft, and its model as --target"
        )


def _speculation(
    sheet: Sheet,
    served: ModelFacts | None,
    proposer: ModelFacts | None,
    *,
    has_draft: bool,
) -> tuple[Method, int | None]:
    """Method and tokens per draft."""
    method: Method
    if has_draft:
        method, reason = _of_draft(proposer)
        carrier = proposer
    else:
        method, reason = _of_target(served)
        carrier = served
    sheet.put(f"{_SPEC}.method", method, reason)
    tokens, why = _tokens(method, carrier)
    sheet.put(f"{_SPEC}.num_speculative_tokens", tokens, why)
    return method, tokens


def _of_draft(proposer: ModelFacts | None) -> tuple[Method, str]:
    if proposer is None:
        return (
            "draft_model",
            "the draft could not be read: taken for a whole language model",
        )
    method = derive.method_of(proposer)
    if method is None:
        return "draft_model", "the draft is a whole language model"
    return method, "what the draft's own files say it was made for"


def _of_target(served: ModelFacts | None) -> tuple[Method, str]:
    if served is not None:
        modules = mtp.modules(served)
        if modules:
            return (
                "mtp",
                f"the target's config.json names {modules} MTP module(s) of its own",
            )
    reason = (
        "no draft is given and none is inside the target: drafts are looked up in the text, which "
        "pays where answers repeat the prompt"
    )
    return "ngram", reason


def _tokens(method: Method, carrier: ModelFacts | None) -> tuple[int, str]:
    named = None
    if carrier is not None and method not in ("ngram", "draft_model"):
        named = derive.tokens_of(method, carrier)
    if named is not None:
        return named, "what the checkpoint was trained for"
    if method == "ngram":
        return _LOOKUP_TOKENS, "a start: measure with specserve bench"
    return DEFAULT_TOKENS, "specserve's default: measure with specserve bench"


def _layout(
    sheet: Sheet, settings: Settings, environ: Mapping[str, str], count: int | None
) -> None:
    """Tensor parallel size and context: the fewest GPUs that hold one whole request."""
    tried: list[tuple[int, MemoryPlan]] = []
    for size in _PARALLEL:
        if count is not None and size > count:
            break
        made = _planned(settings, size, count or size, environ)
        if made is None:
            return
        tried.append((size, made))
        if made.fits is not False or _is_used_up(made, size):
            break
    size, made = next((pair for pair in tried if pair[1].fits), tried[-1])
    if made.fits is None:
        sheet.say(f"{text.conclusion(made)}; give --gpu NAME to plan for one")
        return
    if settings.hardware.gpu_name is not None:
        sheet.put("hardware.gpu_count", count or size, "what was planned for")
    if made.backend == "cpu":
        sheet.say(f"on this CPU: {text.conclusion(made)}")
        return
    if made.fits:
        reason = f"the fewest GPUs that hold it: {text.conclusion(made)}"
        sheet.put(_TP, size, reason)
        return
    for size, made in reversed(tried):
        if made.refusal == "memory" and made.largest_max_model_len >= _LEAST_CONTEXT:
            sheet.put(_TP, size, "the whole context fits on none of the sizes tried")
            sheet.put(
                "engine.max_model_len",
                made.largest_max_model_len,
                "the longest request that fits",
            )
            return
    sheet.say("the models do not fit the GPUs; specserve plan shows by how much")


def _is_used_up(made: MemoryPlan, size: int) -> bool:
    """Whether there are no more GPUs to spread over, or no layout with more of them."""
    if made.backend == "cpu" or made.refusal == "split":
        return True
    return made.refusal == "gpu-count"


def _planned(
    settings: Settings, size: int, count: int, environ: Mapping[str, str]
) -> MemoryPlan | None:
    models = settings.models
    target = models.target_model.model_copy(update={"tensor_parallel_size": size})
    hardware = settings.hardware
    if hardware.gpu_name is not None:
        hardware = hardware.model_copy(update={"gpu_count": count})
    changed = settings.model_copy(
        update={
            "models": models.model_copy(update={"target_model": target}),
            "hardware": hardware,
        }
    )
    try:
        return Planning.of(Loaded(Path("config.yaml"), changed), environ=environ).plan()
    except CheckpointRefused:
        return None
