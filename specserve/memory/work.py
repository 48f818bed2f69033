"""Bytes and operations of one forward pass on one GPU, from a checkpoint's tensors or its
config.json: what a step's time is reckoned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.fields import Config, first_int, is_tied, layer_count
from specserve.checkpoint.quantization import quant_method, quantization_section, unquantized
from specserve.checkpoint.safetensors import TensorFacts
from specserve.engine.inside.economics import ForwardWork
from specserve.gpu.speeds import Format
from specserve.memory import layers as cache_layers
from specserve.memory import parameters
from specserve.memory.blocks import expert_count
from specserve.memory.deployment import Shape
from specserve.memory.placement import Split, place
from specserve.memory.weights import loaded_bytes

_TOP = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "top_k")


@dataclass(frozen=True)
class _Sum:
    """Bytes of a model's parts on one GPU."""

    layers: float = 0.0
    experts: float = 0.0
    head: float = 0.0
    embedding: float = 0.0
    mtp: float = 0.0
    mtp_experts: float = 0.0


def of_target(facts: ModelFacts, shape: Shape) -> ForwardWork | None:
    """The target's pass; None where neither headers nor config.json say what it holds."""
    parts, plain = _both(facts, shape, shape.tp)
    if parts is None or plain is None:
        return None
    model = cache_layers.of_target(facts.text_config, shape)
    work = _work(facts.text_config, parts.layers, parts.experts, parts.head, plain)
    cache = sum(layer.token_bytes for layer in model.layers if layer.kind == "full")
    states = sum(layer.state_bytes for layer in model.layers)
    layers = layer_count(facts.text_config) or 0
    work = replace(work, layers=layers, kv_bytes_per_token=cache, state_bytes=states)
    return work.exchanging(hidden_size(facts))


def of_draft(target: ModelFacts, draft: ModelFacts | None, shape: Shape) -> ForwardWork | None:
    """The proposer's pass: a draft model, a head, or the target's own MTP module. A head without an
    output matrix uses the target's. None where its size is not known.
    """
    if draft is None or (shape.method == "mtp" and draft is not None):
        return _of_mtp(draft or target, shape)
    tp = shape.draft_tp or shape.tp
    parts, plain = _both(draft, shape, tp)
    if parts is None or plain is None:
        return None
    if not parts.head:
        mine, mine_plain = _both(target, shape, shape.tp)
        if mine is not None and mine_plain is not None:
            parts = replace(parts, head=mine.head)
            plain = replace(plain, head=mine_plain.head)
    work = _work(draft.text_config, parts.layers, parts.experts, parts.head, plain)
    model = cache_layers.of_draft(shape.method, target.text_config, draft.text_config, shape)
    cache = sum(layer.token_bytes for layer in model.layers if layer.kind == "full")
    layers = layer_count(draft.text_config) or 1
    return replace(work, layers=layers, kv_bytes_per_token=cache).exchanging(hidden_size(draft))


def hidden_size(facts: ModelFacts) -> int:
    """Values of one token between layers; 0 where config.json does not say."""
    return first_int(facts.text_config, "hidden_size", "n_embd", "d_model") or 0


def _of_mtp(holder: ModelFacts, shape: Shape) -> ForwardWork | None:
    parts, plain = _both(holder, shape, shape.tp)
    if parts is None or plain is None or not parts.mtp + parts.mtp_experts:
        return None
    own = replace(plain, layers=plain.mtp, experts=plain.mtp_experts)
    work = _work(holder.text_config, parts.mtp, parts.mtp_experts, parts.head, own)
    return replace(work, layers=1)


def _work(config: Config, layers: float, experts: float, head: float, plain: _Sum) -> ForwardWork:
    """``plain``: the same parts in 16 bits, from which the operations are counted."""
    count = expert_count(config)
    top = first_int(config, *_TOP) or 0
    active = plain.layers + plain.head
    if count and top:
        active += plain.experts * top / count
    else:
        # Whose choice is not known: all of them.
        layers, experts, count, top = layers + experts, 0.0, 0, 0
        active += plain.experts
    return ForwardWork(
        shared_bytes=layers + head,
        flops_per_token=active,
        layers=1,
        expert_bytes=experts,
        experts=count,
        experts_per_token=top,
    )


def _both(facts: ModelFacts, shape: Shape, tp: int) -> tuple[_Sum | None, _Sum | None]:
    """The parts as they are loaded, and as they would be in 16 bits: 2 bytes a weight, so that
    bytes are operations per token.
    """
    plain = replace(facts, config=unquantized(facts.config))
    counted = parameters.of_config(plain.config, plain.text_config)
    stored = facts.tensors or parameters.of_config(facts.config, facts.text_config)
    if not stored:
        return None, None
    ratio = 1.0
    if not facts.tensors and facts.total_size_bytes:
        ratio = facts.total_size_bytes / sum(t.nbytes for t in stored.values())
    loaded = _sum(stored, facts, shape, tp, ratio=ratio)
    if not counted or (facts.tensors and quantization_section(facts.config) is None):
        counted = dict(stored)
    return loaded, _sum(counted, facts, replace(shape, dtype_bytes=2, quantization=None), tp)


def _sum(
    tensors: Mapping[str, TensorFacts],
    facts: ModelFacts,
    shape: Shape,
    tp: int,
    *,
    ratio: float = 1.0,
) -> _Sum:
    config = facts.text_config
    split = Split.of(config, tp=tp, ep=1)
    online = None
    if shape.weight_format is None:
        online = shape.quantization
    sums = dict.fromkeys(("layers", "experts", "head", "embedding", "mtp", "mtp_experts"), 0.0)
    for name, tensor in tensors.items():
        where = place(name, tensor.shape, split)
        nbytes = loaded_bytes(name, tensor, where, shape.dtype_bytes, online)
        nbytes *= float(where.share) * ratio
        match where.part:
            case "embedding":
                sums["embedding"] += nbytes
            case "head":
                sums["head"] += nbytes
            case "mtp" if where.expert:
                sums["mtp_experts"] += nbytes
            case "mtp":
                sums["mtp"] += nbytes
            case "layer" if where.expert:
                sums["experts"] += nbytes
            case "layer" | "other":
                sums["layers"] += nbytes
            case _:  # a tower is no part of decoding
                pass
    if is_tied(config, facts.config):
        sums["head"] = sums["embedding"]
    return _Sum(**sums)


def compute_format(facts: ModelFacts, shape: Shape) -> Format:
    """What a model's matrices are multiplied in: a scheme that packs integers is unpacked to 16
    bits, FP8 and FP4 stay where the GPU can.
    """
    method = shape.quantization or quant_method(facts.config) or ""
    section = str(quantization_section(facts.config) or "").lower()
    if "nvfp4" in method or "nvfp4" in section:
        return "fp4"
    if method in {"fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt"} or "fp8" in method:
        return "fp8"
    if method == "compressed-tensors" and "'type': 'float', 'num_bits': 8" in section:
        return "fp8"
    return "16 bits"
