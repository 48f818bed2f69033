"""The public runs of tests/data/vram_cases.json, planned again from the metadata they describe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.config.schema import Settings
from specserve.gpu import Device
from specserve.pair import vram
from specserve.pair.capacities import cuda_bytes
from specserve.pair.facts import ModelFacts
from specserve.units import GIB

DATA = Path(__file__).parent / "data" / "vram_cases.json"


def load() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Models by name, and the runs."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return data["models"], data["cases"]


def settings(case: dict[str, Any]) -> Settings:
    """The run as a config file of ours would say it."""
    extra: dict[str, Any] = {}
    if (caching := case.get("prefix_caching")) is not None:
        extra["enable-prefix-caching" if caching else "no-enable-prefix-caching"] = True
    if "async_scheduling" in case:
        extra["no-async-scheduling"] = True
    if "decode_context_parallel_size" in case:
        extra["decode-context-parallel-size"] = case["decode_context_parallel_size"]
    body: dict[str, Any] = {
        "models": {
            "target_model": {
                "path": case["model"],
                "dtype": case.get("dtype", "auto"),
                "quantization": case.get("online_quantization"),
                "tensor_parallel_size": case["tensor_parallel_size"],
                "pipeline_parallel_size": case["pipeline_parallel_size"],
            }
        },
        "engine": {
            "gpu_memory_utilization": case.get("gpu_memory_utilization", 0.9),
            "kv_cache_dtype": case.get("kv_cache_dtype", "auto"),
            "enforce_eager": case.get("enforce_eager", False),
            "extra_args": extra,
            "env": case.get("env", {}),
        },
        "hardware": {k: case[k] for k in ("gpu_name", "gpu_memory_gib") if k in case and "gpu_names" not in case},
    }
    for key in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if key in case:
            body["engine"][key] = case[key]
    if "draft" in case:
        body["models"]["draft_model"] = {"path": case["draft"]}
    if "method" in case:
        body["speculative_decoding"] = {"method": case["method"]}
        if "num_speculative_tokens" in case:
            body["speculative_decoding"]["num_speculative_tokens"] = case["num_speculative_tokens"]
    else:
        body["speculative_decoding"] = {"enabled": False}
    return Settings.model_validate(body)


def plan(case: dict[str, Any], models: dict[str, Any]) -> vram.Plan:
    """Plan a run from config.json alone."""
    target = ModelFacts(case["model"], models[case["model"]]["config"])
    draft = ModelFacts(case["draft"], models[case["draft"]]["config"]) if "draft" in case else None
    return vram.plan(settings(case), target, draft, devices=_mixed(case), engine_version=case.get("version"))


def _mixed(case: dict[str, Any]) -> tuple[Device, ...] | None:
    """GPUs of a run that mixes two models of GPU; None where the config says it all."""
    names = case.get("gpu_names")
    if names is None:
        return None
    return tuple(Device(i, f"uuid-{i}", n, cuda_bytes(n, None) or 0, 0) for i, n in enumerate(names))


@dataclass(frozen=True)
class Error:
    """One figure of one run: planned against printed."""

    case: str
    family: str
    planned: float
    printed: float

    @property
    def relative(self) -> float:
        """|planned - printed| / printed."""
        return abs(self.planned - self.printed) / abs(self.printed)


def weights_gib(made: vram.Plan) -> float:
    """Weights of the last stage, which is the one that logs print."""
    gpu = made.gpus[-1]
    return (gpu.target_weights_bytes + gpu.draft_weights_bytes) / GIB
