"""Every term of the memory plan with its formula and its source, for people who check the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specserve.pair.kv_cache import CachePlan
from specserve.pair.overhead import Overhead, logit_rows
from specserve.pair.shape import Shape

if TYPE_CHECKING:
    from specserve.pair.calibration import Calibration
    from specserve.pair.vram import GpuPlan, Term

_FITTED = "fitted on public runs, see docs/vram-accuracy.md"


def of_stage(target: int, draft: int, extra: Overhead, cache: CachePlan, shape: Shape, weights: str,
             draft_weights: str, gpus: Sequence[GpuPlan], calibration: Calibration | None) -> tuple[Term, ...]:  # fmt: skip
    """The terms of the fullest stage, in the order of the sum."""
    from specserve.pair.vram import Term

    split = f"sharded over TP {shape.tp}" + (f", stage of PP {shape.pp}" if shape.pp > 1 else "")
    request = cache.request_bytes(shape.max_model_len)
    groups = " + ".join(
        f"{g.blocks(shape.max_model_len, shape)} ({g.layer.kind}, {g.layers} layers)" for g in cache.groups
    )
    terms = [
        Term("target_weights", target, f"tensors as loaded, {split}, allocator rounding", weights, _kind(shape)),
        Term("draft_weights", draft, f"tensors as loaded, TP {shape.draft_tp}", draft_weights, shape.method or ""),
        Term("kv_cache_per_request", request, f"{cache.block_bytes} bytes x blocks {groups or 0}",
             "vLLM v1/core/kv_cache_utils.py", f"1 sequence of {shape.max_model_len} tokens"),
        Term("activation", extra.activation,
             f"max(forward of {shape.max_num_batched_tokens} tokens, sampler of {logit_rows(shape)} rows) + kept buffers",
             _FITTED),
        Term("cuda_graphs", extra.cuda_graphs, "captured sizes x (fixed + per layer)", _FITTED),
        Term("non_torch", extra.non_torch, f"CUDA context and collectives at TP {shape.tp}", _FITTED),
        Term("unprofiled_logits", extra.unprofiled_logits,
             f"min(max_num_seqs x (1 + {shape.num_speculative_tokens}), max_num_batched_tokens) - profiled rows, x vocabulary x 4",
             "vLLM v1/worker/gpu_model_runner.py (_dummy_sampler_run)"),
    ]  # fmt: skip
    if calibration is not None:
        terms = [t for t in terms if t.name not in {"activation", "non_torch"}]
        terms.append(Term("overhead", calibration.overhead_bytes, "budget - weights - KV cache", "measured"))
    used = max((g.other_bytes for g in gpus), default=0)
    if used:
        terms.append(Term("other_processes", used, "in use before start", "NVML"))
    return tuple(terms)


def _kind(shape: Shape) -> str:
    return {4: "float32"}.get(shape.dtype_bytes, "16-bit") if not shape.quantization else shape.quantization
