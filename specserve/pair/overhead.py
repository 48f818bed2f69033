"""What a GPU holds besides weights and KV cache: activations, CUDA graphs, and what is outside PyTorch.

Each term follows what the engine does; its constants were fitted on the public runs in tests/data/vram_cases.json
and are listed with their errors, leaving one model family out at a time, in docs/vram-accuracy.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from specserve.pair.cache_layers import Config, first_int, is_mla
from specserve.pair.capacities import lookup
from specserve.pair.parameters import expert_count
from specserve.pair.shape import Shape
from specserve.units import GIB, MIB

SAMPLER_BYTES = 12.3
"""Per logit of the profiled sampler since 0.17: three float32 copies and indices, besides the logits themselves."""
WIDE_SAMPLER_BYTES = 36.3
"""Per logit until 0.16: the sampler sorted the whole vocabulary (values, int64 indices, cumulated probabilities)."""
SECOND_RUNNER_SAMPLER_BYTES = 8.3
"""Per logit with Model Runner V2."""
FIXED_ACTIVATION = 87 * MIB
"""Attention metadata, input buffers, cuBLAS scratch."""


@dataclass(frozen=True)
class Overhead:
    """Bytes on the GPU of one stage."""

    activation: int
    """Peak of the profiling run: this comes out of the budget."""
    cuda_graphs: int
    non_torch: int
    unprofiled_logits: int
    """Logits of draft tokens that a full step needs and the profiling run does not show."""


def of_stage(config: Config, shape: Shape, *, gpu_name: str | None, first: bool, last: bool, layers: int,
             towers: bool) -> Overhead:  # fmt: skip
    """Overhead of one pipeline stage with this many layers."""
    return Overhead(
        activation=activation(config, shape, first=first, last=last, towers=towers and first),
        cuda_graphs=cuda_graphs(config, shape, layers), non_torch=non_torch(shape, gpu_name),
        unprofiled_logits=unprofiled_logits(config, shape) if last else 0,
    )  # fmt: skip


def activation(config: Config, shape: Shape, *, first: bool, last: bool, towers: bool) -> int:
    """Peak of the profiling step: the larger of one layer's forward pass and the sampler, plus what outlives both."""
    hidden, tokens, width = (
        first_int(config, "hidden_size", "n_embd", "d_model") or 4096,
        shape.max_num_batched_tokens,
        0,
    )
    width = shape.dtype_bytes
    if shape.accounting.v0:
        return _v0_activation(config, shape, hidden)
    between = 0 if first else 2 * tokens * hidden * width  # hidden states and residual from the stage before
    forward = forward_bytes(config, shape, hidden)
    sampler = sampler_bytes(config, shape) if last else 0
    kept = tokens * hidden * width
    encoder = encoder_bytes(config, shape, hidden) if towers else 0
    return int(
        max(forward, sampler + kept) + moe_workspace(config, shape, hidden) + between + encoder + FIXED_ACTIVATION
    )


def logit_rows(shape: Shape) -> int:
    """Rows of logits in the profiling run: one per sequence."""
    return min(shape.max_num_seqs, shape.max_num_batched_tokens)


def vocabulary(config: Config) -> int:
    """Rows of the LM head, padded to 64 as vLLM does."""
    return -(-(first_int(config, "vocab_size") or 32000) // 64) * 64


def sampler_bytes(config: Config, shape: Shape) -> float:
    """Logits in the model's dtype and the sampler's copies."""
    per_logit = SAMPLER_BYTES
    if shape.accounting.wide_sampler:
        per_logit = WIDE_SAMPLER_BYTES
    elif shape.second_runner:
        per_logit = SECOND_RUNNER_SAMPLER_BYTES
    return logit_rows(shape) * vocabulary(config) * (shape.dtype_bytes + per_logit)


def unprofiled_logits(config: Config, shape: Shape) -> int:
    """Float32 logits of ``max_num_seqs x k`` draft tokens, which no profiling run allocates."""
    rows = min(shape.max_num_seqs * (1 + shape.num_speculative_tokens), shape.max_num_batched_tokens)
    return max(0, rows - logit_rows(shape)) * vocabulary(config) * 4


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
    if not expert_count(config) or not top or shape.quantization == "mxfp4":
        return 0
    inner = (first_int(config, "moe_intermediate_size", "intermediate_size") or hidden) // (
        shape.tp if shape.ep == 1 else 1
    )
    rows = shape.max_num_batched_tokens * top
    return rows * (max(2 * inner, hidden) + max(inner, hidden)) * shape.dtype_bytes


def encoder_bytes(config: Config, shape: Shape, hidden: int) -> int:
    """Multimodal profiling: one batch of encoder outputs in the encoder cache and its copy in the input."""
    return 2 * shape.max_num_batched_tokens * hidden * shape.dtype_bytes


def _v0_activation(config: Config, shape: Shape, hidden: int) -> int:
    """The first engine: a whole prompt at once, and float32 logits of every sequence."""
    inner = first_int(config, "intermediate_size") or 4 * hidden
    forward = shape.max_num_batched_tokens * 3 * (inner // shape.tp + hidden) * shape.dtype_bytes
    return int(max(forward, shape.max_num_seqs * vocabulary(config) * 4 * 3))


def graph_sizes(shape: Shape) -> int:
    """Batch sizes that are captured: 1, 2, 4, every 8th to 256, every 16th to the largest, which is at most 512."""
    largest = min(512, 2 * shape.max_num_seqs * (1 + shape.num_speculative_tokens), shape.max_num_batched_tokens)
    return (
        sum(1 for n in (1, 2, 4) if n <= largest)
        + len(range(8, min(largest + 1, 256), 8))
        + len(range(256, largest + 1, 16))
    )


def cuda_graphs(config: Config, shape: Shape, layers: int) -> int:
    """Graphs of every captured size, piecewise (a piece per layer) and whole."""
    if shape.eager or shape.backend == "cpu":
        return 0
    sizes = graph_sizes(shape) / 51
    per_layer = 34 * MIB if expert_count(config) and not is_mla(config) else 16.5 * MIB
    return int(sizes * (0.39 * GIB + layers * per_layer))


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
