"""Where one tensor of a checkpoint goes: which pipeline stage, which fused parameter, which part of
it on one GPU.

Names are those of the Hub's safetensors files. vLLM fuses q, k and v into one parameter, gate and
up into another, all experts of a layer into two; parallel layers as in
model_executor/layers/linear.py (read in 0.32, 2026-11-29).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from specserve.checkpoint.fields import Config, first_int, layer_count
from specserve.memory.layers import head_geometry, is_mla

Part = Literal["embedding", "head", "layer", "other", "tower", "mtp"]
_LAYER = re.compile(r"\.?(?:layers|h|blocks|block)\.(\d+)\.")
_MTP = re.compile(r"(^|\.)mtp[._]")
_TOWER = re.compile(
    r"(^|\.)(vision|visual|vit|image|audio|speech|multi_modal|multimodal|mm_|patch_|embed_vision|"
    r"embed_audio|"
    r"sound|aligner|code2wav|talker|token2wav)",
    re.IGNORECASE,
)
_EMBEDDING = re.compile(
    r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings)\.weight$"
)
_HEAD = re.compile(
    r"(^|\.)(lm_head|output|embed_out|output_layer)\.(weight|bias|qweight|qzeros|scales|"
    r"weight_scale\w*)$"
)
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?(\w+)")
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "wq": "qkv",
    "wk": "qkv",
    "wv": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "w1": "gate_up",
    "w3": "gate_up",
    "in_proj_qkv": "in_proj",
    "in_proj_z": "in_proj",
}
_COLUMN = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "qkv",
    "Wqkv",
    "query_key_value",
    "c_attn",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "w1",
    "w3",
    "fc1",
    "c_fc",
    "dense_h_to_4h",
    "q_b_proj",
    "kv_b_proj",
    "in_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_qkvz",
    "in_proj_b",
    "in_proj_a",
    "in_proj_ba",
    "conv1d",
    "A_log",
    "dt_bias",
    "D",
    "sinks",
    "wq",
    "wq_b",
    "wo_a",
    "g_proj",
)
_ROW = (
    "o_proj",
    "down_proj",
    "out_proj",
    "w2",
    "fc2",
    "dense",
    "dense_4h_to_h",
    "c_proj",
    "wo",
    "wo_b",
)


@dataclass(frozen=True)
class Place:
    """Where a tensor goes."""

    part: Part
    layer: int | None
    parameter: str
    """The fused parameter that it becomes part of, unique within the model."""
    share: Fraction
    """The part of it that one GPU of its stage holds."""
    linear: bool = False
    """A matrix of a linear layer: what online quantization shrinks."""
    expert: bool = False


@dataclass(frozen=True)
class Split:
    """How many GPUs share what."""

    tp: int
    ep: int
    """1: experts are split by TP."""
    layers: int
    """num_hidden_layers: layers from here on are MTP modules."""
    kv_heads: int
    experts: int
    replicate_tower: bool = False

    @classmethod
    def of(cls, config: Config, *, tp: int, ep: int, replicate_tower: bool = False) -> Split:
        """From the language model's config."""
        return cls(
            tp,
            ep,
            layer_count(config) or 0,
            0 if is_mla(config) else head_geometry(config)[0],
            first_int(config, "num_experts", "n_routed_experts", "num_local_experts") or 1,
            replicate_tower,
        )


def place(name: str, shape: tuple[int, ...], split: Split) -> Place:
    """The place of one tensor.

    >>> split = Split(tp=4, ep=1, layers=32, kv_heads=2, experts=1)
    >>> p = place("model.layers.3.self_attn.k_proj.weight", (256, 4096), split)
    >>> p.parameter, str(p.share)  # 2 KV heads on 4 GPUs: each holds one
    ('layers.3.self_attn.qkv.weight', '1/2')
    """
    found, is_mtp = _LAYER.search(name), _MTP.search(name) is not None
    if is_mtp and found is None:  # mtp.fc is column-parallel (vLLM's qwen3_next_mtp.py, 2026-11-30)
        return Place(
            "mtp",
            None,
            name,
            Fraction(1, split.tp) if ".fc." in name else _share(name, shape, split),
        )
    if not is_mtp and _TOWER.search(name):
        return Place(
            "tower",
            None,
            name,
            Fraction(1) if split.replicate_tower else _share(name, shape, split),
        )
    if found is None:  # what belongs to no layer
        part: Part = (
            "head" if _HEAD.search(name) else "embedding" if _EMBEDDING.search(name) else "other"
        )
        return Place(
            part, None, name, Fraction(1) if part == "other" else _vocabulary_share(shape, split.tp)
        )
    layer = int(found.group(1))
    if is_mtp or (split.layers and layer >= split.layers):
        part = "mtp"
    else:
        part = "layer"
    parameter, share, linear, expert = _in_layer(name[found.end() :], shape, split)
    return Place(part, layer, f"layers.{layer}.{parameter}", share, linear, expert)


@lru_cache(maxsize=8192)
def _in_layer(rest: str, shape: tuple[int, ...], split: Split) -> tuple[str, Fraction, bool, bool]:
    """Parameter, share, linear, expert of a tensor inside a layer; the same in every layer, hence
    the cache.
    """
    attribute = rest.rsplit(".", 1)[-1]
    if expert := _EXPERT.search("." + rest):
        if split.ep > 1:
            share = Fraction(-(-split.experts // split.ep), split.experts)
        else:
            share = Fraction(1, split.tp)
        if expert.group(2).startswith(("down", "w2")):
            stacked = "w2"
        else:
            stacked = "w13"
        match = re.fullmatch(r"(?:gate_up_proj|down_proj|gate_proj|up_proj)_?(\w*)", attribute)
        # a stacked tensor is its own parameter
        if match:
            own = match.group(1) or "weight"
        else:
            own = attribute
        return f"experts.{stacked}.{own}", share, True, True
    module, leaf = _module(rest)
    linear = len(shape) == 2 and not re.search(r"norm|router|(^|\.)gate$|conv", module + leaf)
    fused = ".".join(p for p in (module, _FUSED.get(leaf, leaf), attribute) if p)
    return fused, _share(rest, shape, split), linear, False


def _vocabulary_share(shape: tuple[int, ...], tp: int) -> Fraction:
    """Rows of one GPU: the vocabulary is padded to a multiple of 64, and that to a multiple of TP.

    >>> str(_vocabulary_share((49155, 4096), 1))
    '49216/49155'
    """
    if shape:
        rows = shape[0]
    else:
        rows = 0
    padded = -(-rows // 64) * 64
    if rows:
        return Fraction(-(-padded // tp), rows)
    return Fraction(1)


def _share(name: str, shape: tuple[int, ...], split: Split) -> Fraction:
    """1 for what every GPU repeats: norms, routers, latents, biases of row-parallel layers."""
    if split.tp == 1:
        return Fraction(1)
    if ".indexer." in name:
        return Fraction(1)
    _, leaf = _module(name)
    attribute = name.rsplit(".", 1)[-1]
    if leaf in {"embed_tokens", "lm_head", "head"}:  # an MTP module's own copies
        return _vocabulary_share(shape, split.tp)
    if leaf in {"k_proj", "v_proj", "wk", "wv"} and split.kv_heads:
        return Fraction(max(1, split.kv_heads // split.tp), split.kv_heads)
    row = leaf in _ROW and attribute != "bias" and len(shape) > 1
    if row or leaf in _COLUMN or attribute in _COLUMN:
        return Fraction(1, split.tp)
    return Fraction(1)


def _module(rest: str) -> tuple[str, str]:
    """The path before the last module, and that module: 'mlp.gate_proj.weight' -> ('mlp',
    'gate_proj').
    """
    parts = rest.split(".")
    return ".".join(parts[:-2]), parts[-2] if len(parts) > 1 else ""


def stages(layers: int, pp: int, given: tuple[int, ...] | None = None) -> list[int]:
    """Layers of each pipeline stage: what is left over goes to the last but one, and on towards the
    front.

    ``given`` is VLLM_PP_LAYER_PARTITION.

    >>> stages(32, 4), stages(30, 4), stages(61, 2)
    ([8, 8, 8, 8], [7, 8, 8, 7], [31, 30])
    """
    if given is not None and len(given) == pp and sum(given) == layers:
        return list(given)
    counts = [layers // pp] * pp
    rest = layers - sum(counts)
    for i in range(2, rest + 2):
        counts[-i] += 1
    return counts


def stage_of(layer: int, counts: list[int]) -> int:
    """The stage that holds a layer."""
    return min(bisect_right(list(accumulate(counts)), layer), len(counts) - 1)
