"""Every term of the memory plan with its formula and its source, for people who check the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve.memory.deployment import Shape
from specserve.memory.overhead import logit_rows
from specserve.memory.result import Calibration, Term

if TYPE_CHECKING:
    from specserve.memory.result import Stage

_FITTED = "fitted on public runs, see docs/vram-accuracy.md"
_OUTSIDE = "first context, collectives, sampler's warm-up beyond the activations, graphs until 0.20"


def of_stage(
    stage: Stage,
    shape: Shape,
    sources: tuple[str, str],
    other: int,
    calibration: Calibration | None,
) -> tuple[Term, ...]:
    """The terms of the fullest stage, in the order of the sum.

    ``sources``: of the target's weights and the draft's.
    """
    cache, extra, length, rows = stage.cache, stage.overhead, shape.max_model_len, logit_rows(shape)
    place = f"TP {shape.tp}" + (f", the fullest of {shape.pp} stages" if shape.pp > 1 else "")
    blocks = " + ".join(
        f"{g.blocks(length, shape)} ({g.layer.kind}, {g.layers} layers)" for g in cache.groups
    )
    terms = [
        Term(
            "target_weights",
            stage.target,
            f"tensors as loaded, {place}, rounded as PyTorch allocates",
            sources[0],
        ),
        Term("draft_weights", stage.draft, f"tensors as loaded, TP {shape.draft_tp}", sources[1]),
        Term(
            "kv_cache_per_request",
            cache.request_bytes(length),
            f"{cache.block_bytes} bytes x blocks: {blocks or 0}",
            "vLLM v1/core/kv_cache_utils.py",
        ),
    ]
    if calibration is not None:
        terms.append(
            Term("overhead", calibration.overhead_bytes, "budget - weights - KV cache", "measured")
        )
    elif shape.backend == "gpu":
        peak = (
            f"max(forward of {shape.max_num_batched_tokens} tokens, sampler "
            f"of {rows} rows) + kept buffers"
        )
        if shape.accounting.subtracts_graphs:
            graphs = "fixed + 1.1 MiB a size"
        else:
            graphs = "captured sizes x (hidden + layers)"
        drafted = f"{shape.speculating_seqs} sequences x {1 + shape.num_speculative_tokens}"
        late = (
            f"(min({drafted}, {shape.max_num_batched_tokens} tokens) - {rows} "
            "profiled rows) x vocabulary x 4"
        )
        terms += [
            Term("activation", extra.activation, peak, _FITTED),
            Term("cuda_graphs", extra.cuda_graphs, graphs, _FITTED),
            Term(
                "non_torch",
                extra.non_torch,
                f"CUDA context and collectives at TP {shape.tp}",
                _FITTED,
            ),
            Term("outside_budget", extra.outside, _OUTSIDE, _FITTED),
            Term(
                "unprofiled_logits",
                extra.unprofiled_logits,
                late,
                "vLLM v1/worker/gpu_model_runner.py",
            ),
        ]
    if other:
        terms.append(Term("other_processes", other, "in use before start", "NVML"))
    return tuple(terms)
