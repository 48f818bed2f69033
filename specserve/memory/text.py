"""The memory plan for a person: the table, the what-if grid, the one line at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from specserve.errors import Problem
from specserve.gpu import names
from specserve.memory.findings import NO_MEMORY, rows, share
from specserve.memory.result import MemoryPlan
from specserve.units import gib


def conclusion(plan: MemoryPlan) -> str:
    """One line: whether it fits, and for how many requests, with the draft and without."""
    if plan.fits is None:
        return unsaid(plan)
    if not plan.fits:
        return "does not fit"
    if plan.max_model_len % 1024 == 0:
        length = f"{plan.max_model_len // 1024}k"
    else:
        length = str(plan.max_model_len)
    here = f"fits; {plan.capacity.requests:.1f} requests of {length} tokens"
    if plan.shape.fits_length:
        here += " (max_model_len: auto)"
    if plan.proposer:
        return f"{here} with {plan.proposer}, {plan.without_draft.requests:.1f} without"
    return here


def unsaid(plan: MemoryPlan) -> str:
    """Why a plan says neither that it fits nor that it does not."""
    if plan.unknown:
        parts = " and ".join(dict.fromkeys(size.part for size in plan.unknown))
        return f"memory: cannot say whether it fits: unknown size of {parts}"
    if plan.gpu_name is None:
        return "memory not checked: no GPU here and none described"
    return f"memory not checked: {names.read(plan.gpu_name).problem or NO_MEMORY}"


def render(plan: MemoryPlan) -> str:
    """The table of the tightest GPU, what it leaves, and the conclusion."""
    gpu = plan.tightest
    table = [*rows(plan, gpu)]
    if gpu.kv_cache_bytes is not None and plan.fits is not None:
        table.append(
            (
                "left for KV cache",
                gib(gpu.kv_cache_bytes),
                f"{plan.capacity.kv_cache_tokens} tokens",
            )
        )
    lines = [_title(plan), *aligned(table), *(f"Assumed: {note}" for note in plan.assumed)]
    return "\n".join([*lines, f"Confidence: {plan.confidence}", conclusion(plan)])


def _title(plan: MemoryPlan) -> str:
    gpu = plan.tightest
    if plan.backend == "cpu":
        return "Memory" + ("" if gpu.total_bytes is None else f", {gib(gpu.total_bytes)} free")
    title = f"GPU {gpu.index}" + (
        f", the tightest of {len(plan.gpus)}" if len(plan.gpus) > 1 else ""
    )
    title += f": {plan.gpu_name}" if plan.gpu_name else ""
    if gpu.budget_bytes is None:
        return title
    return f"{title}, {share(plan, gpu)}"


def aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns under one another."""
    return str(Problem("", facts=tuple(table))).splitlines()[1:]


@dataclass(frozen=True)
class Cell:
    """One what-if."""

    max_model_len: int
    draft: bool
    utilization: float
    fits: bool
    requests: float


def grid(
    replan: Callable[[int, bool, float], MemoryPlan],
    length: int,
    limit: int,
    shares: Collection[float],
    *,
    draft: bool,
) -> list[Cell]:
    """What if: context from a quarter to double, draft on and off, more and less of the GPU.

    ``replan`` plans again with a max_model_len, the draft or not, and a utilization, one of
    ``shares``; ``limit`` is the model's own context.
    """
    lengths = sorted(
        {max(1, length // 4), max(1, length // 2), length, max(length, min(length * 2, limit))}
    )
    cells = []
    for n, on, part in product(lengths, (True, False) if draft else (False,), sorted(shares)):
        made = replan(n, on, part)
        cells.append(Cell(n, on, part, bool(made.fits), made.capacity.requests))
    return cells


def render_grid(cells: Sequence[Cell]) -> str:
    """Requests at once by context and utilization, in the order of :func:`grid`; a dash where it
    does not fit.
    """
    lines = [
        (key, list(row)) for key, row in groupby(cells, key=lambda c: (c.max_model_len, c.draft))
    ]
    shares = [f"{c.utilization:.2f} of the GPU" for c in lines[0][1]]
    head = ("max_model_len", "drafting", *(shares if len(shares) > 1 else ["requests"]))
    body = [
        (str(n), "on" if on else "off", *(f"{c.requests:.1f}" if c.fits else "-" for c in row))
        for (n, on), row in lines
    ]
    return "\n".join(aligned([head, *body]))
