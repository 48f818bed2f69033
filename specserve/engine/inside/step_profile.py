"""The profile of a deployment: step times and acceptance as they were measured. Written by
``specserve bench``, read by the sidecar, by ``plan --worth`` and inside vLLM.

Version history of the file (a new optional field is no new version):
1  cells of both step times by concurrency
2  step time by batch size and verified tokens, acceptance by position, and of what it was measured
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specserve.engine.inside import economics
from specserve.engine.inside.economics import Curve

VERSION = 2
_Json = Mapping[str, "_Value"]
_Value = str | float | bool | None | Sequence["_Value"] | Mapping[str, "_Value"]


class BadProfile(ValueError):
    """Raised for a file that is no profile; the text names the place and what must be there."""


@dataclass(frozen=True)
class StepTime:
    """One step of the engine at one batch size."""

    batch: float
    """Sequences of the step."""
    num_speculative_tokens: int
    """As the engine was started; 0 for an engine without speculation."""
    verified_tokens: float
    """Positions verified per sequence and step: 1 + drafted. Below num_speculative_tokens + 1 where
    not every step drafts (ngram)."""
    seconds: float

    @property
    def drafted(self) -> float:
        """Tokens drafted per sequence and step.

        >>> StepTime(4, 5, 3.0, 0.013).drafted
        2.0
        """
        return self.verified_tokens - 1


@dataclass(frozen=True)
class Acceptance:
    """What a workload accepted."""

    workload: str
    by_position: tuple[float, ...]
    """Accepted at position i / drafts, unconditional, from 0."""


@dataclass(frozen=True)
class MeasuredCost:
    """Both step times at one batch size."""

    off_seconds: float
    on_seconds: float
    drafted: float

    @property
    def cost(self) -> float:
        """Speculative step time / step time without speculation."""
        return self.on_seconds / self.off_seconds

    @property
    def break_even(self) -> float | None:
        """The acceptance rate at which a token costs the same; None where none pays.

        >>> round(MeasuredCost(0.010, 0.016, 3.0).break_even, 6)
        0.2
        """
        return economics.break_even_rate(self.cost, self.drafted)


@dataclass(frozen=True)
class StepProfile:
    """What was measured of one deployment."""

    steps: tuple[StepTime, ...]
    acceptance: tuple[Acceptance, ...] = ()
    method: str | None = None
    num_speculative_tokens: int | None = None
    engine: str | None = None
    """Distribution and version."""
    gpus: tuple[str, ...] = ()
    processor: str | None = None
    created: str | None = None

    @property
    def cells(self) -> tuple[tuple[float, MeasuredCost], ...]:
        """Batch sizes at which both step times were measured, rising, with the step times. Where
        several k were, the largest counts."""
        found = []
        for batch in sorted({step.batch for step in self.steps}):
            here = [step for step in self.steps if step.batch == batch]
            off = [s for s in here if s.num_speculative_tokens == 0]
            on = [s for s in here if s.drafted > 0]
            if off and on:
                most = max(on, key=lambda s: s.num_speculative_tokens)
                found.append((batch, MeasuredCost(off[0].seconds, most.seconds, most.drafted)))
        return tuple(found)

    def at(self, batch: float) -> tuple[float, float] | None:
        """(cost, tokens drafted per step) at a batch size, linear between the measured ones; below
        the smallest its values hold, beyond the largest nothing is known.

        >>> off, on = StepTime(4, 0, 1, 0.010), StepTime(4, 5, 6, 0.012)
        >>> StepProfile((off, on)).at(4), StepProfile((off, on)).at(5)
        ((1.2, 5), None)
        """
        cells = self.cells
        cost = Curve(tuple((batch, worth.cost) for batch, worth in cells)).at(batch)
        drafted = Curve(tuple((batch, worth.drafted) for batch, worth in cells)).at(batch)
        if cost is None or drafted is None:
            return None
        return cost, drafted

    def off_seconds_at(self, batch: float) -> float | None:
        """Seconds of a step without speculation at a batch size: there, the time per output token.

        >>> off, on = StepTime(4, 0, 1, 0.010), StepTime(4, 5, 6, 0.012)
        >>> StepProfile((off, on)).off_seconds_at(4), StepProfile((off, on)).off_seconds_at(5)
        (0.01, None)
        """
        return Curve(tuple((size, worth.off_seconds) for size, worth in self.cells)).at(batch)

    def as_dict(self) -> dict[str, _Value]:
        """The file, version 2."""
        return {
            "version": VERSION,
            "engine": self.engine,
            "created": self.created,
            "gpus": list(self.gpus),
            "processor": self.processor,
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
            "steps": [dict(vars(step)) for step in self.steps],
            "acceptance": [
                {"workload": a.workload, "by_position": list(a.by_position)}
                for a in self.acceptance
            ],
        }


def parse(text: str) -> StepProfile:
    """A profile of version 1 or 2. Raises BadProfile.

    >>> cell = '"concurrency": 4, "baseline_step_seconds": 0.01, "speculative_step_seconds": 0.012'
    >>> parse('{"version": 1, "cells": [{%s, "num_speculative_tokens": 5}]}' % cell).at(4)
    (1.2, 5.0)
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadProfile(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadProfile("not a benchmark profile: it must be an object")
    match found.get("version"):
        case 1:
            return StepProfile(_of_cells(found), engine=_text(found, "engine"))
        case 2:
            return _of_steps(found)
        case other:
            raise BadProfile(f"not a benchmark profile: version: is {other!r:.20}; must be 1 or 2")


def _of_cells(found: _Json) -> tuple[StepTime, ...]:
    """Version 1."""
    steps = []
    for place, cell in _objects(found, "cells"):
        batch = _number(cell, place, "concurrency")
        k = _whole(cell, place, "num_speculative_tokens", least=1)
        drafted = float(k)
        if cell.get("draft_tokens_per_step") is not None:
            drafted = _number(cell, place, "draft_tokens_per_step")
        off = _number(cell, place, "baseline_step_seconds")
        on = _number(cell, place, "speculative_step_seconds")
        steps += [StepTime(batch, 0, 1.0, off), StepTime(batch, k, 1 + drafted, on)]
    if not steps:
        raise BadProfile("not a benchmark profile: cells: holds none; at least one must be there")
    return tuple(steps)


def _of_steps(found: _Json) -> StepProfile:
    """Version 2."""
    steps = tuple(
        StepTime(
            batch=_number(step, place, "batch"),
            num_speculative_tokens=_whole(step, place, "num_speculative_tokens", least=0),
            verified_tokens=_number(step, place, "verified_tokens"),
            seconds=_number(step, place, "seconds"),
        )
        for place, step in _objects(found, "steps")
    )
    if not steps:
        raise BadProfile("not a benchmark profile: steps: holds none; at least one must be there")
    acceptance = []
    if "acceptance" in found:
        for place, row in _objects(found, "acceptance"):
            rates = row.get("by_position")
            if not isinstance(rates, list) or not all(_is_share(rate) for rate in rates):
                must = f"{place}.by_position: must be numbers from 0 to 1"
                raise BadProfile(f"not a benchmark profile: {must}")
            acceptance.append(Acceptance(_text(row, "workload") or "", tuple(rates)))
    gpus = found.get("gpus")
    names: tuple[str, ...] = ()
    if isinstance(gpus, list):
        names = tuple(str(name) for name in gpus)
    k = None
    if found.get("num_speculative_tokens") is not None:
        k = _whole(found, "", "num_speculative_tokens", least=1)
    return StepProfile(
        steps,
        tuple(acceptance),
        method=_text(found, "method"),
        num_speculative_tokens=k,
        engine=_text(found, "engine"),
        gpus=names,
        processor=_text(found, "processor"),
        created=_text(found, "created"),
    )


def _objects(found: _Json, name: str) -> list[tuple[str, _Json]]:
    """The objects of a list, each with its place."""
    rows = found.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadProfile(f"not a benchmark profile: {name}: must be a list of objects")
    return [(f"{name}.{index}", row) for index, row in enumerate(rows)]


def _number(row: _Json, place: str, name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadProfile(f"not a benchmark profile: {place}.{name}: must be a number")
    if not 0 < value < math.inf:
        raise BadProfile(f"not a benchmark profile: {place}.{name}: must be above 0 and finite")
    return float(value)


def _whole(row: _Json, place: str, name: str, *, least: int) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        where = f"{place}.{name}".lstrip(".")
        raise BadProfile(f"not a benchmark profile: {where}: must be a whole number from {least}")
    return value


def _is_share(value: _Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _text(row: _Json, name: str) -> str | None:
    value = row.get(name)
    if isinstance(value, str):
        return value
    return None
