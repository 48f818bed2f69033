"""What a GPU holds besides weights and KV cache: activations, CUDA graphs, and what is outside PyTorch.

Each term follows what the engine does; its constants were fitted on the public runs in tests/data/vram_cases.json
and are listed with their errors, leaving one model family out at a time, in docs/vram-accuracy.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from specserve.pair.cache_layers import is_mla
from specserve.pair.capacities import lookup
from specserve.pair.fields import Config, first_int
from specserve.pair.parameters import expert_count
from specserve.pair.shape import Shape
from specserve.units import GIB, MIB

MAX_ITEM_TOKENS = 16384
"""Tokens of the largest image of a tower with dynamic resolution (Qwen-VL's default: 16384 merged patches)."""


@dataclass(frozen=True)
class Constants:
    """What was fitted, in bytes per logit or bytes."""

    sampler: float = 12.3
    """Since 0.17, besides the logits themselves: three float32 copies and indices."""
    wide_sampler: float = 36.3
    """Until 0.16: the sampler sorted the whole vocabulary (values, int64 indices, cumulated probabilities)."""
    second_runner_sampler: float = 8.0
    """Model Runner V2: the logits in float32, and one copy."""
    speculative_sampler: float = 31.0
    """First runner since 0.17 when drafts are verified: float32 target logits, a sort for top-p, probabilities."""
    sampler_warm_up: float = 26.2
    """First runner since 0.17, after the KV cache is sized: float32 logits, sorted values, int64 indices,
    probabilities, cumulated probabilities."""
    fixed_activation: float = 87 * MIB
    """Attention metadata, input buffers, cuBLAS scratch."""


FITTED = Constants()


@dataclass(frozen=True)
class Overhead:
    """Bytes on the GPU of one stage."""

    activation: int
    """Peak of the profiling run: this comes out of the budget."""
    cuda_graphs: int
    non_torch: int
    collectives: int
    """What NCCL still takes after the KV cache is sized: outside the budget."""
    unprofiled_logits: int
    """Logits of draft tokens that a full step needs and the profiling run does not show."""
    warm_up: int
    """What the sampler's warm-up needs where activations were, and beyond them outside the budget."""


def of_stage(config: Config, shape: Shape, constants: Constants, *, gpu_name: str | None, first: bool, last: bool,
             layers: int, tower: Config | None) -> Overhead:  # fmt: skip
    """Overhead of one pipeline stage with this many layers. ``tower`` is the config of a vision tower."""
    return Overhead(
        activation=activation(config, shape, constants, first=first, last=last, tower=tower),
        cuda_graphs=cuda_graphs(config, shape, layers), non_torch=non_torch(shape, gpu_name),
        collectives=late_collectives(shape, gpu_name),
        unprofiled_logits=unprofiled_logits(config, shape) if last else 0,
        warm_up=warm_up(config, shape, constants) if last else 0,
    )  # fmt: skip


def activation(
    config: Config, shape: Shape, constants: Constants, *, first: bool, last: bool, tower: Config | None
) -> int:
    """Peak of the profiling step: the largest of encoder, one layer's forward pass and sampler, and what stays."""
    hidden, width = first_int(config, "hidden_size", "n_embd", "d_model") or 4096, shape.dtype_bytes
    if shape.accounting.v0:
        return _v0_activation(config, shape, hidden)
    tokens = shape.max_num_batched_tokens
    received = 0 if first else 2 * tokens * hidden * width  # hidden states and residual of the stage before
    sampler = tokens * hidden * width + sampler_bytes(config, shape, constants) if last else 0
    outputs = encoder = 0
    if tower is not None and first:
        items = max(tokens, MAX_ITEM_TOKENS if _dynamic_resolution(tower) else 0)
        outputs, encoder = 2 * items * hidden * width, encoder_bytes(tower, shape, items)
    peak = max(forward_bytes(config, shape, hidden), sampler, encoder)
    return int(peak + moe_workspace(config, shape, hidden) + received + outputs + constants.fixed_activation)


def logit_rows(shape: Shape) -> int:
    """Rows of logits in the profiling run: one per sequence."""
    return min(shape.max_num_seqs, shape.max_num_batched_tokens)


def vocabulary(config: Config) -> int:
    """Rows of the LM head, padded to 64 as vLLM does."""
    return -(-(first_int(config, "vocab_size") or 32000) // 64) * 64


def sampler_bytes(config: Config, shape: Shape, constants: Constants) -> float:
    """Logits in the model's dtype and the sampler's copies."""
    per_logit = constants.sampler
    if shape.accounting.wide_sampler:
        per_logit = constants.wide_sampler
    elif shape.second_runner:
        per_logit = constants.second_runner_sampler
    elif shape.method is not None:
        per_logit = constants.speculative_sampler
    return logit_rows(shape) * vocabulary(config) * (shape.dtype_bytes + per_logit)


def unprofiled_logits(config: Config, shape: Shape) -> int:
    """Float32 logits of every sequence's draft tokens, and the draft's own where they are kept: not profiled."""
    full = min(shape.speculating_seqs * (1 + shape.num_speculative_tokens), shape.max_num_batched_tokens)
    copies = 2 if shape.keeps_draft_probabilities else 1
    return max(0, full - logit_rows(shape)) * copies * vocabulary(config) * 4


def warm_up(config: Config, shape: Shape, constants: Constants) -> int:
    """The sampler's warm-up with a full batch, which the profiling run does not show, and NCCL's first use.

    Read off runs of one series that ran out in it (6.5 and 6.9 times the float32 logits were left) or did not (6.7
    and more). The graphs are not known well enough to tell those apart, so it warns and refuses nobody.
    """
    if shape.backend == "cpu" or shape.accounting.wide_sampler or shape.second_runner:
        return 0
    collectives = 0.4 * GIB if shape.tp > 1 else 0
    return int(logit_rows(shape) * vocabulary(config) * constants.sampler_warm_up + collectives)


def forward_bytes(config: Config, shape: Shape, hidden: int) -> int:
    """One layer on ``max_num_batched_tokens``: gate and up, their product, input, output and residual."""
    inner = first_int(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
    if expert_count(config):
        inner = first_int(config, "shared_expert_intermediate_size", "moe_intermediate_size") or hidden
    wide = 3 * (inner // shape.tp) + 2 * hidden
    return shape.max_num_batched_tokens * wide * shape.dtype_bytes


def moe_workspace(config: Config, shape: Shape, hidden: int) -> int:
    """Buffers of the fused expert kernels, which stay: tokens x experts per token x the widest of what passes.

    MXFP4 kernels (gpt-oss) bring none.
    """
    top = first_int(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk") or 0
    if not expert_count(config) or not top or shape.weight_format == "mxfp4":
        return 0
    inner = (first_int(config, "moe_intermediate_size", "intermediate_size") or hidden) // (
        shape.tp if shape.ep == 1 else 1
    )
    rows = shape.max_num_batched_tokens * top
    return rows * (max(2 * inner, hidden) + max(inner, hidden)) * shape.dtype_bytes


def _dynamic_resolution(tower: Config) -> bool:
    """Towers that take images of any size (they merge patches) are profiled with the largest one."""
    return bool(tower.get("spatial_merge_size") or tower.get("out_hidden_size"))


def encoder_bytes(tower: Config, shape: Shape, items: int) -> int:
    """One layer of the vision tower on the largest image: patches x (input, residual, output, and the MLP twice)."""
    if not _dynamic_resolution(tower):
        return 0
    width = first_int(tower, "hidden_size", "embed_dim") or 1024
    inner = (first_int(tower, "intermediate_size") or 4 * width) // shape.tp
    merged = (first_int(tower, "spatial_merge_size") or 2) ** 2
    return items * merged * (3 * width + 2 * inner) * shape.dtype_bytes


def _v0_activation(config: Config, shape: Shape, hidden: int) -> int:
    """The first engine: a whole prompt at once, and float32 logits of every sequence."""
    inner = first_int(config, "intermediate_size") or 4 * hidden
    forward = shape.max_num_batched_tokens * 3 * (inner // shape.tp + hidden) * shape.dtype_bytes
    return int(max(forward, shape.max_num_seqs * vocabulary(config) * 4 * 3))


def graph_sizes(shape: Shape) -> tuple[int, int]:
    """How many batch sizes are captured in pieces, and how many whole (decode steps only).

    Sizes are 1, 2, 4, every 8th to 256 and every 16th to the largest; the largest is twice a full decode step, at
    most 512.

    >>> from types import SimpleNamespace
    >>> graph_sizes(SimpleNamespace(max_num_seqs=1024, num_speculative_tokens=0, max_num_batched_tokens=8192))
    (51, 51)
    """
    step = shape.max_num_seqs * (1 + shape.num_speculative_tokens)
    largest = min(512, 2 * step, shape.max_num_batched_tokens)
    sizes = [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if n <= largest]
    return len(sizes), sum(1 for n in sizes if n <= step)


def cuda_graphs(config: Config, shape: Shape, layers: int) -> int:
    """Until 0.20 a captured size cost memory for every layer; since 0.21 about 1 MiB, the least a driver takes."""
    if shape.eager or shape.backend == "cpu":
        return 0
    pieces, whole = graph_sizes(shape)
    if shape.accounting.subtracts_graphs:
        return int(0.05 * GIB + (pieces + whole) * 1.1 * MIB)
    per_layer = 34 * MIB if expert_count(config) and not is_mla(config) else 16.5 * MIB
    return int((pieces + whole) / 102 * (0.39 * GIB + layers * per_layer))


def non_torch(shape: Shape, gpu_name: str | None) -> int:
    """CUDA context growth, NCCL, and on NVLink machines the buffers of vLLM's own all-reduce."""
    version = shape.accounting.version
    alone = 0.25 if version >= (0, 18) else 0.13
    if shape.tp == 1:
        return int((alone if shape.pp == 1 else 0.07) * GIB)
    known = lookup(gpu_name)
    if version < (0, 17):
        return int(0.54 * GIB)
    if known is not None and not known.nvlink:
        return int(0.75 * GIB)
    return int((2.05 + 0.02 * shape.tp) * GIB)


def late_collectives(shape: Shape, gpu_name: str | None) -> int:
    """Channels that NCCL opens towards every other GPU once it runs: seen without NVLink, 1.37 GiB at TP 8."""
    known = lookup(gpu_name)
    if shape.tp == 1 or known is None or known.nvlink:
        return 0
    return int(0.17 * GIB * shape.tp)
