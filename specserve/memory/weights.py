"""Bytes of a model's weights on each GPU, from the headers of its checkpoint.

What vLLM logs as "Model loading took" is what PyTorch's allocator handed out, so parameters are
fused first and then rounded as the allocator does (c10/cuda/CUDACachingAllocator: large blocks in
steps of 2 MiB, a rest of more than 1 MiB is given back; read 2026-11-29).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from specserve.checkpoint.context import rope_parameters
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.fields import Config, first_int, is_tied
from specserve.checkpoint.safetensors import DTYPE_BITS, TensorFacts
from specserve.memory import parameters, required
from specserve.memory.deployment import Shape
from specserve.memory.layers import head_geometry, is_mla
from specserve.memory.placement import Place, Split, place, stage_of, stages
from specserve.units import MIB

_FLOATS = {"F32", "F16", "BF16", "F64"}
_KEPT_FLOAT32 = re.compile(
    r"A_log|dt_bias|(^|\.)D$|correction_bias|scale|absmax|quant_map|code|zero_point|nested_|\.bias_"
)
ONLINE_BITS: Mapping[str, float] = {
    "fp8": 8,
    "fp8_per_tensor": 8,
    "fp8_per_block": 8,
    "fp8_per_channel": 8,
    "ptpc_fp8": 8,
    "experts_int8": 8,
    "int8": 8,
    "mxfp8": 8.25,
    "bitsandbytes": 4.5,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
    "int8_per_channel": 8,
}
"""Bits per weight of linear layers that vLLM quantizes while loading; embeddings and LM head keep
their dtype.
"""


@dataclass(frozen=True)
class Weights:
    """Weights on one GPU of each pipeline stage."""

    stage_bytes: tuple[int, ...]
    source: str
    """What they were reckoned from: tensor headers, the index's total size, or config.json alone.
    """
    mtp_bytes: int = 0
    """The MTP module inside the checkpoint, on one GPU; not in ``stage_bytes``."""
    assumed: tuple[str, ...] = ()
    unknown: str | None = None
    """Why no size is known; then the bytes are none, not 0."""


def of_model(
    facts: ModelFacts, shape: Shape, *, tp: int | None = None, online: str | None = None
) -> Weights:
    """Weights of one model under a deployment.

    ``tp`` is given for a draft, which is never cut into stages.
    """
    config, pp, total = facts.text_config, 1 if tp is not None else shape.pp, facts.total_size_bytes
    if tp is None:
        tp = shape.tp
    split = Split.of(
        config, tp=tp, ep=shape.ep, replicate_tower=shape.extra.get("mm-encoder-tp-mode") == "data"
    )
    if facts.tensors:
        staged, mtp = _loaded(facts.tensors, facts, shape, split, pp, online=online)
        return Weights(staged, "safetensors headers", mtp)
    lacking = required.missing(facts.config, config)
    computed = None
    if not lacking:
        computed = parameters.of_config(facts.config, config)
    if computed:
        staged, mtp = _loaded(computed, facts, shape, split, pp, online=online)
        if not total:
            assumed = ("weights: counted from config.json, no header was at hand",)
            return Weights(staged, "config.json", mtp, assumed)
        ratio = Fraction(total, sum(t.nbytes for t in computed.values()))
        source = "index total_size, split as config.json says"
        return Weights(tuple(round(b * ratio) for b in staged), source, round(mtp * ratio))
    if total is None:
        why = "neither headers nor an index are here, and config.json names no known architecture"
        if lacking:
            why = f"neither headers nor an index are here, and config.json lacks {lacking[0]}"
        return Weights((0,) * pp, "unknown", unknown=why)
    share = round(total / (tp * pp) * (1 if tp == 1 else 1.01))  # 1 % is on every GPU
    note = "weights: split evenly over the GPUs, since neither headers nor a known config say more"
    return Weights((share,) * pp, "index total_size", assumed=(note,))


def _loaded(
    tensors: Mapping[str, TensorFacts],
    facts: ModelFacts,
    shape: Shape,
    split: Split,
    pp: int,
    *,
    online: str | None,
) -> tuple[tuple[int, ...], int]:
    """Bytes on one GPU of each stage, and of the MTP module."""
    counts, tied = (
        stages(max(split.layers, 1), pp, shape.layer_split),
        is_tied(facts.text_config, facts.config),
    )
    sums: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(pp)]
    mtp: defaultdict[str, float] = defaultdict(float)
    padding = _mxfp4_padding(facts.text_config, split.tp, shape)
    for name, tensor in tensors.items():
        where = place(name, tensor.shape, split)
        if (where.part == "head" and tied) or (where.part == "tower" and shape.language_model_only):
            continue
        share = where.share.numerator / where.share.denominator
        nbytes = loaded_bytes(name, tensor, where, shape.dtype_bytes, online) * share
        if name.endswith(("_blocks", "_scales")) and "experts" in name:
            nbytes *= padding
        for into in (
            [mtp]
            if where.part == "mtp"
            else [sums[stage] for stage in _stages_of(where, counts, tied)]
        ):
            into[where.parameter] += nbytes
    extra = runtime_copies(facts.text_config, split.tp, counts, shape)
    totals = (sum(allocated(round(b)) for b in stage.values()) for stage in sums)
    staged = tuple(
        max(0, t + e - shape.cpu_offload_bytes) for t, e in zip(totals, extra, strict=True)
    )
    return staged, sum(allocated(round(b)) for b in mtp.values())


def _stages_of(where: Place, counts: list[int], tied: bool) -> set[int]:
    last = len(counts) - 1
    match where.part:
        case "embedding":
            if tied:
                return {0, last}
            return {0}
        case "head" | "other":
            return {last}
        case "tower":
            return {0}
        case _:
            return {stage_of(where.layer or 0, counts)}


def loaded_bytes(
    name: str, tensor: TensorFacts, where: Place, dtype_bytes: int, online: str | None
) -> float:
    """Bytes of a whole tensor once loaded: floats in the model's dtype, packed and scale tensors as
    stored.
    """
    if tensor.dtype not in _FLOATS:
        return tensor.nbytes
    elements = tensor.nbytes * 8 // DTYPE_BITS[tensor.dtype]
    bits = ONLINE_BITS.get(online or "")
    if (
        bits
        and where.part == "layer"
        and (where.expert if online == "experts_int8" else where.linear)
    ):
        return elements * bits / 8
    if _KEPT_FLOAT32.search(name):
        return tensor.nbytes
    return elements * dtype_bytes


def allocated(nbytes: int) -> int:
    """What PyTorch's allocator hands out for a parameter.

    129.5 steps of 2 MiB; 512 bytes are the least.

    >>> allocated(271_581_184) - 271_581_184, allocated(1000)
    (1048576, 1024)
    """
    if nbytes < 10 * MIB:
        return -(-nbytes // 512) * 512
    rest = -nbytes % (2 * MIB)
    return nbytes + (rest if rest <= MIB else 0)


def runtime_copies(config: Config, tp: int, counts: list[int], shape: Shape) -> list[int]:
    """What loading adds to the checkpoint's own tensors, for each stage: rope tables, MLA's
    absorbed matrices.
    """
    rope = rope_table_bytes(config, shape)
    absorbed = 0
    if is_mla(config):
        heads = (first_int(config, "num_attention_heads") or 0) // tp
        width = (first_int(config, "qk_nope_head_dim") or 128) + (
            first_int(config, "v_head_dim") or 128
        )
        absorbed = (first_int(config, "kv_lora_rank") or 0) * heads * width * shape.dtype_bytes
    return [rope + absorbed * count for count in counts]


def rope_table_bytes(config: Config, shape: Shape) -> int:
    """Cosines and sines of every position, kept once in the model's dtype; linear scaling makes the
    table longer.
    """
    positions = max(first_int(config, "max_position_embeddings") or 0, shape.max_model_len)
    partial = config.get("partial_rotary_factor")
    dim = first_int(config, "qk_rope_head_dim") or head_geometry(config)[1]
    if isinstance(partial, float) and not is_mla(config):
        dim = int(dim * partial)
    factor = 1.0
    for rope in rope_parameters(config):
        scale = rope.get("factor")
        if rope.get("rope_type", rope.get("type")) == "linear" and isinstance(scale, int | float):
            factor = float(scale) or 1.0
    return int(positions * factor) * dim * shape.dtype_bytes


def _mxfp4_padding(config: Config, tp: int, shape: Shape) -> float:
    """MXFP4 experts are padded for the kernel: hidden size to 256, one GPU's intermediate size to
    128.

    Up to 0.11 only the intermediate size was, to 256.
    """
    hidden, inner = (
        first_int(config, "hidden_size"),
        first_int(config, "intermediate_size", "moe_intermediate_size"),
    )
    if not hidden or not inner:
        return 1.0
    own = -(-inner // tp)
    if shape.accounting.version < (0, 12):
        return -(-own // 256) * 256 / own
    return (-(-hidden // 256) * 256 / hidden) * (-(-own // 128) * 128 / own)
