"""Draft heads: checkpoints that cannot speak alone and read the target's hidden states instead.

What each head needs was read in vLLM 0.32 (2026-11-29): ``llama_eagle.py``, ``llama_eagle3.py``,
``qwen3_dflash.py``, ``medusa.py``, ``mlp_speculator.py``, ``configs/eagle.py``,
``configs/speculators/``, ``config/speculative.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from specserve.checkpoint.facts import ASSISTANTS, ModelFacts
from specserve.config.schema import Settings
from specserve.errors import Change
from specserve.findings import Finding
from specserve.pair import head_shapes as shapes
from specserve.pair.head_shapes import DRAFT, bad_config, head_of, mask_token

_SPECULATORS = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
}
"""``speculators_model_type`` -> vLLM's method."""
_PARALLEL = "speculative_decoding.parallel_drafting"


def kind_of(facts: ModelFacts) -> str | None:
    """Which method a checkpoint was made for; ``draft_model`` for a whole language model; None when
    unclear.
    """
    speculators = facts.config.get("speculators_model_type")
    if isinstance(speculators, str):
        return _SPECULATORS.get(speculators)
    names = " ".join([*facts.architectures, facts.model_type]).lower()
    for word in ("eagle3", "dflash", "dspark", "medusa", "mlpspeculator", "mlp_speculator"):
        if word in names:
            if word.startswith("mlp"):
                return "mlp_speculator"
            return word
    if "mtp" in names or facts.model_type in ASSISTANTS:
        return "mtp"
    if any(key.startswith("medusa_num") for key in facts.config):
        return "medusa"
    named = facts.model_type == "eagle" or any(
        re.match(r"Eagle[A-Z]", a) for a in facts.architectures
    )
    return _kind_by_tensors(facts, named)  # Eagle2_5_VL is a multimodal model


def _kind_by_tensors(facts: ModelFacts, named_eagle: bool) -> str | None:
    """EAGLE heads carry the target's architecture name; only their tensors tell."""
    tensors = facts.tensors or {}
    if {"d2t", "t2d"} & tensors.keys() or any(
        n.startswith(("midlayer.", "model.midlayer.")) for n in tensors
    ):
        return "eagle3"
    joins = "fc.weight" in tensors or any("eagle_linear" in name for name in tensors)  # Mistral's
    if named_eagle or (joins and any(n.startswith("layers.") for n in tensors)):
        return "eagle"
    if any(
        re.match(r"(model\.|language_model\.|transformer\.)?.*(layers|h|blocks)\.\d+\.", n)
        for n in tensors
    ):
        return "draft_model"
    if any("ForCausalLM" in a or "LMHead" in a for a in facts.architectures):
        return "draft_model"
    return None


_HEADS = frozenset({"eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark"})
"""Kinds of checkpoints that are nothing without a target. An MTP module may live in the target."""
_NAMES = {
    "draft_model": "a whole language model",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE3 head",
    "mtp": "an MTP module",
    "medusa": "a set of Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
}


def check(settings: Settings, target: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    """Everything about a draft checkpoint under a method; a whole language model passes with
    nothing said here.
    """
    method, kind = settings.method, kind_of(draft)
    if method is None:
        return
    if mismatch := _wrong_kind(method, kind):
        yield mismatch
        return
    format_problems = list(_speculators(settings, target, draft))
    yield from format_problems
    if any(f.code == "head-config" for f in format_problems):
        return
    head = head_of(draft)
    k = settings.num_speculative_tokens
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "eagle": lambda: shapes.eagle(target, head),
        "eagle3": lambda: shapes.eagle3(
            target, head, parallel=bool(settings.speculative_decoding.parallel_drafting)
        ),
        "dflash": lambda: shapes.dflash(target, head, k),
        "dspark": lambda: shapes.block(head, k, "dspark"),
        "medusa": lambda: shapes.medusa(target, head, k),
        "mlp_speculator": lambda: shapes.mlp(target, head, k),
    }
    if method in checks:
        yield from checks[method]()
    if settings.speculative_decoding.parallel_drafting and not mask_token(head):
        message = (
            "parallel_drafting needs the id of a mask token and the draft's config.json names none"
        )
        change = Change(_PARALLEL)
        yield Finding("mask-token-missing", "error", DRAFT, message, str(change), (change,))


def _wrong_kind(method: str, kind: str | None) -> Finding | None:
    if kind in (None, method) or (method == "mtp" and kind == "draft_model"):
        return None
    change = Change("speculative_decoding.method", kind)
    where, fix, changes = change.key, str(change), (change,)
    if method == "draft_model":
        message = (
            f"the draft is {_NAMES[kind]}, which cannot generate text by itself; method "
            "draft_model needs a whole language model"
        )
        return Finding("head-as-model", "error", where, message, fix, changes)
    if kind == "draft_model":
        message = (
            f"the draft is a whole language model; method {method} needs "
            f"{_NAMES.get(method, 'its own head')}"
        )
        return Finding("model-as-head", "error", where, message, fix, changes)
    message = (
        f"the draft is {_NAMES[kind]}; method {method} needs {_NAMES.get(method, 'its own head')}"
    )
    return Finding("head-kind", "error", where, message, fix, changes)


def as_target(target: ModelFacts) -> Finding | None:
    """A head that is configured as the model to serve. vLLM unwraps speculators' format and serves
    the model that it names, with the head; of what that would be nothing has been checked.
    """
    kind = kind_of(replace(target, tensors=None))
    speculators = "speculators_model_type" in target.config
    if kind not in _HEADS and not speculators:
        return None
    where = "models.target_model.path"
    what = _NAMES.get(kind or "", "a draft head")
    model = _trained_for(target)
    said = f"this is {what}, not a model that generates text by itself"
    fix = "set models.target_model.path to the model that the head was trained for"
    if model is not None:
        said = f"this is {what} for {model}, not a model that generates text by itself"
        fix = f"set models.target_model.path: {model}"
    fix += f" and models.draft_model.path: {target.path}"
    return Finding("head-as-target", "error", where, said, fix)


def _trained_for(head: ModelFacts) -> str | None:
    """The model that a head names as its own target."""
    section = head.config.get("speculators_config")
    if isinstance(section, Mapping):
        verifier = section.get("verifier")
        if isinstance(verifier, Mapping) and isinstance(verifier.get("name_or_path"), str):
            return str(verifier["name_or_path"]) or None
    return _base_model(head)


def _speculators(settings: Settings, target: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    """The speculators format: complete enough to unwrap, and made for this target."""
    kind = draft.config.get("speculators_model_type")
    if kind is not None:
        inner = draft.config.get("transformer_layer_config")
        if isinstance(inner, Mapping):
            model_type = inner.get("model_type", "llama")
        else:
            model_type = None
        required = {"peagle": ("mask_token_id",), "eagle3": ()}.get(
            str(kind), ("mask_token_id", "aux_hidden_state_layer_ids")
        )
        missing = [k for k in required if k not in draft.config]
        if not isinstance(inner, Mapping):
            yield bad_config(
                "transformer_layer_config is missing; vLLM cannot unwrap this speculators "
                "checkpoint"
            )
        elif str(kind) not in _SPECULATORS:
            yield bad_config(
                f"speculators_model_type {kind!r} is unknown to vLLM ({', '.join(_SPECULATORS)})"
            )
        elif kind in ("eagle3", "peagle") and model_type not in ("llama", "qwen3"):
            yield bad_config(
                f"the head's layers are {model_type!r}; vLLM takes llama and qwen3 here"
            )
        elif missing:
            yield bad_config(f"{', '.join(missing)} is missing; vLLM needs it for {kind}")
        elif kind == "peagle" and not settings.speculative_decoding.parallel_drafting:
            message = "this head drafts all tokens in one pass; parallel_drafting must be on"
            change = Change(_PARALLEL, True)
            yield Finding("head-config", "error", _PARALLEL, message, str(change), (change,))
    yield from _verifier(target, draft)


def _verifier(target: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    """Whether the head names another model than the configured target as the one it was trained
    for.
    """
    spec = draft.config.get("speculators_config")
    if isinstance(spec, Mapping):
        verifier = spec.get("verifier")
    else:
        verifier = None
    if not isinstance(verifier, Mapping):
        verifier = {"name_or_path": _base_model(draft)}
    trained_for, given = verifier.get("name_or_path"), verifier.get("architectures")
    if isinstance(given, list):
        names = [n for n in given if isinstance(n, str)]
    else:
        names = []
    if names and target.architectures and not set(names) & set(target.architectures):
        message = (
            f"the head was trained for a {names[0]}; the target is a {target.architectures[0]}"
        )
        yield Finding(
            "head-verifier", "error", DRAFT, message, "use a head that was trained for this target"
        )
    elif (
        isinstance(trained_for, str)
        and trained_for
        and _name(trained_for) not in _target_names(target)
    ):
        message = (
            f"the head was trained for {trained_for}, the target is {target.path}; "
            "on other weights it is accepted less"
        )
        fix = "use the head of this very target, or measure acceptance"
        yield Finding("head-verifier", "warning", DRAFT, message, fix)


def _base_model(head: ModelFacts) -> str | None:
    """``base_model`` in the front matter of the head's model card."""
    if head.source is None or "README.md" not in head.sizes:
        return None
    try:
        card = head.source.read("README.md", 0, 16 * 1024).decode("utf-8", "replace")
    except OSError:
        return None
    if card.startswith("---"):
        front = card.split("\n---", 1)[0]
    else:
        front = ""
    match = re.search(r"^base_model:[ \t]*(?:\n\s*-[ \t]*)?[\"']?([\w./-]+)", front, re.MULTILINE)
    if match:
        return match.group(1)
    return None


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1].lower()


def _target_names(target: ModelFacts) -> set[str]:
    given = target.config.get("_name_or_path")
    return {_name(target.path)} | ({_name(given)} if isinstance(given, str) and given else set())
