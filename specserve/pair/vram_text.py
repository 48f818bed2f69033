"""The memory plan for a person: findings, the table, the what-if grid, the one line at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specserve.errors import Problem
from specserve.findings import Finding
from specserve.units import GIB, gib, size

if TYPE_CHECKING:
    from specserve.pair.vram import GpuPlan, Plan

_WHERE = "engine"
TIGHT_BYTES = GIB // 2


def findings(plan: Plan) -> list[Finding]:
    """What the plan means: one error at most, then warnings, then facts."""
    found: list[Finding] = []
    if plan.refusal is not None:
        found.append(_error(plan))
    elif plan.fits:
        found += _warnings(plan)
    found += _busy(plan)
    found += [Finding("vram-assumed", "info", "models", text) for text in plan.assumed]
    return found


def _error(plan: Plan) -> Finding:
    gpu = plan.tightest
    if gpu is None or plan.refusal not in {"does not fit", "other processes"}:
        return Finding("does-not-fit", "error", "hardware", f"the deployment {plan.refusal}",
                       "lower models.target_model.tensor_parallel_size, or give it more GPUs")  # fmt: skip
    if plan.refusal == "other processes":
        return _occupied(plan, gpu)
    problem = Problem(_headline(plan, gpu), facts=rows(plan, gpu))
    return Finding("does-not-fit", "error", _WHERE, str(problem), _fix(plan, gpu))


def _headline(plan: Plan, gpu: GpuPlan) -> str:
    need = fixed_bytes(plan, gpu) + plan.request_bytes
    both = "target and draft do" if gpu.draft_weights_bytes or plan.draft else "the target does"
    if plan.backend == "cpu":
        return f"{both} not fit in memory: need {gib(fixed_bytes(plan, gpu) + (gpu.kv_cache_bytes or 0))}, free {gib(gpu.total_bytes or 0)}"
    budget, total = gpu.budget_bytes or 0, gpu.total_bytes or 0
    return (f"{both} not fit GPU {gpu.index}: need {gib(need)}, budget {gib(budget)} "
            f"({plan.shape.utilization:.2f} of {gib(total)})")  # fmt: skip


def fixed_bytes(plan: Plan, gpu: GpuPlan) -> int:
    """What comes out of the budget before the KV cache."""
    return gpu.fixed_bytes + (gpu.cuda_graph_bytes if plan.shape.accounting.subtracts_graphs else 0)


def rows(plan: Plan, gpu: GpuPlan) -> tuple[tuple[str, ...], ...]:
    """The terms as aligned columns."""
    overhead = gpu.activation_bytes + gpu.non_torch_bytes + gpu.cuda_graph_bytes
    parts = f"activation {_number(gpu.activation_bytes)}, graphs {_number(gpu.cuda_graph_bytes)}, non-torch {_number(gpu.non_torch_bytes)}"
    kind = {t.name: t.detail for t in plan.terms}
    lines = [("target weights", gib(gpu.target_weights_bytes), kind.get("target_weights", ""))]
    if plan.draft is not None:
        lines.append(("draft weights", gib(gpu.draft_weights_bytes), plan.draft))
    per_token = size(plan.kv_bytes_per_token)
    lines += [
        ("KV cache", gib(plan.request_bytes), f"1 sequence of {plan.max_model_len} tokens, {per_token} per token"),
        ("overhead", gib(overhead), f"{_origin(plan)} ({parts})"),
    ]
    if gpu.other_bytes > 0:
        lines.append(("other processes", gib(gpu.other_bytes), "in use before start"))
    return tuple(lines)


def _origin(plan: Plan) -> str:
    return "measured" if plan.confidence == "measured" else "estimated"


def _number(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f}"


def _fix(plan: Plan, gpu: GpuPlan) -> str:
    if plan.backend == "cpu":
        return "set engine.env.VLLM_CPU_KVCACHE_SPACE to a smaller number of GiB, or free memory"
    if plan.largest_max_model_len >= 1:
        return f"set engine.max_model_len to {plan.largest_max_model_len} or less, or quantize the target"
    short = fixed_bytes(plan, gpu) - (gpu.budget_bytes or 0)
    return (f"no context fits ({gib(max(short, 0))} over before any KV cache): quantize the target, raise "
            "models.target_model.tensor_parallel_size, or use a larger GPU")  # fmt: skip


def _occupied(plan: Plan, gpu: GpuPlan) -> Finding:
    total = gpu.total_bytes or 1
    free = total - gpu.other_bytes
    possible = int(free / total * 100) / 100
    message = (f"GPU {gpu.index} has {gib(free)} free, {gib(gpu.other_bytes)} are in use by other processes; "
               f"vLLM refuses to start with less free than {plan.shape.utilization:.2f} of {gib(total)}")  # fmt: skip
    return Finding("other-processes", "error", "engine.gpu_memory_utilization", message,
                   f"stop what holds the GPU (nvidia-smi), or set engine.gpu_memory_utilization to {possible:.2f}")  # fmt: skip


def _busy(plan: Plan) -> list[Finding]:
    if plan.backend == "cpu" or plan.refusal == "other processes":
        return []
    return [
        Finding("other-processes", "warning", "hardware",
                f"GPU {g.index} already has {gib(g.other_bytes)} in use by other processes; that memory may not be there later",
                "nvidia-smi")
        for g in plan.gpus if g.other_bytes > GIB // 2
    ]  # fmt: skip


def _warnings(plan: Plan) -> list[Finding]:
    found: list[Finding] = []
    need, seqs = plan.capacity.requests, plan.shape.max_num_seqs
    if need < 2:
        found.append(Finding("low-concurrency", "warning", "engine.max_model_len",
                             f"the KV cache holds {need:.1f} requests of {plan.max_model_len} tokens (max_num_seqs {seqs}); longer queues wait or are preempted",
                             f"lower engine.max_model_len from {plan.max_model_len}"))  # fmt: skip
    elif need < seqs and need < 8:
        found.append(Finding("low-concurrency", "info", "engine.max_num_seqs",
                             f"{need:.1f} requests of {plan.max_model_len} tokens fit at once, fewer than max_num_seqs {seqs}"))  # fmt: skip
    if plan.unprofiled_logits_bytes > GIB:
        found.append(Finding("logits-buffer-large", "warning", "engine.max_num_seqs",
                             f"a full step of draft tokens needs {gib(plan.unprofiled_logits_bytes)} of logits that vLLM's profiling does not see",
                             f"lower engine.max_num_seqs from {seqs}, or speculative_decoding.num_speculative_tokens"))  # fmt: skip
    found += _headroom(plan)
    return found


def _headroom(plan: Plan) -> list[Finding]:
    """Memory outside the budget, which later allocations (graphs before 0.21, draft logits, NCCL) come from."""
    gpu = plan.tightest
    if gpu is None or gpu.total_bytes is None or gpu.budget_bytes is None or plan.backend == "cpu":
        return []
    outside = gpu.total_bytes - gpu.other_bytes - gpu.budget_bytes
    later = plan.unprofiled_logits_bytes + (0 if plan.shape.accounting.subtracts_graphs else gpu.cuda_graph_bytes)
    if outside - later >= TIGHT_BYTES and not (plan.draft and plan.shape.utilization > 0.92):
        return []
    target = max(0.5, int((1 - (later + TIGHT_BYTES) / gpu.total_bytes) * 100) / 100)
    target = min(target, 0.92 if plan.draft else target)
    message = (f"{gib(outside)} stay outside vLLM's budget on GPU {gpu.index}, where {gib(later)} are allocated after the KV "
               "cache is sized; an out-of-memory error can come late")  # fmt: skip
    return [Finding("memory-tight", "warning", "engine.gpu_memory_utilization", message,
                    f"set engine.gpu_memory_utilization to {target:.2f}")]  # fmt: skip


def conclusion(plan: Plan) -> str:
    """One line: whether it fits, and for how many requests, with the draft and without."""
    if plan.fits is None:
        return "no GPU found and no hardware: given; set hardware.gpu_name to see whether it fits"
    if not plan.fits:
        return "does not fit"
    length = f"{plan.max_model_len // 1024}k" if plan.max_model_len % 1024 == 0 else str(plan.max_model_len)
    if plan.draft is None:
        return f"fits; {plan.capacity.requests:.1f} requests of {length} tokens"
    return (f"fits; {plan.capacity.requests:.1f} requests of {length} tokens with the draft, "
            f"{plan.without_draft.requests:.1f} without")  # fmt: skip


def render(plan: Plan) -> str:
    """The table of the tightest GPU, what it leaves, and the conclusion."""
    gpu = plan.tightest
    if gpu is None:
        return conclusion(plan)
    lines = [
        f"GPU {gpu.index}"
        + (f" of {len(plan.gpus)}" if len(plan.gpus) > 1 else "")
        + (f": {plan.gpu_name}" if plan.gpu_name else "")
    ]
    if gpu.budget_bytes is not None:
        lines[0] += f", budget {gib(gpu.budget_bytes)} ({plan.shape.utilization:.2f} of {gib(gpu.total_bytes or 0)})"
    table = [*rows(plan, gpu)]
    if gpu.kv_cache_bytes is not None:
        table.append(("left for KV", gib(gpu.kv_cache_bytes), f"{plan.capacity.kv_cache_tokens} tokens"))
    lines += str(Problem("", facts=tuple(table))).splitlines()[1:]
    lines += [f"Assumed: {text}" for text in plan.assumed]
    lines.append(f"Confidence: {plan.confidence}")
    lines.append(conclusion(plan))
    return "\n".join(lines)


@dataclass(frozen=True)
class Cell:
    """One what-if."""

    max_model_len: int
    draft: bool
    utilization: float
    fits: bool
    requests: float


def grid(replan: Callable[[int, bool, float], Plan], length: int, utilization: float, *, draft: bool) -> list[Cell]:
    """What if: context halved and doubled, draft on and off, more and less of the GPU.

    ``replan`` plans again with a max_model_len, the draft or not, and a utilization.
    """
    lengths = sorted({max(1024, length // 4), max(1024, length // 2), length, length * 2})
    shares = sorted({round(min(0.97, max(0.5, utilization + d)), 2) for d in (-0.1, -0.05, 0.0, 0.05)})
    cells = []
    for n in lengths:
        for on in (True, False) if draft else (False,):
            for share in shares:
                plan = replan(n, on, share)
                cells.append(Cell(n, on, share, bool(plan.fits), plan.capacity.requests))
    return cells


def render_grid(cells: Sequence[Cell]) -> str:
    """Requests at once by context and utilization; a dash where it does not fit."""
    shares = sorted({c.utilization for c in cells})
    head = ("max_model_len", "draft", *(f"util {s:.2f}" for s in shares))
    by = {(c.max_model_len, c.draft, c.utilization): c for c in cells}
    body = [
        (str(n), "on" if on else "off", *(f"{by[n, on, s].requests:.1f}" if by[n, on, s].fits else "-" for s in shares))
        for n, on in sorted({(c.max_model_len, c.draft) for c in cells})
    ]
    return "\n".join(str(Problem("", facts=(head, *body))).splitlines()[1:])
