"""What a memory plan means: one error at most, then warnings, then facts."""

from __future__ import annotations

from specserve.errors import Change, Problem
from specserve.findings import Finding, Severity
from specserve.gpu import names
from specserve.memory.result import GpuPlan, MemoryPlan
from specserve.units import GIB, gib, size

_TIGHT_BYTES = _BUSY_BYTES = GIB // 2
_LISTED = 4
_UTILIZATION = "engine.gpu_memory_utilization"
_TP = "models.target_model.tensor_parallel_size"
NO_MEMORY = "the memory of this GPU is not known"
_UNKNOWN = "unknown"
_STOP = "stop what holds the GPU (nvidia-smi)"


def of_plan(plan: MemoryPlan) -> list[Finding]:
    """All findings of a plan."""
    found = _error(plan, plan.tightest) + (_warnings(plan, plan.tightest) if plan.fits else [])
    if plan.refusal != "other-processes":
        found += [
            Finding(
                "other-processes",
                "warning",
                "hardware",
                f"{_occupancy(g)}; more of theirs is less of ours",
                _STOP,
            )
            for g in plan.gpus
            if g.other_bytes > _BUSY_BYTES
        ]
    if plan.unknown and plan.refusal is None:
        found.append(_unknown(plan))
    if plan.gpus_found is None and plan.refusal is None:
        found.append(_not_checked(plan))
    return found + [Finding("vram-assumed", "info", "models", note) for note in plan.assumed]


def _unknown(plan: MemoryPlan) -> Finding:
    """A size that nobody knows. Where there is hardware, its owner waits for a verdict."""
    severity: Severity = "info"
    if plan.gpus_found is not None:
        severity = "error"
    listed = "; ".join(f"{size.part}: {size.why}" for size in plan.unknown)
    message = f"cannot say whether it fits: the size is not known of {listed}"
    fix = "download the weights (specserve models pull CONFIG), or go on with --skip size-unknown"
    return Finding("size-unknown", severity, "models", message, fix)


def _not_checked(plan: MemoryPlan) -> Finding:
    """Memory is compared with nothing: no GPU, or one of unknown size."""
    where, code = "hardware.gpu_name", "vram-not-checked"
    if plan.gpu_name is None:
        message = "no GPU was found or is described; memory was not checked"
        fix = "set hardware.gpu_name; specserve gpus lists the known names"
        return Finding(code, "info", "hardware", message, fix)
    reading = names.read(plan.gpu_name)
    message = f"{reading.problem or NO_MEMORY}; memory was not checked"
    return Finding(code, "warning", where, message, reading.fix)


def _error(plan: MemoryPlan, gpu: GpuPlan) -> list[Finding]:
    shape, code = plan.shape, "does-not-fit"
    changes: tuple[Change, ...] = ()
    match plan.refusal:
        case None:
            return []
        case "gpu-count":
            where, fix = "hardware", f"give it {shape.gpus} GPU{'s' * (shape.gpus > 1)}"
            if plan.possible_tp is not None:
                changes = (Change(_TP, plan.possible_tp),)
                fix += f", or {changes[0]}"
            message = (
                f"TP {shape.tp} x PP {shape.pp} needs {shape.gpus} GPUs; "
                f"there are {plan.gpus_found}"
            )
        case "split":
            where, changes = _TP, (Change(_TP, plan.possible_tp or 1),)
            fix = str(changes[0])
            message = (
                f"the model cannot be split over {shape.tp} GPUs; TP must "
                "divide heads, MLP and vocabulary"
            )
        case "other-processes":
            code, where, busiest = (
                "other-processes",
                _UTILIZATION,
                max(plan.gpus, key=lambda g: g.other_bytes),
            )
            total = busiest.total_bytes or 1
            free = total - busiest.other_bytes
            message = (
                f"{_occupancy(busiest)}, {gib(free)} are free; vLLM refuses to start with less "
                f"than "
                f"{shape.utilization:.2f} of {gib(total)} free"
            )
            startable = int(free / total * 100) / 100
            # What the start takes outside the budget must be free beside their memory too.
            share_left = min(startable, _safe_utilization(plan, busiest))
            changes = (Change(_UTILIZATION, share_left),)
            fix = f"{_STOP}, or {changes[0]}, or less"
        case "headroom":
            gpu = min(plan.gpus, key=_outside)
            where, changes = _UTILIZATION, (Change(_UTILIZATION, _safe_utilization(plan, gpu)),)
            fix = str(changes[0])
            outside, need = _outside(gpu) / GIB, _late(plan, gpu) / GIB
            message = (
                f"only {outside:.2f} GiB of GPU {gpu.index} stay outside vLLM's budget, where the "
                f"start and the "
                f"first steps need {need:.2f} GiB"
            )
        case _:
            where, message = "", str(Problem(_headline(plan, gpu), facts=rows(plan, gpu)))
            fix, changes = _fix(plan, gpu)
    return [Finding(code, "error", where, message, fix, changes)]


def _headline(plan: MemoryPlan, gpu: GpuPlan) -> str:
    if plan.shape.drafts_with_a_model:
        who = "target and draft do"
    else:
        who = "the target does"
    if plan.backend == "cpu":
        need = gpu.fixed_bytes + max(gpu.kv_cache_bytes or 0, plan.request_bytes)
        return f"{who} not fit in memory: need {gib(need)}, free {gib(gpu.total_bytes or 0)}"
    need, budget = gpu.fixed_bytes + plan.request_bytes, share(plan, gpu)
    return f"{who} not fit GPU {gpu.index}: need {gib(need)}, {budget}"


def share(plan: MemoryPlan, gpu: GpuPlan) -> str:
    """The budget in words."""
    return (
        f"budget {gib(gpu.budget_bytes or 0)} "
        f"({plan.shape.utilization:.2f} of {gib(gpu.total_bytes or 0)})"
    )


def rows(plan: MemoryPlan, gpu: GpuPlan) -> tuple[tuple[str, ...], ...]:
    """The terms of one GPU as aligned columns."""
    if plan.backend == "gpu":
        show = gib
    else:
        show = size
    weights = _UNKNOWN
    if plan.knows("target weights"):
        weights = show(gpu.target_weights_bytes)
    lines = [("target weights", weights, plan.target_format)]
    if plan.shape.drafts_with_a_model:
        draft = ", ".join(d for d in (plan.method, plan.draft_format) if d)
        weights = _UNKNOWN
        if plan.knows("draft weights"):
            weights = show(gpu.draft_weights_bytes)
        lines.append(("draft weights", weights, draft))
    one, request = f"1 sequence of {plan.max_model_len} tokens", _UNKNOWN
    if plan.knows("KV cache"):
        one += f", {size(plan.kv_bytes_per_token)} per token"
        request = show(plan.request_bytes)
    lines.append(("KV cache", request, one))
    if plan.backend == "gpu":
        lines.append(("overhead", gib(gpu.fixed_bytes - gpu.weights_bytes), _overhead(plan, gpu)))
    if gpu.other_bytes:
        lines.append(("other processes", gib(gpu.other_bytes), "in use before start"))
    return tuple(lines)


def _overhead(plan: MemoryPlan, gpu: GpuPlan) -> str:
    if plan.confidence == "measured":
        return "measured"
    graphs = f"graphs {gpu.cuda_graph_bytes / GIB:.1f}"
    if gpu.graphs_in_budget:
        inside, outside = (f"{graphs}, ", "")
    else:
        inside, outside = ("", f"; {graphs} outside the budget")
    activation, other = gpu.activation_bytes / GIB, gpu.non_torch_bytes / GIB
    return f"estimated (activation {activation:.1f}, {inside}non-torch {other:.1f}{outside})"


def _fix(plan: MemoryPlan, gpu: GpuPlan) -> tuple[str, tuple[Change, ...]]:
    if plan.backend == "cpu":
        return "set engine.env.VLLM_CPU_KVCACHE_SPACE to another number of GiB, or free memory", ()
    longest, cheaper, over = (
        plan.largest_max_model_len,
        "",
        gpu.fixed_bytes - (gpu.budget_bytes or 0),
    )
    if plan.confidence != "measured" and gpu.activation_bytes > (
        over if longest < 1 else over + plan.request_bytes
    ):
        cheaper = (
            f"lower engine.max_num_seqs ({plan.shape.max_num_seqs}) and "
            f"engine.max_num_batched_tokens "
            f"({plan.shape.max_num_batched_tokens}), or "
        )
    if longest >= plan.max_model_len:  # the first engine's draft, outside the budget
        return f"lower {_UTILIZATION}", ()
    if longest >= 1:
        change = Change("engine.max_model_len", longest)
        return f"{cheaper}{change}, or less, or quantize the target", (change,)
    over_by = f"weights and overhead alone are {gib(max(over, 0))} over"
    return f"{over_by}: {cheaper}quantize the target, raise {_TP}, or use a larger GPU", ()


def _occupancy(gpu: GpuPlan) -> str:
    held = [
        f"pid {p.pid} {p.name or '(unknown)'}" + (f" {gib(p.used_bytes)}" if p.used_bytes else "")
        for p in gpu.processes[:_LISTED]
    ]
    if len(gpu.processes) > _LISTED:
        more = [f"{len(gpu.processes) - _LISTED} more"]
    else:
        more = []
    if held:
        names = f" ({', '.join([*held, *more])})"
    else:
        names = ""
    return f"{gib(gpu.other_bytes)} of GPU {gpu.index} are in use by other processes{names}"


def _warnings(plan: MemoryPlan, gpu: GpuPlan) -> list[Finding]:
    """Of a plan that fits: few requests at once, large logits, little room outside the budget."""
    found: list[Finding] = []
    requests, seqs, length = plan.capacity.requests, plan.shape.max_num_seqs, plan.max_model_len
    if requests < min(seqs, 8):
        message = (
            f"the KV cache holds {requests:.1f} requests of {length} tokens "
            f"at once; max_num_seqs is {seqs}"
        )
        if plan.method and plan.without_draft.requests > requests * 1.05:
            message += f" (without {plan.proposer} {plan.without_draft.requests:.1f})"
        fix = "lower engine.max_model_len, or set engine.kv_cache_dtype to fp8"
        found.append(
            Finding(
                "low-concurrency",
                "warning" if requests < 2 else "info",
                "engine.max_model_len",
                message,
                fix,
            )
        )
    if plan.late_bytes > GIB:
        late = gib(plan.late_bytes)
        message = (
            f"a full step of draft tokens needs {late} of logits that vLLM's profiling does not see"
        )
        fix = (
            "set speculative_decoding.max_batch_size, or lower engine.max_num_seqs or "
            "num_speculative_tokens"
        )
        found.append(Finding("logits-buffer-large", "warning", "engine.max_num_seqs", message, fix))
    if plan.backend == "gpu" and gpu.total_bytes is not None and gpu.budget_bytes is not None:
        gpu = min(plan.gpus, key=_outside)
        outside, late_bytes = _outside(gpu), _late(plan, gpu)
        if outside - late_bytes < _TIGHT_BYTES or (plan.method and plan.shape.utilization > 0.92):
            message = (
                f"{gib(outside)} of GPU {gpu.index} stay outside vLLM's budget, where the start "
                f"and full steps "
                f"take {gib(late_bytes)}; running out of memory can come late"
            )
            change = Change(_UTILIZATION, _safe_utilization(plan, gpu))
            found.append(
                Finding("memory-tight", "warning", _UTILIZATION, message, str(change), (change,))
            )
    return found


def _outside(gpu: GpuPlan) -> int:
    """What nobody has: neither vLLM's budget nor other processes."""
    return (gpu.total_bytes or 0) - (gpu.budget_bytes or 0) - gpu.other_bytes


def _late(plan: MemoryPlan, gpu: GpuPlan) -> int:
    """What is allocated outside the budget: what the start takes, and logits of draft tokens."""
    return plan.late_bytes + gpu.outside_bytes


def _safe_utilization(plan: MemoryPlan, gpu: GpuPlan) -> float:
    """The utilization that leaves room for what comes late; with a draft at most 0.92."""
    total = gpu.total_bytes or 1
    possible = int((1 - (_late(plan, gpu) + _TIGHT_BYTES + gpu.other_bytes) / total) * 100) / 100
    return max(0.1, min(possible, 0.92, plan.shape.utilization - 0.01))
