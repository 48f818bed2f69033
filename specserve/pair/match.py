"""Target and draft beside one another: the same model twice, sizes, context, data types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from specserve.checkpoint.context import context_length, native_length, uses_mrope
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.fields import layer_count
from specserve.checkpoint.quantization import quant_method, quantization_section
from specserve.config.schema import Settings
from specserve.errors import Change
from specserve.findings import Finding, Severity
from specserve.units import percent, size

DRAFT = "models.draft_model.path"
SMALLEST, LARGEST = 1 / 50, 1 / 4
"""Bytes of draft weights per byte of target weights outside which a pair rarely pays."""

BreakEven = Callable[[float, int], float | None]
"""The acceptance at which k drafts pay that each cost a part of the target's step; None where none
does. What speculation costs is the engine's knowledge, so a caller above brings it."""

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_HARD_TO_REACH = 0.9
"""An acceptance that even the same network in 4 bits seldom keeps."""
_NO_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})


def check(
    settings: Settings,
    target: ModelFacts,
    draft: ModelFacts,
    *,
    is_head: bool,
    break_even: BreakEven,
) -> Iterator[Finding]:
    """Everything that only the two together can tell."""
    if _same_model(target, draft):
        message = "the draft is the target itself (the same files); a draft must be a smaller model"
        yield Finding(
            "draft-is-target",
            "error",
            DRAFT,
            message,
            "set models.draft_model.path to another checkpoint",
        )
        return
    if settings.method == "draft_model":
        if is_own_draft(target, draft):
            yield from _own(settings, target, draft, break_even)
        else:
            yield from _ratio(target, draft)
    yield from _context(settings, target, draft, is_head=is_head)
    yield from _types(settings, target, draft)
    if uses_mrope(draft) and (
        settings.method == "draft_model" or settings.speculative_decoding.parallel_drafting
    ):
        message = (
            "the draft uses M-RoPE (a multimodal model's positions), which vLLM cannot draft with"
        )
        yield Finding(
            "draft-mrope", "error", DRAFT, message, "use a text-only draft, or eagle3 or mtp"
        )


def _same_model(target: ModelFacts, draft: ModelFacts) -> bool:
    """The same folder or commit, or copies: equal configs, headers and first bytes of each weights
    file.
    """
    if target.folder and draft.folder and target.folder.resolve() == draft.folder.resolve():
        return True
    if target.revision is not None and (target.path, target.revision) == (
        draft.path,
        draft.revision,
    ):
        return True
    return (
        target.config == draft.config
        and bool(target.tensors)
        and target.tensors == draft.tensors
        and _fingerprint(target) == _fingerprint(draft)
    )


def _fingerprint(facts: ModelFacts) -> list[bytes]:
    """64 KiB from the middle of each weights file."""
    if facts.source is None:
        return []
    files = sorted({t.file for t in (facts.tensors or {}).values()})
    try:
        return [facts.source.read(name, facts.sizes[name] // 2, 64 * 1024) for name in files]
    except OSError:
        return []


def is_own_draft(target: ModelFacts, draft: ModelFacts) -> bool:
    """Whether the draft is the target in another precision: the same architecture and sizes, other
    bytes.
    """
    ours, theirs = target.text_config, draft.text_config
    if not target.architectures or target.architectures != draft.architectures:
        return False
    if any(ours.get(key) != theirs.get(key) for key in _SIZES):
        return False
    if layer_count(ours) is None or layer_count(ours) != layer_count(theirs):
        return False
    return quantization_section(target.config) != quantization_section(draft.config)


def _own(
    settings: Settings, target: ModelFacts, draft: ModelFacts, break_even: BreakEven
) -> Iterator[Finding]:
    """Judged by bytes: what k drafts read beside the target's own step, against what they save."""
    ours, theirs = target.total_size_bytes, draft.total_size_bytes
    k = settings.num_speculative_tokens
    if not ours or not theirs or k < 1:
        return
    part = theirs / ours
    needed = break_even(part, k)
    message = (
        f"the draft is the target in another precision: each draft reads {percent(part)} of the "
        f"target's bytes, {k} of them {percent(k * part)} a step"
    )
    fix = "measure: specserve bench CONFIG"
    if needed is None:
        message += "; that is never paid back"
        yield Finding("own-draft", "warning", DRAFT, message, "use a smaller draft")
    else:
        message += f"; with {k} drafts it pays above {percent(needed)} acceptance"
        severity: Severity = "info"
        if needed > _HARD_TO_REACH:
            severity = "warning"
        yield Finding("own-draft", severity, DRAFT, message, fix)


def _ratio(target: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    ours, theirs = target.total_size_bytes, draft.total_size_bytes
    if not ours or not theirs:
        return
    sizes = f"the draft's weights are {size(theirs)}, the target's {size(ours)}"
    if theirs / ours > LARGEST:
        message = (
            f"{sizes} ({theirs / ours:.2g} times as much); above 1/4 a draft "
            "costs too much of what it saves"
        )
    elif theirs / ours < SMALLEST:
        message = (
            f"{sizes}: 1/{ours / theirs:.0f}; a draft so small is cheap, and whether it guesses "
            "well enough only a measurement tells"
        )
    else:
        return
    yield Finding("size-ratio", "warning", DRAFT, message, "measure: specserve bench CONFIG")


def is_cheap_relative(target: ModelFacts, draft: ModelFacts, *, same_vocabulary: bool) -> bool:
    """Whether a small draft needs no word on its size: how well it guesses follows from family and
    training, and a family's smallest model is its usual draft.
    """
    ours, theirs = target.total_size_bytes, draft.total_size_bytes
    if not same_vocabulary or not ours or not theirs or theirs > ours * SMALLEST:
        return False
    family = target.model_type.split("_")[0]
    return bool(family) and family == draft.model_type.split("_")[0]


def served_length(settings: Settings, target: ModelFacts) -> int | None:
    """The context that will be served; None when neither config.json nor the settings say."""
    asked = settings.engine.asked_length
    if asked is not None:
        return asked
    own = context_length(target)
    if own is None:
        return None
    return own.default


def _context(
    settings: Settings, target: ModelFacts, draft: ModelFacts, *, is_head: bool
) -> Iterator[Finding]:
    served, theirs = served_length(settings, target), native_length(draft)
    if settings.models.draft_model:
        limit = settings.models.draft_model.max_model_len
    else:
        limit = None
    longest = min((n for n in (theirs, served) if n is not None), default=None)
    if limit is not None and longest is not None and limit > longest:
        message = f"models.draft_model.max_model_len is {limit}; draft and target allow {longest}"
        change = Change("models.draft_model.max_model_len", longest)
        fix = f"{change}, or remove it"
        yield Finding("draft-max-model-len", "error", change.key, message, fix, (change,))
    if served is None or theirs is None or theirs >= served:
        return
    if is_head:
        what = "the head was trained up to"
    else:
        what = "the draft's context is"
    effect = "acceptance beyond that is unproven"
    # VLLM 0.32, gpu_model_runner._input_fits_in_drafter: the longest sequence of a step decides.
    if not is_head:
        effect = "while one longer sequence runs, nothing is drafted for its whole batch"
    message = f"{what} {theirs} tokens, {served} are served; {effect}"
    change = Change("engine.max_model_len", theirs)
    fix = f"{change}, if requests allow it"
    yield Finding("draft-context", "warning", DRAFT, message, fix, (change,))


def target_length(
    settings: Settings, target: ModelFacts, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """The served context must be one the target can reach; vLLM refuses more."""
    asked, native = settings.engine.asked_length, native_length(target)
    extra = target.config.get("model_max_length")
    variables = {**environ, **settings.engine.env}
    allowed = variables.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") in ("1", "true")
    if (
        asked is None
        or native is None
        or asked <= native
        or allowed
        or (type(extra) is int and asked <= extra)
    ):
        return
    message = f"engine.max_model_len is {asked}; the target's config.json allows {native}"
    change = Change("engine.max_model_len", native)
    yield Finding("context-too-long", "error", change.key, message, str(change), (change,))


def float16_refused(settings: Settings, facts: ModelFacts, where: str) -> Iterator[Finding]:
    """Model types that vLLM refuses to run in float16 (``_FLOAT16_NOT_SUPPORTED_MODELS``, 0.32,
    read 2026-11-29).
    """
    types = (facts.model_type, str(facts.text_config.get("model_type")))
    bad = [t for t in types if t in _NO_FLOAT16]
    if bad and settings.models.target_model.dtype in ("half", "float16"):
        message = (
            f"{facts.path} is of type {bad[0]}, which is numerically "
            "unstable in float16; vLLM refuses it"
        )
        change = Change("models.target_model.dtype", "bfloat16")
        yield Finding("dtype-unsupported", "error", where, message, str(change), (change,))


def stored_dtype(facts: ModelFacts) -> str | None:
    """The data type named in config.json."""
    for config in (facts.config, facts.text_config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(name := config.get(key), str):
                return name.removeprefix("torch.")
    return None


def _types(settings: Settings, target: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    """The draft runs in the target's dtype, and keeps its own quantization whatever the target's
    is.
    """
    asked, stored = settings.models.target_model.dtype, stored_dtype(draft)
    runs: str | None = {"half": "float16", "float": "float32"}.get(asked, asked)
    if asked == "auto":
        runs = stored_dtype(target)
    if runs and stored and runs != stored:
        message = f"the draft is stored as {stored} and runs as {runs}, the target's dtype"
        yield Finding("draft-dtype", "info", "models.draft_model.dtype", message)
    ours = settings.models.target_model.quantization or quant_method(target.config)
    theirs = (
        settings.models.draft_model and settings.models.draft_model.quantization
    ) or quant_method(draft.config)
    if ours and ours != theirs:
        message = (
            f"the target is quantized with {ours}, the draft is "
            f"{f'with {theirs}' if theirs else f'not ({stored})'}"
        )
        yield Finding("draft-quantization", "info", "models.draft_model.quantization", message)
