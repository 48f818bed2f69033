"""Where speculation stops paying: an acceptance rate per concurrency, from both arms' step
times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import JsonValue

from specserve.bench import judge
from specserve.bench.judge import BenchCell, BenchVerdict
from specserve.bench.result import Result, Speculation

PROFILE_VERSION = 1


@dataclass(frozen=True)
class StepTimes:
    """What one step costs with and without speculation, at one concurrency."""

    concurrency: int
    baseline_step_seconds: float
    """The baseline's median TPOT: one token a step."""
    speculative_step_seconds: float
    """The speculative TPOT times the tokens of a step."""
    num_speculative_tokens: int
    draft_tokens_per_step: float
    """Tokens drafted per sequence and step; fewer than num_speculative_tokens when not every step
    drafts (ngram)."""

    @property
    def break_even_acceptance(self) -> float:
        """The acceptance rate at which a token costs the same in both arms; above 1 it never pays.

        A step makes 1 + rate x drafted tokens in the speculative step time, so the arms meet where
        1 + rate x drafted = speculative step / baseline step.

        >>> StepTimes(1, 0.010, 0.016, 3, 3.0).break_even_acceptance
        0.2
        """
        longer = self.speculative_step_seconds / self.baseline_step_seconds
        return round((longer - 1) / self.draft_tokens_per_step, 6)


def tokens_per_step(output_tokens: float, spec: Speculation) -> float:
    """Tokens of a sequence per step it took part in: every token that no draft gave cost a step.

    >>> tokens_per_step(100, Speculation(drafts=50, draft_tokens=150, accepted_tokens=50))
    2.0
    """
    return output_tokens / max(output_tokens - spec.accepted_tokens, 1.0)


def step_times(verdict: BenchVerdict) -> list[StepTimes]:
    """One row per concurrency, over all workloads measured at it. Unsound cells do not count."""
    sound = [c for c in verdict.cells if c.verdict != "unsound"]
    rows = []
    for concurrency in sorted({c.concurrency for c in sound}):
        here = [c for c in sound if c.concurrency == concurrency]
        rows += _rows(verdict.result, here)
    return rows


def _rows(result: Result, cells: Sequence[BenchCell]) -> list[StepTimes]:
    """The row of these cells, which share a concurrency; empty where something for it is
    unknown."""
    arm = result.arms[1]
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
    row = StepTimes(
        concurrency=cells[0].concurrency,
        baseline_step_seconds=off,
        speculative_step_seconds=on * tokens_per_step(tokens, spec),
        num_speculative_tokens=configured,
        draft_tokens_per_step=spec.draft_tokens / (tokens - spec.accepted_tokens),
    )
    return [row]


def profile(verdict: BenchVerdict) -> dict[str, JsonValue]:
    """What the sidecar reads to tell the speedup now and the break-even acceptance."""
    return {
        "version": PROFILE_VERSION,
        "engine": verdict.result.engine,
        "created": verdict.result.created,
        "cells": [
            {**asdict(row), "break_even_acceptance": row.break_even_acceptance}
            for row in step_times(verdict)
        ],
    }
