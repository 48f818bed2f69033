"""``d2t``: how the ids of a pruned draft vocabulary become the target's. target id = draft id +
d2t[draft id].
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.safetensors import TensorFacts
from specserve.findings import Finding

DRAFT = "models.draft_model.path"
_FORMATS = {"I64": "q", "I32": "i"}
MAX_TABLE_BYTES = 16 * 1024**2


def check(head: ModelFacts, rows: int, target_vocab: int) -> Iterator[Finding]:
    """The table is there, has one entry per draft id, and stays inside the target's vocabulary."""
    if head.tensors is None:
        return
    table = head.tensors.get("d2t") or head.tensors.get("model.d2t")
    if table is None:
        message = (
            f"the head drafts from {rows} of {target_vocab} tokens and "
            "has no d2t table to name them"
        )
        yield Finding(
            "head-d2t", "error", DRAFT, message, "convert the head again, with its d2t table"
        )
        return
    if table.shape != (rows,) or table.dtype not in _FORMATS:
        message = (
            f"d2t is {list(table.shape)} of {table.dtype}; must be [{rows}] of "
            "whole numbers, one per draft token"
        )
        yield Finding(
            "head-d2t", "error", DRAFT, message, "convert the head again, with its d2t table"
        )
        return
    offsets = read_whole_numbers(head, table)
    if offsets is None:
        return
    targets = [i + offset for i, offset in enumerate(offsets)]
    bad = next((i for i, t in enumerate(targets) if not 0 <= t < target_vocab), None)
    if bad is not None:
        message = (
            f"d2t maps draft id {bad} to {targets[bad]}; the target's ids end at {target_vocab - 1}"
        )
        yield Finding(
            "head-d2t", "error", DRAFT, message, "use a head that was trained for this target"
        )
    elif len(set(targets)) < len(targets):
        message = (
            f"d2t maps {len(targets) - len(set(targets))} draft ids to a "
            "target id that another one has too"
        )
        yield Finding(
            "head-d2t",
            "error",
            DRAFT,
            message,
            "convert the head again; d2t must hold differences, not ids",
        )


def targets(head: ModelFacts) -> frozenset[int] | None:
    """The target's ids that the head can draft; None where no table can be read."""
    tensors = head.tensors or {}
    table = tensors.get("d2t") or tensors.get("model.d2t")
    if table is None or table.dtype not in _FORMATS:
        return None
    offsets = read_whole_numbers(head, table)
    if offsets is None:
        return None
    return frozenset(i + offset for i, offset in enumerate(offsets))


def read_whole_numbers(facts: ModelFacts, tensor: TensorFacts) -> list[int] | None:
    """The values of a small integer tensor; None when its bytes cannot be read."""
    if facts.source is None or tensor.nbytes > MAX_TABLE_BYTES:
        return None
    try:
        raw = facts.source.read(tensor.file, tensor.offset, tensor.nbytes)
    except OSError:
        return None
    code = _FORMATS[tensor.dtype]
    count = len(raw) // struct.calcsize(code)
    return list(struct.unpack(f"<{count}{code}", raw[: count * struct.calcsize(code)]))
