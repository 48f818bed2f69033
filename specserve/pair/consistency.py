"""One checkpoint against itself and against how it is to be run: rows, layers, parallelism,
quantization, code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.fields import layer_count
from specserve.checkpoint.quantization import quant_method
from specserve.checkpoint.safetensors import TensorFacts
from specserve.config.models import DraftModel, TargetModel
from specserve.errors import Change
from specserve.findings import Finding
from specserve.pair.vocabulary import vocab_size

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",
    "tok_embeddings.weight",
    "model.decoder.embed_tokens.weight",
)
_LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "output.weight")
_PLAIN = ("F32", "F16", "BF16")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ANY_CHECKPOINT = ("moe_wna16", "humming", "inc")
"""Quantization methods that take over checkpoints of other methods."""
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Role:
    """A checkpoint in its place: the target, or the draft."""

    facts: ModelFacts
    settings: TargetModel | DraftModel
    key: str
    """``models.target_model`` or ``models.draft_model``."""
    tensor_parallel_size: int
    trust_remote_code: bool
    is_head: bool = False


def check(role: Role) -> Iterator[Finding]:
    """Everything but :func:`code`."""
    if not role.is_head:
        yield from _rows(role)
        yield from _layers(role)
    yield from _quantization(role)
    yield from _revision(role)


def _rows(role: Role) -> Iterator[Finding]:
    """vLLM asserts that the rows equal vocab_size; editing config.json alone does not change a
    matrix.
    """
    tensors, wanted = role.facts.tensors or {}, vocab_size(role.facts)
    if wanted is None:
        return
    # Then vLLM leaves a stored lm_head alone.
    tied = bool(role.facts.text_config.get("tie_word_embeddings"))
    for name in (_first(tensors, _EMBEDDINGS), None if tied else _first(tensors, _LM_HEADS)):
        if name is None:
            continue
        tensor = tensors[name]
        if tensor.dtype in _PLAIN and tensor.shape and tensor.shape[0] != wanted:
            message = (
                f"{name} in {tensor.file} has {tensor.shape[0]} rows, "
                f"config.json says vocab_size {wanted}"
            )
            fix = f"restore the original config.json (vocab_size {tensor.shape[0]})"
            yield Finding("vocab-rows", "error", f"{role.key}.path", message, fix)


def _first(tensors: Mapping[str, TensorFacts], names: tuple[str, ...]) -> str | None:
    return next((n for n in names if n in tensors), None)


def _layers(role: Role) -> Iterator[Finding]:
    wanted = layer_count(role.facts.text_config)
    if "block_configs" in role.facts.config:  # pruned models have layers without any tensor
        return
    found = {
        int(m.group(1))
        for n in role.facts.tensors or ()
        if (
            m := re.match(
                r"(?:model\.|language_model\.|model\.language_model\.)+layers\.(\d{1,6})\.", n
            )
        )
    }
    if found and wanted is not None and (missing := [i for i in range(wanted) if i not in found]):
        shown = ", ".join(str(i) for i in missing[:5]) + (", ..." if len(missing) > 5 else "")
        message = f"layers {shown} have no tensors; config.json says num_hidden_layers {wanted}"
        yield Finding(
            "layers-missing",
            "error",
            f"{role.key}.path",
            message,
            "finish the download of this checkpoint",
        )


def tensor_parallel(roles: Collection[Role]) -> Iterator[Finding]:
    """What cannot be shared by so many GPUs, with the largest number below that divides all of it,
    in both models.
    """
    where = "models.target_model.tensor_parallel_size"
    for role in roles:
        tp = role.tensor_parallel_size
        if (what := undivided(role.facts.text_config, tp)) is None:
            continue
        together = [r.facts.text_config for r in roles if r.tensor_parallel_size == tp]
        smaller = max(
            n for n in range(1, tp) if all(undivided(config, n) is None for config in together)
        )
        if role.key.endswith("draft_model"):
            of = "the draft"
        else:
            of = "the target"
        message = f"{of} has {what}, which {tp} GPUs cannot share equally"
        change = Change(where, smaller)
        yield Finding("tp-divisible", "error", where, message, str(change), (change,))


def undivided(config: Mapping[str, object], tp: int) -> str | None:
    """What so many GPUs cannot share; None when they can. Rows of a vocabulary are padded to 64."""
    heads = _count(config, "num_attention_heads", "n_head")
    kv = _count(config, "num_key_value_heads")
    inner = _count(config, "intermediate_size")
    words = _count(config, "vocab_size")
    if heads is not None and heads % tp:
        return f"{heads} attention heads"
    if kv is not None and kv % tp and tp % kv:
        return f"{kv} key/value heads"
    # Experts are padded, or not split at all.
    if inner is not None and inner % tp and not _count(config, *_EXPERTS):
        return f"intermediate_size {inner}"
    if words is not None and (padded := -(-words // 64) * 64) % tp:
        return f"a vocabulary of {padded} rows (padded to 64)"
    return None


def _count(config: Mapping[str, object], *keys: str) -> int | None:
    return next((n for k in keys if type(n := config.get(k)) is int and n > 0), None)


def _quantization(role: Role) -> Iterator[Finding]:
    """vLLM refuses a ``quantization`` that the checkpoint contradicts."""
    asked, stored = role.settings.quantization, quant_method(role.facts.config)
    if asked and stored and _family(asked) != _family(stored) and asked not in _ANY_CHECKPOINT:
        message = f"the checkpoint is quantized with {stored}; quantization is set to {asked}"
        change = Change(f"{role.key}.quantization")
        fix = f"{change}: vLLM reads the checkpoint's own"
        yield Finding("quantization-mismatch", "error", change.key, message, fix, (change,))


def _family(method: str) -> str:
    """Method without the kernel's name.

    >>> (_family("gptq_marlin"), _family("auto_awq"), _family("compressed-tensors"),
    ...  _family("modelopt_fp4"))
    ('gptq', 'awq', 'compressed_tensors', 'modelopt')
    """
    name = method.lower().replace("-", "_").removeprefix("auto_").removesuffix("_marlin")
    if name.startswith("modelopt"):
        return "modelopt"
    return name


def code(role: Role, known: Collection[str] | None) -> Iterator[Finding]:
    """Whether config.json can be parsed: by a class that is installed, or by the checkpoint's own
    code.

    ``known``: the model types that the installed libraries know; None when nobody could be asked.
    """
    facts, where = role.facts, "models.target_model.trust_remote_code"
    trusted: tuple[Change, ...] = (Change(where, True),)
    if facts.revision and not _is_pinned(role.settings.revision):
        trusted = (Change(f"{role.key}.revision", facts.revision), *trusted)
    own = _own_config_class(facts)
    native = known is None or facts.model_type in known or _parsed_otherwise(facts)
    if not native and own is None:
        message = (
            f"{facts.path} is of type {facts.model_type!r}, which the installed "
            "vLLM and Transformers do not know"
        )
        yield Finding(
            "model-type-unknown", "error", f"{role.key}.path", message, "install a newer vLLM"
        )
    elif not native and not role.trust_remote_code:
        message = (
            f"{facts.path} is of type {facts.model_type!r}, which only its own Python code can load"
        )
        fix = (
            f"read that code, pin both revisions, then set {where}: "
            "true (it applies to both models)"
        )
        yield Finding("remote-code", "error", where, message, fix, trusted)
    elif not native and own not in facts.files:
        message = f"{facts.path} needs its own code and {own} is not there"
        yield Finding(
            "remote-code", "error", f"{role.key}.path", message, "download the whole repository"
        )
    elif own is not None and known is None and not role.trust_remote_code:
        message = (
            f"{facts.path} ships Python code; vLLM may need trust_remote_code "
            "for it, which is for both models"
        )
        fix = f"read it, pin the revision, then set {where}: true"
        yield Finding("remote-code", "warning", where, message, fix, trusted)
    if (
        own is not None
        and role.trust_remote_code
        and facts.revision
        and not _is_pinned(role.settings.revision)
    ):
        message = (
            f"{facts.path} runs its own Python code and is not pinned; "
            "the code may change at any time"
        )
        change = Change(f"{role.key}.revision", facts.revision)
        yield Finding("remote-code-unpinned", "error", change.key, message, str(change), (change,))


def _own_config_class(facts: ModelFacts) -> str | None:
    """The file of ``auto_map``'s config class; None when the checkpoint ships none."""
    auto_map = facts.config.get("auto_map")
    if isinstance(auto_map, Mapping):
        name = auto_map.get("AutoConfig")
    else:
        name = None
    if isinstance(name, str):
        return f"{name.rsplit('.', 1)[0]}.py"
    return None


def _parsed_otherwise(facts: ModelFacts) -> bool:
    """Formats that vLLM unwraps itself: speculators, and Medusa's first one, which has no
    model_type.
    """
    return "speculators_model_type" in facts.config or any(
        key.startswith("medusa_num") for key in facts.config
    )


def _is_pinned(revision: str | None) -> bool:
    return revision is not None and bool(_HASH.fullmatch(revision))


def _revision(role: Role) -> Iterator[Finding]:
    commit = role.facts.revision
    if commit is not None and not _is_pinned(role.settings.revision):
        if role.settings.revision:
            now = f"{role.settings.revision!r} is a branch or tag"
        else:
            now = "no revision is set"
        message = f"{now}; the files of {role.facts.path} may change between two starts"
        change = Change(f"{role.key}.revision", commit)
        yield Finding("revision-unpinned", "warning", change.key, message, str(change), (change,))
