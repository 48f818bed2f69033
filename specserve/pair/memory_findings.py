"""What a memory plan means: one error at most, then warnings, then facts."""

from __future__ import annotations

from specserve.errors import Problem
from specserve.findings import Finding
from specserve.pair.memory import GpuPlan, Plan
from specserve.units import GIB, gib, size

_TIGHT_BYTES = GIB // 2
_BUSY_BYTES = GIB // 2
_LISTED = 4
_UTILIZATION = "engine.gpu_memory_utilization"


def of_plan(plan: Plan) -> list[Finding]:
    """All findings of a plan."""
    found = _error(plan)
    if plan.fits:
        found += [*_few_requests(plan), *_large_logits(plan), *_tight(plan)]
    if plan.refusal != "other-processes":
        found += _busy(plan)
    return found + [Finding("vram-assumed", "info", "models", note) for note in plan.assumed]


def _error(plan: Plan) -> list[Finding]:
    gpu, shape = plan.tightest, plan.shape
    match plan.refusal:
        case None:
            return []
        case "gpu-count":
            message = f"TP {shape.tp} x PP {shape.pp} needs {shape.gpus} GPUs; there are {plan.gpus_found}"
            return [_refused("hardware", message, f"set models.target_model.tensor_parallel_size to {plan.gpus_found}")]
        case "split":
            message = f"the model cannot be split over {shape.tp} GPUs; TP must divide heads and vocabulary"
            return [_refused("models.target_model.tensor_parallel_size", message, "set it to 1, 2, 4 or 8")]
        case "other-processes":
            return [_occupied(plan)]
        case "headroom":
            outside = (gpu.total_bytes or 0) - (gpu.budget_bytes or 0)
            need = f"the start and the first steps need {size(_late(plan, gpu))}"
            message = f"only {size(outside)} of GPU {gpu.index} stay outside vLLM's budget, where {need}"
            return [_refused(_UTILIZATION, message, f"set {_UTILIZATION} to {_safe_utilization(plan, gpu):.2f}")]
        case "memory":
            table = Problem(_headline(plan, gpu), facts=rows(plan, gpu))
            return [_refused("", str(table), _fix(plan, gpu))]


def _refused(where: str, message: str, fix: str) -> Finding:
    return Finding("does-not-fit", "error", where, message, fix)


def _headline(plan: Plan, gpu: GpuPlan) -> str:
    who = "target and draft do" if plan.method else "the target does"
    if plan.backend == "cpu":
        need = gpu.fixed_bytes + max(gpu.kv_cache_bytes or 0, plan.request_bytes)
        return f"{who} not fit in memory: need {gib(need)}, free {gib(gpu.total_bytes or 0)}"
    need, budget, total = gpu.fixed_bytes + plan.request_bytes, gpu.budget_bytes or 0, gpu.total_bytes or 0
    share = f"{plan.shape.utilization:.2f} of {gib(total)}"
    return f"{who} not fit GPU {gpu.index}: need {gib(need)}, budget {gib(budget)} ({share})"


def rows(plan: Plan, gpu: GpuPlan) -> tuple[tuple[str, ...], ...]:
    """The terms of one GPU as aligned columns."""
    show = gib if plan.backend == "gpu" else size
    lines: list[tuple[str, ...]] = [("target weights", show(gpu.target_weights_bytes), _dtype(plan))]
    if plan.method:
        lines.append(
            (
                "draft weights",
                show(gpu.draft_weights_bytes),
                ", ".join(d for d in (plan.method, plan.draft_format) if d),
            )
        )
    one = f"1 sequence of {plan.max_model_len} tokens, {size(plan.kv_bytes_per_token)} per token"
    lines.append(("KV cache", show(plan.request_bytes), one))
    if plan.backend == "gpu":
        lines.append(_overhead_row(plan, gpu))
    if gpu.other_bytes:
        lines.append(("other processes", gib(gpu.other_bytes), "in use before start"))
    return tuple(lines)


def _overhead_row(plan: Plan, gpu: GpuPlan) -> tuple[str, ...]:
    total = gpu.activation_bytes + gpu.non_torch_bytes + (gpu.cuda_graph_bytes if gpu.graphs_in_budget else 0)
    if plan.confidence == "measured":
        return ("overhead", gib(total), "measured")
    parts = {"activation": gpu.activation_bytes, "graphs": gpu.cuda_graph_bytes, "non-torch": gpu.non_torch_bytes}
    shown = ", ".join(f"{name} {n / GIB:.1f}" for name, n in parts.items() if name != "graphs" or gpu.graphs_in_budget)
    outside = "" if gpu.graphs_in_budget else f"; graphs {gpu.cuda_graph_bytes / GIB:.1f} outside the budget"
    return ("overhead", gib(total), f"estimated ({shown}{outside})")


def _dtype(plan: Plan) -> str:
    shape = plan.shape
    return shape.quantization or shape.weight_format or ("float32" if shape.dtype_bytes == 4 else "16 bits")


def _fix(plan: Plan, gpu: GpuPlan) -> str:
    if plan.backend == "cpu":
        return "set engine.env.VLLM_CPU_KVCACHE_SPACE to another number of GiB, or free memory"
    longest = plan.largest_max_model_len
    if longest >= plan.max_model_len:  # the first engine's draft, outside the budget
        return f"lower {_UTILIZATION}"
    if longest >= 1:
        return f"set engine.max_model_len to {longest} or less, or quantize the target"
    short = gpu.fixed_bytes - (gpu.budget_bytes or 0)
    return (
        f"weights and overhead alone are {gib(max(short, 0))} over: quantize the target, raise "
        "models.target_model.tensor_parallel_size, or use a larger GPU"
    )


def _occupied(plan: Plan) -> Finding:
    gpu = max(plan.gpus, key=lambda g: g.other_bytes)
    total = gpu.total_bytes or 1
    free = total - gpu.other_bytes
    message = (
        f"{_occupancy(gpu)}, {gib(free)} are free; "
        f"vLLM refuses to start with less than {plan.shape.utilization:.2f} of {gib(total)} free"
    )
    fix = f"stop what holds the GPU (nvidia-smi), or set {_UTILIZATION} to {int(free / total * 100) / 100:.2f} or less"
    return Finding("other-processes", "error", _UTILIZATION, message, fix)


def _occupancy(gpu: GpuPlan) -> str:
    held = [f"pid {p.pid} {p.name or '(unknown)'}" + (f" {gib(p.used_bytes)}" if p.used_bytes else "")
            for p in gpu.processes[:_LISTED]]  # fmt: skip
    more = [f"{len(gpu.processes) - _LISTED} more"] if len(gpu.processes) > _LISTED else []
    names = f" ({', '.join([*held, *more])})" if held else ""
    return f"{gib(gpu.other_bytes)} of GPU {gpu.index} are in use by other processes{names}"


def _busy(plan: Plan) -> list[Finding]:
    return [
        Finding(
            "other-processes", "warning", "hardware",
            f"{_occupancy(g)}; more of theirs is less of ours",
            "stop what holds the GPU (nvidia-smi)",
        )
        for g in plan.gpus
        if g.other_bytes > _BUSY_BYTES
    ]  # fmt: skip


def _few_requests(plan: Plan) -> list[Finding]:
    requests, seqs, length = plan.capacity.requests, plan.shape.max_num_seqs, plan.max_model_len
    if requests >= min(seqs, 8):
        return []
    message = f"the KV cache holds {requests:.1f} requests of {length} tokens at once; max_num_seqs is {seqs}"
    if plan.method and plan.without_draft.requests > requests * 1.05:
        message += f" (without the draft {plan.without_draft.requests:.1f})"
    severe = requests < 2
    return [Finding("low-concurrency", "warning" if severe else "info", "engine.max_model_len", message,
                    "lower engine.max_model_len, or set engine.kv_cache_dtype to fp8")]  # fmt: skip


def _large_logits(plan: Plan) -> list[Finding]:
    if plan.late_bytes <= GIB:
        return []
    message = f"a full step of draft tokens needs {gib(plan.late_bytes)} of logits that vLLM's profiling does not see"
    fix = "set speculative_decoding.max_batch_size, or lower engine.max_num_seqs or num_speculative_tokens"
    return [Finding("logits-buffer-large", "warning", "engine.max_num_seqs", message, fix)]


def _late(plan: Plan, gpu: GpuPlan) -> int:
    """What is allocated outside the budget: what the start takes, and logits of draft tokens."""
    return plan.late_bytes + gpu.outside_bytes


def _tight(plan: Plan) -> list[Finding]:
    gpu = plan.tightest
    if plan.backend == "cpu" or gpu.total_bytes is None or gpu.budget_bytes is None:
        return []
    outside = gpu.total_bytes - gpu.other_bytes - gpu.budget_bytes
    if outside - _late(plan, gpu) >= _TIGHT_BYTES and not (plan.method and plan.shape.utilization > 0.92):
        return []
    message = (
        f"{gib(outside)} of GPU {gpu.index} stay outside vLLM's budget, where the start and full steps take "
        f"{gib(_late(plan, gpu))}; running out of memory can come late"
    )
    fix = f"set {_UTILIZATION} to {_safe_utilization(plan, gpu):.2f}"
    return [Finding("memory-tight", "warning", _UTILIZATION, message, fix)]


def _safe_utilization(plan: Plan, gpu: GpuPlan) -> float:
    """The utilization that leaves room for what comes late; with a draft at most 0.92."""
    total = gpu.total_bytes or 1
    possible = int((1 - (_late(plan, gpu) + _TIGHT_BYTES + gpu.other_bytes) / total) * 100) / 100
    return max(0.1, min(possible, 0.92, plan.shape.utilization - 0.01))
