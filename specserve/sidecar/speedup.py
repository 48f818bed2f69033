"""What speculation is worth now: acceptance from the live engine, step times from a benchmark
profile.

A step with speculation takes longer (drafting, and verifying k+1 positions instead of one) and
brings more tokens. It pays while tokens per step exceed the ratio of the step times:

    speedup    = tokens per step x baseline step time / speculative step time
    break-even = (speculative step time / baseline step time - 1) / tokens drafted per step

Without a profile nothing is said: the ratio of step times depends on model, GPU and batch size.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specserve.errors import ConfigError
from specserve.files import read_small
from specserve.metric_families import MetricKey, Readings, key

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ProfileCell(BaseModel):
    """Step times at one number of running requests."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    concurrency: Annotated[float, Field(gt=0)]
    baseline_step_seconds: _Seconds
    speculative_step_seconds: _Seconds
    num_speculative_tokens: Annotated[int, Field(ge=1)]
    draft_tokens_per_step: Annotated[float, Field(gt=0)] | None = None
    """Below num_speculative_tokens when not every step drafts; None when every step does."""

    @property
    def drafted(self) -> float:
        """Tokens drafted per sequence and step."""
        return self.draft_tokens_per_step or self.num_speculative_tokens

    @property
    def cost(self) -> float:
        """Speculative step time / baseline step time."""
        return self.speculative_step_seconds / self.baseline_step_seconds


class Profile(BaseModel):
    """A benchmark profile: ``{"version": 1, "cells": [{"concurrency": 1, ...}, ...]}``."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    version: Annotated[int, Field(ge=1, le=1)]
    cells: Annotated[tuple[ProfileCell, ...], Field(min_length=1)]

    def at(self, running: float) -> tuple[float, float] | None:
        """(ratio of step times, tokens drafted per step) at a batch size, linear between cells.

        Below the smallest measured batch its values hold; beyond the largest nothing is known.
        """
        cells = sorted(self.cells, key=lambda c: c.concurrency)
        if running > cells[-1].concurrency:
            return None
        if running <= cells[0].concurrency:
            return cells[0].cost, cells[0].drafted
        right = bisect_left(cells, running, key=lambda cell: cell.concurrency)
        low, high = cells[right - 1], cells[right]
        part = (running - low.concurrency) / (high.concurrency - low.concurrency)
        return (
            low.cost + part * (high.cost - low.cost),
            low.drafted + part * (high.drafted - low.drafted),
        )


def load(path: Path) -> Profile:
    """Read a profile. Raises ConfigError naming what is wrong with it."""
    try:
        return Profile.model_validate(json.loads(read_small(path)))
    except OSError as error:
        raise ConfigError(
            f"cannot read the benchmark profile: {error.strerror}", where=str(path)
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"not a benchmark profile: {place}: {first['msg']}", where=str(path)
        ) from error
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", where=str(path)) from error


def readings(
    profile: Profile | None, known: Readings, windows: Sequence[str]
) -> dict[MetricKey, float]:
    """Speedup and break-even at the current batch size; empty without a profile, traffic or
    drafts."""
    running = known.get(key("specserve_requests_running"))
    if profile is None or not running:
        return {}
    found = profile.at(running)
    if found is None:
        return {}
    cost, drafted = found
    break_even = (cost - 1) / drafted
    out = {key("specserve_break_even_acceptance_rate"): break_even}
    for window in windows:
        per_step = known.get(key("specserve_tokens_per_step", window=window))
        rate = known.get(key("specserve_acceptance_rate", window=window))
        if per_step is not None and rate is not None:
            out[key("specserve_estimated_speedup_ratio", window=window)] = per_step / cost
            out[key("specserve_break_even_margin", window=window)] = rate - break_even
    return out
