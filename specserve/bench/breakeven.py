"""Where speculation stops paying: an acceptance rate per concurrency, from both arms' step
times."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.bench import judge
from specserve.bench.judge import BenchCell, BenchVerdict
from specserve.bench.result import Result
from specserve.engine.inside import economics
from specserve.engine.inside.step_profile import Acceptance, StepProfile, StepTime


def profile(verdict: BenchVerdict) -> StepProfile:
    """Step times of both arms by concurrency, over all workloads measured at it, and what each
    workload accepted. Unsound cells do not count.

    The baseline's step is its median TPOT, one token a step; the speculative step is the TPOT times
    the tokens of a step.
    """
    result = verdict.result
    sound = [c for c in verdict.cells if c.verdict != "unsound"]
    steps: list[StepTime] = []
    for concurrency in sorted({c.concurrency for c in sound}):
        steps += _steps(result, [c for c in sound if c.concurrency == concurrency])
    arm = result.arms[-1].config
    method = arm.get("speculative_decoding.method")
    k = arm.get("speculative_decoding.num_speculative_tokens")
    if not isinstance(k, int):
        k = max((step.num_speculative_tokens for step in steps), default=None)
    if not isinstance(method, str):
        method = None
    return StepProfile(
        tuple(steps),
        tuple(_acceptance(result, sound)),
        method=method,
        num_speculative_tokens=k,
        engine=result.engine,
        gpus=tuple(result.machine.gpus),
        processor=result.machine.processor,
        created=result.created,
    )


def _steps(result: Result, cells: Sequence[BenchCell]) -> list[StepTime]:
    """The two rows of these cells, which share a concurrency; none where something for them is
    unknown."""
    arm = result.arms[-1]
    keys = {(c.workload, c.concurrency) for c in cells}
    blocks = [b for b in result.blocks if b.arm == arm.name and (b.workload, b.concurrency) in keys]
    spec = judge.total(blocks)
    tokens = sum(s.output_tokens or 0 for b in blocks for s in b.samples if s.ok)
    tpots = [(c.baseline.tpot, c.speculative.tpot) for c in cells]
    known = [(off.p50, on.p50) for off, on in tpots if off and on]
    if not known or not spec.draft_tokens or tokens <= spec.accepted_tokens:
        return []
    configured = arm.config.get("speculative_decoding.num_speculative_tokens")
    if not isinstance(configured, int):
        configured = max(1, round(spec.draft_tokens / spec.drafts))
    off, on = (sum(medians) / len(known) for medians in zip(*known, strict=True))
    batch = float(cells[0].concurrency)
    drafted = spec.draft_tokens / (tokens - spec.accepted_tokens)
    on *= economics.tokens_per_step(tokens, spec.accepted_tokens)
    return [StepTime(batch, 0, 1.0, off), StepTime(batch, configured, 1 + drafted, on)]


def _acceptance(result: Result, cells: Sequence[BenchCell]) -> list[Acceptance]:
    """By workload, over its loads."""
    arm, rows = result.arms[-1].name, []
    for workload in dict.fromkeys(c.workload for c in cells):
        blocks = [b for b in result.blocks if b.arm == arm and b.workload == workload]
        by_position = judge.total(blocks).acceptance_per_position
        if by_position:
            rows.append(Acceptance(workload, tuple(by_position)))
    return rows
