"""What a GPU holds besides weights and KV cache: activations, CUDA graphs, and what is outside
PyTorch.

Each term follows what the engine does; its constants were fitted on the public runs in
tests/data/vram_cases.json and are listed with their errors, leaving one model family out at a time,
in docs/vram-accuracy.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from specserve.checkpoint.fields import Config, first_int
from specserve.gpu.names import lookup
from specserve.memory.blocks import expert_count
from specserve.memory.deployment import Shape
from specserve.memory.layers import is_mla
from specserve.units import GIB, MIB

MAX_ITEM_TOKENS = 16384
"""Tokens of the largest image of a tower with dynamic resolution (Qwen-VL's default: 16384 merged
patches).
"""


@dataclass(frozen=True)
class Constants:
    """What was fitted, in bytes per logit or bytes."""

    sampler: float = 12.3
    """Since 0.17, besides the logits themselves: three float32 copies and indices."""
    wide_sampler: float = 36.3
    """Until 0.16: the sampler sorted the whole vocabulary (values, int64 indices, cumulated
    probabilities).
    """
    second_runner_sampler: float = 8.0
    """Model Runner V2: the logits in float32, and one copy."""
    speculative_sampler: float = 31.0
    """First runner since 0.17 when drafts are verified: float32 target logits, a sort for top-p,
    probabilities.
    """
    pinned: float = 2.1
    """Copies of the float32 logits that cannot be had again after profiling, on one GPU: see
    :func:`outside_budget`.
    """
    pinned_tp: float = 0.5
    """The same with TP."""
    fixed_activation: float = 87 * MIB
    """Attention metadata, input buffers, cuBLAS scratch."""


FITTED = Constants()
_LEAST_OUTSIDE = 256 * MIB
"""Of a GPU about which nothing more is known: memory outside the budget without which the first
step runs out.
"""


@dataclass(frozen=True)
class Overhead:
    """Bytes on the GPU of one stage."""

    activation: int
    """Peak of the profiling run: this comes out of the budget."""
    cuda_graphs: int
    non_torch: int
    outside: int
    """What the start needs outside the budget, CUDA graphs included where they are not in it."""
    least_outside: int
    """The part of it that is sure enough to refuse for."""
    unprofiled_logits: int
    """Logits of draft tokens that a full step needs and the profiling run does not show."""


def of_stage(
    config: Config,
    shape: Shape,
    constants: Constants,
    *,
    gpu_name: str | None,
    first: bool,
    last: bool,
    layers: int,
    tower: Config | None,
) -> Overhead:
    """Overhead of one pipeline stage with this many layers.

    ``tower`` is the config of a vision tower.
    """
    peak = activation(config, shape, constants, first=first, last=last, tower=tower)
    graphs = cuda_graphs(config, shape, layers, tower=tower is not None)
    outside = outside_budget(
        config, shape, constants, gpu_name=gpu_name, activation=peak, last=last
    )
    outside += 0 if shape.accounting.subtracts_graphs else graphs
    known = lookup(gpu_name)
    sure = known is not None and known.nvlink and shape.accounting.version >= (0, 17)
    return Overhead(
        activation=peak,
        cuda_graphs=graphs,
        non_torch=non_torch(shape, gpu_name),
        outside=outside,
        least_outside=outside if sure else _LEAST_OUTSIDE + late_collectives(shape, gpu_name),
        unprofiled_logits=unprofiled_logits(config, shape) if last else 0,
    )


def activation(
    config: Config,
    shape: Shape,
    constants: Constants,
    *,
    first: bool,
    last: bool,
    tower: Config | None,
) -> int:
    """Peak of the profiling step: the largest of encoder, one layer's forward pass and sampler, and
    what stays.
    """
    hidden, width, tokens = _hidden(config), shape.dtype_bytes, shape.max_num_batched_tokens
    if shape.accounting.v0:  # a whole prompt at once, and float32 logits of every sequence
        inner = first_int(config, "intermediate_size") or 4 * hidden
        forward = tokens * 3 * (inner // shape.tp + hidden) * width
        return max(forward, shape.max_num_seqs * vocabulary(config) * 4 * 3)
    # hidden states and residual of the stage before
    if first:
        received = 0
    else:
        received = 2 * tokens * hidden * width
    if last:
        sampler = tokens * hidden * width + sampler_bytes(config, shape, constants)
    else:
        sampler = 0
    outputs = encoder = 0
    if tower is not None and first:
        # Images of any size.
        dynamic = bool(tower.get("spatial_merge_size") or tower.get("out_hidden_size"))
        if dynamic:
            items = max(tokens, MAX_ITEM_TOKENS)
        else:
            items = tokens
        outputs, encoder = (
            2 * items * hidden * width,
            encoder_bytes(tower, shape, items) if dynamic else 0,
        )
    peak = max(forward_bytes(config, shape), sampler, encoder)
    return int(
        peak + moe_workspace(config, shape) + received + outputs + constants.fixed_activation
    )


def _hidden(config: Config) -> int:
    return first_int(config, "hidden_size", "n_embd", "d_model") or 4096


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
    """Float32 logits of every sequence's draft tokens, and the draft's own where they are kept: not
    profiled.
    """
    full = min(
        shape.speculating_seqs * (1 + shape.num_speculative_tokens), shape.max_num_batched_tokens
    )
    if shape.keeps_draft_probabilities:
        copies = 2
    else:
        copies = 1
    return max(0, full - logit_rows(shape)) * copies * vocabulary(config) * 4


def outside_budget(
    config: Config,
    shape: Shape,
    constants: Constants,
    *,
    gpu_name: str | None,
    activation: int,
    last: bool,
) -> int:
    """What the start needs outside the budget, besides CUDA graphs.

    vLLM's first snapshot is taken after CUDA and NCCL are up, so their memory is outside. After the
    KV cache is allocated the sampler is warmed up with max_num_seqs rows: 14 bytes a logit (in 16
    bits, float32, probabilities, random numbers; ``_dummy_sampler_run``), where the activations
    were. But PyTorch keeps blocks of the profiling run in which something small still lies: up to
    2.6 x the float32 logits after a first, compiling start, 0.5 x after later ones (47 public runs
    with 0.19 on H100; two of them ran out).
    """
    if shape.backend == "cpu":
        return 0
    known = lookup(gpu_name)
    own = _LEAST_OUTSIDE + late_collectives(shape, gpu_name)
    if known is not None and known.nvlink and shape.accounting.version >= (0, 17):
        if expert_count(config):
            experts = 0.48
        else:
            experts = 0
        own = int(GIB * (1.53 + experts if shape.tp > 1 else 1.45 if shape.pp > 1 else 0.51))
    if not last or shape.accounting.wide_sampler or shape.second_runner:
        return own
    logits = logit_rows(shape) * vocabulary(config) * 4
    if shape.tp == 1:
        pinned = constants.pinned
    else:
        pinned = constants.pinned_tp
    return own + max(0, int(logits * (3.5 + pinned) + 0.27 * GIB) - activation)


def forward_bytes(config: Config, shape: Shape) -> int:
    """One layer on ``max_num_batched_tokens``: gate and up, their product, input, output and
    residual.
    """
    hidden = _hidden(config)
    inner = first_int(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
    if expert_count(config):
        inner = (
            first_int(config, "shared_expert_intermediate_size", "moe_intermediate_size") or hidden
        )
    return shape.max_num_batched_tokens * (3 * (inner // shape.tp) + 2 * hidden) * shape.dtype_bytes


def moe_workspace(config: Config, shape: Shape) -> int:
    """Buffers of the fused expert kernels, which stay: tokens x experts per token x the widest of
    what passes.

    MXFP4 kernels (gpt-oss) bring none.
    """
    top = first_int(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk") or 0
    if not expert_count(config) or shape.weight_format == "mxfp4":
        return 0
    hidden = _hidden(config)
    inner = first_int(config, "moe_intermediate_size", "intermediate_size") or hidden
    inner //= shape.tp if shape.ep == 1 else 1
    rows = shape.max_num_batched_tokens * top
    return rows * (max(2 * inner, hidden) + max(inner, hidden)) * shape.dtype_bytes


def encoder_bytes(tower: Config, shape: Shape, items: int) -> int:
    """One layer of the vision tower on the largest image: patches x (input, residual, output, and
    the MLP twice).
    """
    width = first_int(tower, "hidden_size", "embed_dim") or 1024
    inner = (first_int(tower, "intermediate_size") or 4 * width) // shape.tp
    merged = (first_int(tower, "spatial_merge_size") or 2) ** 2
    return items * merged * (3 * width + 2 * inner) * shape.dtype_bytes


def graph_sizes(config: Config, shape: Shape) -> tuple[int, int]:
    """How many batch sizes are captured in pieces, and how many whole (decode steps only).

    Sizes are 1, 2, 4, every 8th to 256 and every 16th to the largest; the largest is twice a full
    decode step, at most 512 (1024 for gpt-oss: vLLM's model_executor/models/config.py).

    >>> from types import SimpleNamespace
    >>> (graph_sizes({}, SimpleNamespace(max_num_seqs=1024, num_speculative_tokens=0,
    ...  max_num_batched_tokens=8192)))
    (51, 51)
    """
    step = shape.max_num_seqs * (1 + shape.num_speculative_tokens)
    if config.get("model_type") == "gpt_oss":
        most = 1024
    else:
        most = 512
    largest = min(most, 2 * step, shape.max_num_batched_tokens)
    sizes = [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)) if n <= largest]
    return len(sizes), sum(1 for n in sizes if n <= step)


def cuda_graphs(config: Config, shape: Shape, layers: int, *, tower: bool) -> int:
    """Until 0.20 a captured size cost memory for every kernel; since 0.21 about 1 MiB, the least a
    driver takes.
    """
    if shape.eager or shape.backend == "cpu":
        return 0
    sizes = sum(graph_sizes(config, shape))
    if shape.accounting.subtracts_graphs:
        return int(0.05 * GIB + sizes * 1.1 * MIB)
    per_layer = 16.0
    if expert_count(config):
        if is_mla(config):
            per_layer = 48
        elif shape.weight_format == "mxfp4":
            per_layer = 36
        else:
            per_layer = 26
    elif shape.weight_format is not None:
        per_layer += 3.5
    hidden = _hidden(config) / 4096 / shape.tp * (0.19 if tower else 0.38)
    return int(sizes / 102 * (hidden * GIB + layers * per_layer * MIB))


def non_torch(shape: Shape, gpu_name: str | None) -> int:
    """CUDA context growth, NCCL, and on NVLink machines the buffers of vLLM's own all-reduce."""
    version = shape.accounting.version
    if version >= (0, 18):
        alone = 0.25
    else:
        alone = 0.13
    if shape.tp == 1:
        return int((alone if shape.pp == 1 else 0.07) * GIB)
    known = lookup(gpu_name)
    if version < (0, 17):
        return int(0.54 * GIB)
    if known is not None and not known.nvlink:
        return int(0.75 * GIB)
    return int((2.05 + 0.02 * shape.tp) * GIB)


def late_collectives(shape: Shape, gpu_name: str | None) -> int:
    """Channels that NCCL opens towards every other GPU once it runs: seen without NVLink, 1.37 GiB
    at TP 8.
    """
    known = lookup(gpu_name)
    if shape.tp == 1 or known is None or known.nvlink:
        return 0
    return int(0.17 * GIB * shape.tp)
