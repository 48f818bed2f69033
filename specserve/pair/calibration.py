"""Plan against engine: compare what was planned with what the engine reports, and keep what was measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specserve.units import gib

if TYPE_CHECKING:
    from specserve.config.schema import Settings

TOLERANCE = 0.15
"""A larger difference is worth a warning: something was placed otherwise than planned."""


class Report(Protocol):
    """What the engine says about itself (engine.logs.EngineReport)."""

    @property
    def model_loading_bytes(self) -> int | None:
        """Weights of one GPU, target and draft."""

    @property
    def available_kv_bytes(self) -> int | None:
        """The KV cache of one GPU."""

    @property
    def kv_cache_tokens(self) -> int | None:
        """Tokens of the whole pool."""

    @property
    def max_concurrency(self) -> float | None:
        """Requests of max_model_len tokens."""

    @property
    def graph_capture_bytes(self) -> int | None:
        """CUDA graphs of one GPU."""


@dataclass(frozen=True)
class Comparison:
    """One figure, planned and measured."""

    name: str
    planned: float
    measured: float

    @property
    def difference(self) -> float | None:
        """(planned - measured) / measured; None where nothing was measured.

        >>> Comparison("kv_cache_tokens", 115, 100).difference
        0.15
        """
        return (self.planned - self.measured) / self.measured if self.measured else None


@dataclass(frozen=True)
class Reconciliation:
    """Plan and engine side by side."""

    comparisons: tuple[Comparison, ...]

    @property
    def off(self) -> tuple[Comparison, ...]:
        """The figures that differ by more than 15 %."""
        return tuple(c for c in self.comparisons if c.difference is not None and abs(c.difference) > TOLERANCE)

    @property
    def warning(self) -> str | None:
        """One sentence with both numbers of the worst figure; None when all are close."""
        if not self.off:
            return None
        worst = max(self.off, key=lambda c: abs(c.difference or 0))
        return (f"memory plan is off: {worst.name} planned {_text(worst.name, worst.planned)}, the engine reports "
                f"{_text(worst.name, worst.measured)} ({(worst.difference or 0) * 100:+.0f} %)")  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, for /status."""
        return {
            c.name: {"planned": c.planned, "measured": c.measured, "difference_ratio": c.difference}
            for c in self.comparisons
        }


def _text(name: str, value: float) -> str:
    return gib(value) if name.endswith("_bytes") else f"{value:.0f}" if name.endswith("tokens") else f"{value:.2f}"


def reconcile(vram: Mapping[str, Any], report: Report) -> Reconciliation:
    """Compare every figure that both know. ``vram`` is ``Plan.as_dict()``, which preflight's report carries."""
    gpu = _tightest(vram)
    loaded = gpu["target_weights_bytes"] + gpu["draft_weights_bytes"]
    pairs: list[tuple[str, float | None, float | None]] = [
        ("model_loading_bytes", loaded, report.model_loading_bytes),
        ("kv_cache_bytes", gpu["kv_cache_bytes"], report.available_kv_bytes),
        ("kv_cache_tokens", gpu["kv_cache_tokens"], report.kv_cache_tokens),
        ("max_concurrency", vram["max_concurrency"]["requests"] or None, report.max_concurrency),
    ]
    return Reconciliation(tuple(Comparison(n, p, m) for n, p, m in pairs if p is not None and m is not None))


def _tightest(vram: Mapping[str, Any]) -> Mapping[str, Any]:
    """The GPU with the least KV cache, which the engine's log lines follow."""
    gpus: list[Mapping[str, Any]] = vram["gpus"]
    return min(gpus, key=lambda g: g["kv_cache_bytes"] or 0)


@dataclass(frozen=True)
class Calibration:
    """What one start measured, for plans of the same deployment."""

    key: str
    weights_bytes: int
    """Target and draft, on one GPU."""
    overhead_bytes: int
    """Budget - weights - KV cache: activation, non-torch and whatever else the engine took."""
    cuda_graph_bytes: int | None = None


def key(settings: Settings, engine_version: str | None, gpu_name: str | None) -> str:
    """What a measurement holds for: models, layout, batch limits, engine, GPU; not max_model_len or utilization."""
    engine = settings.engine
    parts = [
        settings.models.model_dump(mode="json", exclude={"hub_token", "hub_token_file", "store"}),
        settings.method, settings.speculative_decoding.num_speculative_tokens, engine.max_num_seqs,
        engine.max_num_batched_tokens, engine.enforce_eager, engine.extra_args, engine_version, gpu_name,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def measure(vram: Mapping[str, Any], report: Report, *, key: str) -> Calibration | None:
    """The measured terms; None when the engine did not say enough.

    The CPU backend logs neither weights nor what else it holds, only the tokens: the planned weights are kept.
    """
    gpu = _tightest(vram)
    budget, loaded, pool = gpu["budget_bytes"], report.model_loading_bytes, report.available_kv_bytes
    if vram["backend"] == "cpu":
        planned = gpu["target_weights_bytes"] + gpu["draft_weights_bytes"]
        return None if report.kv_cache_tokens is None else Calibration(key, loaded or planned, 0)
    if budget is None or loaded is None or pool is None:
        return None
    return Calibration(key, loaded, max(0, budget - loaded - pool), report.graph_capture_bytes)


def path_for(config: Path) -> Path:
    """Where the measurement of a config file lies: beside it.

    >>> path_for(Path("configs/qwen3.yaml")).name
    'qwen3.memory.json'
    """
    return config.with_suffix(".memory.json")


def save(calibration: Calibration, config: Path) -> Path:
    """Write the measurement beside the config."""
    path = path_for(config)
    path.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")
    return path


def keep(
    config: Path, settings: Settings, vram: Mapping[str, Any], report: Report, *, engine_version: str | None
) -> Path | None:
    """Measure and save in one step, for ``launch --calibrate``; None when the engine did not say enough."""
    name = key(settings, engine_version, vram["gpu_name"])
    measured = measure(vram, report, key=name)
    return None if measured is None else save(measured, config)


def load(config: Path, *, key: str) -> Calibration | None:
    """The measurement beside the config, when it is of the same deployment."""
    try:
        values = json.loads(path_for(config).read_text(encoding="utf-8"))
        found = Calibration(**values)
    except (OSError, ValueError, TypeError):
        return None
    return found if found.key == key else None
