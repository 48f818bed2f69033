"""Plan against engine: compare what was planned with what the engine reports, and keep what was
measured.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.files import read_small, write_whole
from specserve.memory.result import Calibration, MemoryPlan
from specserve.units import gib

if TYPE_CHECKING:
    from specserve.config.schema import Settings
    from specserve.engine.output.logs import EngineReport

TOLERANCE = 0.15
"""A larger difference is worth a warning: something was placed otherwise than planned."""


@dataclass(frozen=True)
class FigureComparison:
    """One figure, planned and measured (never 0)."""

    name: str
    planned: float
    measured: float

    @property
    def difference(self) -> float:
        """(planned - measured) / measured.

        >>> FigureComparison("kv_cache_tokens", 115, 100).difference
        0.15
        """
        return (self.planned - self.measured) / self.measured


@dataclass(frozen=True)
class Reconciliation:
    """Plan and engine side by side."""

    comparisons: tuple[FigureComparison, ...]

    @property
    def warning(self) -> str | None:
        """One sentence with both numbers of the figure that is off most;
        None when all are within 15 %.
        """
        worst = max(self.comparisons, key=lambda c: abs(c.difference), default=None)
        if worst is None or abs(worst.difference) <= TOLERANCE:
            return None
        if worst.name.endswith("tokens"):
            digits = 0
        else:
            digits = 2
        planned, measured = (
            gib(value) if worst.name.endswith("_bytes") else f"{value:.{digits}f}"
            for value in (worst.planned, worst.measured)
        )
        return (
            f"memory plan is off: {worst.name} planned {planned}, the engine reports "
            f"{measured} ({worst.difference * 100:+.0f} %)"
        )

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, for /status."""
        return {
            c.name: {"planned": c.planned, "measured": c.measured, "difference_ratio": c.difference}
            for c in self.comparisons
        }


def reconcile(plan: MemoryPlan, report: EngineReport) -> Reconciliation:
    """Compare every figure that both know; the engine's log lines are of the tightest GPU."""
    gpu, requests = plan.tightest, round(plan.capacity.requests, 2)
    pairs: list[tuple[str, float | None, float | None]] = [
        ("model_loading_bytes", gpu.weights_bytes, report.model_loading_bytes),
        ("kv_cache_bytes", gpu.kv_cache_bytes, report.available_kv_bytes),
        ("kv_cache_tokens", gpu.kv_cache_tokens, report.kv_cache_tokens),
        ("max_concurrency", requests or None, report.max_concurrency),
    ]
    return Reconciliation(
        tuple(FigureComparison(n, p, m) for n, p, m in pairs if p is not None and m)
    )


def key(settings: Settings, engine_version: str | None, gpu_name: str | None) -> str:
    """What a measurement holds for: models, layout, batch limits, engine, GPU; not max_model_len or
    utilization.
    """
    engine = settings.engine
    parts = [
        settings.models.model_dump(mode="json", exclude={"hub_token", "hub_token_file", "store"}),
        settings.method,
        settings.num_speculative_tokens,
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        engine.enforce_eager,
        engine.flags.values,
        engine_version,
        gpu_name,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def measure(
    plan: MemoryPlan, report: EngineReport, *, key: str, engine: str | None = None
) -> Calibration | None:
    """The measured terms; None when the engine did not say enough.

    The CPU backend logs neither weights nor what else it holds, only the tokens: the planned
    weights are kept.
    """
    gpu, loaded, pool = plan.tightest, report.model_loading_bytes, report.available_kv_bytes
    if plan.backend == "cpu":
        if report.kv_cache_tokens is None:
            return None
        return Calibration(key, loaded or gpu.weights_bytes, 0, None, engine)
    budget = gpu.budget_bytes
    if budget is None or loaded is None or pool is None:
        return None
    return Calibration(
        key, loaded, max(0, budget - loaded - pool), report.graph_capture_bytes, engine
    )


def path_for(config: Path) -> Path:
    """Where the measurement of a config file lies: beside it.

    >>> path_for(Path("configs/qwen3.yaml")).name
    'qwen3.memory.json'
    """
    return config.with_suffix(".memory.json")


def save(calibration: Calibration, config: Path) -> Path:
    """Write the measurement beside the config."""
    path = path_for(config)
    write_whole(path, json.dumps(asdict(calibration), indent=2) + "\n")
    return path


def load(config: Path, *, key: str) -> Calibration | None:
    """The measurement beside the config, when it is of the same deployment."""
    try:
        found = Calibration(**json.loads(read_small(path_for(config))))
    except (OSError, ValueError, TypeError):
        return None
    numbers = (found.weights_bytes, found.overhead_bytes, found.cuda_graph_bytes or 0)
    if found.key == key and all(isinstance(n, int) for n in numbers):
        return found
    return None
