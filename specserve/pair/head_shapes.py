"""Shapes of a draft head against its target: widths, layers it reads, its own vocabulary, how far
it can draft.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specserve.checkpoint.facts import ModelFacts, unwrapped
from specserve.checkpoint.fields import layer_count
from specserve.checkpoint.safetensors import TensorFacts
from specserve.errors import Change
from specserve.findings import Finding
from specserve.pair import d2t
from specserve.pair.vocabulary import vocab_size

DRAFT = "models.draft_model.path"
TOKENS = "speculative_decoding.num_speculative_tokens"


@dataclass(frozen=True)
class Head:
    """A draft head's config after vLLM's own unwrapping, and its tensors."""

    facts: ModelFacts
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorFacts]

    def number(self, *keys: str) -> int | None:
        """The first of these keys that holds a whole number."""
        return next((n for k in keys if type(n := self.config.get(k)) is int), None)

    def tensor(self, *names: str) -> TensorFacts | None:
        """The first of these tensors that is there, with or without the ``model.`` prefix."""
        return next(
            (t for n in names for t in (self.tensors.get(n), self.tensors.get(f"model.{n}")) if t),
            None,
        )

    def has(self, part: str) -> bool:
        """Whether any tensor's name contains this."""
        return any(part in name for name in self.tensors)


def head_of(facts: ModelFacts) -> Head:
    """Unwrap ``transformer_layer_config`` (speculators) or ``model`` (vLLM's EAGLE format)."""
    return Head(facts, unwrapped(facts.config), facts.tensors or {})


def mask_token(head: Head) -> bool:
    """Whether config.json names a mask token under one of the keys that vLLM reads."""
    nested = head.config.get("dflash_config")
    keys = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    return (isinstance(nested, Mapping) and "mask_token_id" in nested) or any(
        head.config.get(key) is not None for key in keys
    )


def bad_config(message: str) -> Finding:
    return Finding(
        "head-config", "error", DRAFT, message, "use a head that was exported for this vLLM"
    )


def hidden_size(facts: ModelFacts) -> int | None:
    """Width of the language model's hidden states."""
    n = facts.text_config.get("hidden_size", facts.text_config.get("n_embd"))
    if type(n) is int and n > 0:
        return n
    return None


def _width(head_needs: int | None, target: ModelFacts, what: str) -> Iterator[Finding]:
    has = hidden_size(target)
    if head_needs is not None and has is not None and head_needs != has:
        message = (
            f"the draft expects hidden size {head_needs} ({what}), the "
            f"target has {has}; they must be equal"
        )
        yield Finding(
            "head-hidden-size",
            "error",
            DRAFT,
            message,
            "use a head that was trained for this target",
        )


def eagle(target: ModelFacts, head: Head) -> Iterator[Finding]:
    """EAGLE: ``fc`` reads the draft's embedding beside the target's hidden state, both of one
    width.
    """
    own = head.number("hidden_size")
    fc = head.tensor("fc.weight")
    yield from _width(own, target, "hidden_size")
    if fc is None and not head.has("eagle_linear"):  # Mistral's name for it
        yield from _missing(head, "fc.weight")
    elif fc is not None and own and hidden_size(target) == own and fc.shape != (own, 2 * own):
        message = (
            f"fc.weight is {list(fc.shape)}; EAGLE on hidden size {own} has [{own}, {2 * own}]"
        )
        yield Finding(
            "head-fc",
            "error",
            DRAFT,
            message,
            "check that this is an EAGLE head (EAGLE3 reads more layers)",
        )
    yield from _vocabulary(target, head, pruned=False)


def _missing(head: Head, *names: str) -> Iterator[Finding]:
    """Tensors the head cannot do without; nothing when no header was at hand, or when they are
    quantized.
    """
    for name in names:
        if head.tensors and not head.has(name.removesuffix("weight")):
            message = f"the draft has no tensor {name}; vLLM would run it on memory nobody filled"
            yield Finding(
                "head-tensor-missing", "error", DRAFT, message, "convert or download the head again"
            )


def aux_layers(head: Head) -> list[int] | None:
    """Layers of the target that the head reads, in vLLM's counting; None when its config leaves it
    to the target.
    """
    ids = head.config.get("eagle_aux_hidden_state_layer_ids")
    if not ids and isinstance(nested := head.config.get("dflash_config"), Mapping):
        ids = _whole_numbers(nested.get("target_layer_ids"), plus=1)
    if not ids and isinstance(nested := head.config.get("eagle_config"), Mapping):
        ids = nested.get("eagle_aux_hidden_state_layer_ids")
    return _whole_numbers(ids) or None


def _whole_numbers(value: object, plus: int = 0) -> list[int]:
    if isinstance(value, list):
        return [i + plus for i in value if type(i) is int]
    return []


def _aux(target: ModelFacts, head: Head) -> Iterator[Finding]:
    ids, layers = aux_layers(head), layer_count(target.text_config)
    if layers is None:
        return
    if ids is None:
        if len({2, layers // 2, layers - 3}) < 3:
            message = (
                "the head names no layers and the usual three do not exist "
                f"in a target of {layers} layers"
            )
            yield Finding(
                "head-aux-layers",
                "error",
                DRAFT,
                message,
                "set eagle_aux_hidden_state_layer_ids in its config",
            )
    elif bad := [i for i in ids if not 0 <= i <= layers]:
        message = f"the head reads layer {bad[0]}, the target has {layers}; every layer must exist"
        yield Finding(
            "head-aux-layers",
            "error",
            DRAFT,
            message,
            "use a head that was trained for this target",
        )


def eagle3(target: ModelFacts, head: Head, *, parallel: bool) -> Iterator[Finding]:
    """EAGLE3: ``fc`` reads several of the target's layers at once; embedding and lm_head may be
    shared.
    """
    own, wide = head.number("hidden_size"), hidden_size(target)
    says = head.number("target_hidden_size") or own
    yield from _aux(target, head)
    eagle_config = head.config.get("eagle_config")
    uses_aux = not isinstance(eagle_config, Mapping) or eagle_config.get(
        "use_aux_hidden_state", True
    )
    fc = head.tensor("fc.weight")
    if uses_aux and fc is None:
        yield from _missing(head, "fc.weight")
    count = len(aux_layers(head) or ()) or head.number("num_aux_hidden_states") or 3
    if says is not None and wide is not None and says != wide:
        yield from _width(says, target, "target_hidden_size")
    elif (
        uses_aux
        and fc is not None
        and wide is not None
        and len(fc.shape) == 2
        and fc.shape[1] != count * wide
    ):
        message = (
            f"fc.weight reads {fc.shape[1]} values; {count} layers of "
            f"the target give {count * wide}"
        )
        yield Finding(
            "head-fc", "error", DRAFT, message, "use a head that was trained for this target"
        )
    if own != wide and head.tensors and not head.has("embed_tokens"):
        message = (
            "the head has no embedding of its own and cannot share the target's: "
            f"its hidden size is {own}, not {wide}"
        )
        yield Finding(
            "head-embedding", "error", DRAFT, message, "use a head that ships embed_tokens"
        )
    if parallel and head.tensors and not head.has("mask_hidden"):
        yield from _missing(head, "mask_hidden")
    yield from _vocabulary(target, head, pruned=True)


def _vocabulary(target: ModelFacts, head: Head, *, pruned: bool) -> Iterator[Finding]:
    """Sizes of the head's own vocabulary; a pruned one maps each id to one of the target's by
    ``d2t``.
    """
    ours, theirs = vocab_size(target), head.number("vocab_size")
    if ours is not None and theirs is not None and ours != theirs:
        message = f"the head's vocab_size is {theirs}, the target's {ours}; they must be equal"
        yield Finding(
            "head-vocab-size",
            "error",
            DRAFT,
            message,
            "use a head that was trained for this target",
        )
        return
    if pruned:
        rows = head.number("draft_vocab_size") or theirs
    else:
        rows = theirs
    lm_head, embed = head.tensor("lm_head.weight"), head.tensor("embed_tokens.weight")
    for tensor, wanted, key in (
        (lm_head, rows, "draft_vocab_size" if pruned else "vocab_size"),
        (embed, theirs, "vocab_size"),
    ):
        if tensor is not None and wanted is not None and tensor.shape[:1] != (wanted,):
            if tensor is lm_head:
                name = "lm_head.weight"
            else:
                name = "embed_tokens.weight"
            message = (
                f"{name} in {tensor.file} has "
                f"{tensor.shape[0] if tensor.shape else 0} rows, {key} is {wanted}"
            )
            yield Finding(
                "head-vocab-rows", "error", DRAFT, message, "restore the head's own config.json"
            )
    if pruned and rows is not None and ours is not None and rows != ours:
        if lm_head is None and head.tensors and not head.has("lm_head"):
            message = (
                f"the head drafts from {rows} of {ours} tokens and has no "
                f"lm_head; the target's has {ours} rows"
            )
            yield Finding(
                "head-tensor-missing", "error", DRAFT, message, "convert or download the head again"
            )
        yield from d2t.check(head.facts, rows, ours)


def dflash(target: ModelFacts, head: Head, k: int) -> Iterator[Finding]:
    yield from _aux(target, head)
    own, fc, ids = (
        head.number("target_hidden_size", "hidden_size"),
        head.tensor("fc.weight"),
        aux_layers(head),
    )
    yield from _width(own, target, "target_hidden_size")
    if (
        fc is not None
        and ids
        and own == (wide := hidden_size(target))
        and wide
        and fc.shape[1:] != (len(ids) * wide,)
    ):
        message = (
            f"fc.weight reads {fc.shape[-1]} values; {len(ids)} layers of "
            f"the target give {len(ids) * wide}"
        )
        yield Finding(
            "head-fc", "error", DRAFT, message, "use a head that was trained for this target"
        )
    if not mask_token(head):
        yield bad_config(
            "no mask token is named (dflash_config.mask_token_id); DFlash cannot draft without one"
        )
    yield from block(head, k, "dflash")
    yield from _vocabulary(target, head, pruned=True)


def block(head: Head, k: int, method: str) -> Iterator[Finding]:
    """DFlash and DSpark draft one block; its first place is the last accepted token unless it is
    sampled too.
    """
    size, limit = _block_size(head), block_limit(head, method)
    if limit is not None and k > limit:
        message = f"num_speculative_tokens is {k}; a block of {size} drafts at most {limit} tokens"
        change = Change(TOKENS, limit)
        yield Finding("head-block-size", "error", TOKENS, message, str(change), (change,))


def block_limit(head: Head, method: str) -> int | None:
    """The tokens that one block can draft; None where the checkpoint names no block."""
    size = _block_size(head)
    if size is None or size < 2:
        return None
    nested = head.config.get("dflash_config")
    anchor = {**head.config, **(nested if isinstance(nested, Mapping) else {})}.get(
        "sample_from_anchor", method == "dspark"
    )
    if anchor:
        return size
    return size - 1


def _block_size(head: Head) -> int | None:
    return head.number("block_size", "dspark_block_size")


def medusa(target: ModelFacts, head: Head, k: int) -> Iterator[Finding]:
    first = next(
        (t for n, t in head.tensors.items() if re.search(r"(layers\.0|\.0\.linear)\.weight$", n)),
        None,
    )
    yield from _width(
        first.shape[-1] if first and first.shape else head.number("hidden_size"),
        target,
        "hidden_size",
    )
    heads = {
        m.group(1)
        for n in head.tensors
        if (m := re.match(r"(?:medusa_heads\.)?(?:blocks\.)?(\d+)\.", n))
    }
    count = len(heads) or head.number("num_heads", "medusa_num_heads")
    if count is not None and k > count:
        message = (
            f"num_speculative_tokens is {k}, the checkpoint has {count} "
            "heads; each token needs a head"
        )
        change = Change(TOKENS, count)
        yield Finding("head-too-few", "error", TOKENS, message, str(change), (change,))
    vocab, ours, pruned = (
        head.number("vocab_size"),
        vocab_size(target),
        head.number("truncated_vocab_size"),
    )
    if vocab is not None and ours is not None and vocab != ours:
        message = f"the heads' vocab_size is {vocab}, the target's {ours}; they must be equal"
        yield Finding(
            "head-vocab-size",
            "error",
            DRAFT,
            message,
            "use heads that were trained for this target",
        )
    elif (
        pruned is not None
        and vocab is not None
        and pruned < vocab
        and head.tensors
        and not head.has("token_map")
    ):
        yield from _missing(head, "token_map")


def mlp(target: ModelFacts, head: Head, k: int) -> Iterator[Finding]:
    yield from _width(head.number("emb_dim", "hidden_size"), target, "emb_dim")
    n, top = head.number("n_predict"), head.config.get("top_k_tokens_per_head")
    if n is not None and k > n:
        message = f"num_speculative_tokens is {k}, the speculator predicts {n}"
        change = Change(TOKENS, n)
        yield Finding("head-too-few", "error", TOKENS, message, str(change), (change,))
    if isinstance(top, list) and n is not None and len(top) != n:
        yield bad_config(f"top_k_tokens_per_head has {len(top)} entries; must have n_predict ({n})")
    vocab, ours = head.number("vocab_size"), vocab_size(target)
    if vocab is not None and ours is not None and vocab != ours:
        message = f"the speculator's vocab_size is {vocab}, the target's {ours}; they must be equal"
        yield Finding(
            "head-vocab-size",
            "error",
            DRAFT,
            message,
            "use a speculator that was trained for this target",
        )
