"""Public measurements of speculation (tests/data/speedups.jsonl) beside what the model of ``plan --worth`` says."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.engine.inside.economics import FITTED, Chip, ForwardWork, Speculating, StepCosts
from specserve.gpu.speeds import PCIE, GpuSpeed, speed_of
from specserve.memory import deployment, work
from specserve.memory.deployment import Shape

DATA = Path(__file__).parent / "data"
TELLING = 0.05
"""A measured speedup nearer to 1 than this is neither faster nor slower."""

FORMS = {
    "H100 94GB HBM2e": GpuSpeed("H100 94GB HBM2e", 2400, 989, 1979),
    "H100 80GB PCIe": GpuSpeed("H100 80GB PCIe", 2000, 756, 1513, link_gb_per_second=PCIE),
}
"""Boards that ``hardware.gpu_name`` cannot tell from their faster form; data sheets, 2026-12-01."""


@dataclass(frozen=True)
class SpeedupCase:
    """One measurement, and the model's own."""

    id: str
    source: str
    engine: str
    half: Literal["fit", "held"]
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """Modelled / measured - 1."""
        return self.modelled / self.measured - 1

    @property
    def is_telling(self) -> bool:
        """Whether it was measurably faster or slower."""
        return abs(self.measured - 1) > TELLING

    @property
    def is_right(self) -> bool:
        """Whether the model says faster where it was faster, slower where it was slower."""
        return (self.modelled > 1) == (self.measured > 1)


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "speedups.jsonl").read_text().splitlines()]


def cases(costs: StepCosts = FITTED) -> list[SpeedupCase]:
    """Every measurement, modelled with these constants."""
    return [
        SpeedupCase(
            row["id"],
            row["source"],
            row["engine"],
            row["half"],
            row["speedup"],
            setting(json.dumps(row), costs).speedup(
                row["concurrency"], row["k"], row["context"], row["accepted_length"]
            ),
        )
        for row in read()
    ]


def setting(text: str, costs: StepCosts) -> Speculating:
    """What a row describes."""
    return replace(_setting(text), costs=costs)


@cache
def _setting(text: str) -> Speculating:
    row = json.loads(text)
    settings = Settings.model_validate(
        {
            "models": {
                "target_model": {
                    "path": "t",
                    "tensor_parallel_size": row["gpus"],
                    "quantization": row.get("quantization"),
                }
            },
            "engine": {"max_model_len": 8192},
            "speculative_decoding": {"method": "mtp", "num_speculative_tokens": row["k"]},
        }
    )
    target = _model(row["target"])
    shape = deployment.resolve(
        settings, target, backend="gpu", engine_version="0.32.0", gpu_bytes=80 * 2**30
    )
    found = work.of_target(target, shape)
    assert found is not None
    board = FORMS.get(row["gpu"]) or speed_of(row["gpu"])
    assert board is not None
    chip = Chip(
        board.gb_per_second * 1e9,
        board.flops(work.compute_format(target, shape)),
        board.link_gb_per_second * 1e9,
    )
    parallel = row["draft"] is not None and row["draft"].get("parallel", False)
    draft = _draft(row, target, shape)
    return Speculating(found, chip, draft, row["gpus"], row["gpus"], parallel)


def _draft(row: dict[str, Any], target: ModelFacts, shape: Shape) -> ForwardWork | None:
    draft = row["draft"]
    if draft is None:
        return work.of_draft(target, None, shape)
    each = 2 * draft["parameters"] / row["gpus"]
    cache_bytes = draft["kv_bytes_per_token"] / row["gpus"]
    return ForwardWork(each, each, draft["layers"], kv_bytes_per_token=cache_bytes)


def _model(target: str | dict[str, Any]) -> ModelFacts:
    if isinstance(target, dict):
        return ModelFacts("target", target)
    return ModelFacts(target, _configs()[target])


@cache
def _configs() -> dict[str, dict[str, Any]]:
    lines = (DATA / "model_configs.jsonl").read_text().splitlines()
    return {row["id"]: row["config"] for row in map(json.loads, lines)}


@dataclass(frozen=True)
class Accuracy:
    """How near the model is to some of the cases."""

    cases: int
    right: int
    """Of those that are telling."""
    telling: int
    median: float
    worst: SpeedupCase

    @classmethod
    def of(cls, some: Sequence[SpeedupCase]) -> Accuracy:
        telling = [case for case in some if case.is_telling]
        return cls(
            len(some),
            sum(case.is_right for case in telling),
            len(telling),
            statistics.median(abs(case.error) for case in some),
            max(some, key=lambda case: abs(case.error)),
        )
