"""Where speculation stops paying: from both arms' step times to an acceptance rate, per concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specserve.bench import judge
from specserve.bench.judge import Cell
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
    """Tokens drafted per sequence and step; below num_speculative_tokens when not every step drafts (ngram)."""

    @property
    def break_even_acceptance(self) -> float:
        """The acceptance rate at which a token costs the same in both arms; above 1 it never pays.

        A step makes 1 + rate x drafted tokens and takes the speculative step time, so the arms meet where
        1 + rate x drafted = speculative step / baseline step.

        >>> StepTimes(1, 0.010, 0.016, 3, 3.0).break_even_acceptance
        0.2
        """
        return round(
            (self.speculative_step_seconds / self.baseline_step_seconds - 1)
            / self.draft_tokens_per_step,
            6,
        )


def tokens_per_step(output_tokens: float, spec: Speculation) -> float:
    """Tokens of a sequence per step it took part in: every token that no draft gave cost a step.

    >>> tokens_per_step(100, Speculation(drafts=50, draft_tokens=150, accepted_tokens=50))
    2.0
    """
    return output_tokens / max(output_tokens - spec.accepted_tokens, 1.0)


def step_times(result: Result) -> list[StepTimes]:
    """One row per concurrency, over all workloads measured at it. Cells that are unsound do not count."""
    sound = [c for c in judge.cells(result) if c.verdict != "unsound"]
    rows = [
        _row(result, [c for c in sound if c.concurrency == n])
        for n in sorted({c.concurrency for c in sound})
    ]
    return [r for r in rows if r is not None]


def _row(result: Result, cells: Sequence[Cell]) -> StepTimes | None:
    arm = result.arms[1].name
    keys = {(c.workload, c.concurrency) for c in cells}
    blocks = [b for b in result.blocks if b.arm == arm and (b.workload, b.concurrency) in keys]
    spec = judge.total(blocks)
    tokens = sum(s.output_tokens or 0 for b in blocks for s in b.samples if s.ok)
    weights = [(c, c.baseline.tpot, c.speculative.tpot) for c in cells]
    known = [(b.p50, s.p50) for _, b, s in weights if b and s]
    if spec is None or not known or tokens <= spec.accepted_tokens or not spec.draft_tokens:
        return None
    per_step = tokens_per_step(tokens, spec)
    return StepTimes(
        concurrency=cells[0].concurrency,
        baseline_step_seconds=sum(b for b, _ in known) / len(known),
        speculative_step_seconds=sum(s for _, s in known) / len(known) * per_step,
        num_speculative_tokens=_num_speculative_tokens(result, spec),
        draft_tokens_per_step=spec.draft_tokens / (tokens - spec.accepted_tokens),
    )


def _num_speculative_tokens(result: Result, spec: Speculation) -> int:
    configured = result.arms[1].config.get("speculative_decoding.num_speculative_tokens")
    return int(configured) if configured else max(1, round(spec.draft_tokens / spec.drafts))


def profile(result: Result) -> dict[str, Any]:
    """What the sidecar reads to tell the speedup now and the break-even acceptance."""
    rows = step_times(result)
    return {
        "version": PROFILE_VERSION,
        "engine": result.engine,
        "created": result.created,
        "cells": [{**asdict(r), "break_even_acceptance": r.break_even_acceptance} for r in rows],
    }
