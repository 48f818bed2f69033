"""The public runs of tests/data/vram_cases.json, planned again from the metadata they describe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.gpu.devices import Device
from specserve.gpu.names import cuda_bytes
from specserve.memory import overhead
from specserve.memory import plan as vram
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
    if "kv_cache_bytes" in case:
        extra["kv-cache-memory-bytes"] = str(case["kv_cache_bytes"])
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
        "hardware": {
            k: case[k]
            for k in ("gpu_name", "gpu_memory_gib")
            if k in case and "gpu_names" not in case
        },
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


def plan(
    case: dict[str, Any], models: dict[str, Any], constants: overhead.Constants = overhead.FITTED
) -> vram.MemoryPlan:
    """Plan a run from config.json alone."""
    target = ModelFacts(case["model"], models[case["model"]]["config"])
    draft = ModelFacts(case["draft"], models[case["draft"]]["config"]) if "draft" in case else None
    return vram.plan(
        settings(case),
        target,
        draft,
        devices=_mixed(case),
        engine_version=case.get("version"),
        constants=constants,
    )


def _mixed(case: dict[str, Any]) -> tuple[Device, ...] | None:
    """GPUs of a run that mixes two models of GPU; None where the config says it all."""
    names = case.get("gpu_names")
    if names is None:
        return None
    return tuple(
        Device(i, f"uuid-{i}", n, cuda_bytes(n, None) or 0, 0) for i, n in enumerate(names)
    )


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


def weights_gib(made: vram.MemoryPlan) -> float:
    """Weights of the last stage, which is the one that logs print."""
    gpu = made.gpus[-1]
    return (gpu.target_weights_bytes + gpu.draft_weights_bytes) / GIB


@dataclass(frozen=True)
class Case:
    """One run and its plan."""

    raw: dict[str, Any]
    models: dict[str, Any]
    plan: vram.MemoryPlan

    @property
    def id(self) -> str:
        """The run's name."""
        return str(self.raw["id"])

    @property
    def family(self) -> str:
        """What kind of model."""
        return str(self.raw["family"])

    @property
    def held_out(self) -> bool:
        """Whether the run was added after the constants were fixed."""
        return bool(self.raw.get("held_out"))

    @property
    def observed(self) -> dict[str, Any]:
        """What the engine printed."""
        return dict(self.raw["observed"])

    @property
    def version(self) -> tuple[int, ...]:
        """The release, the newest where it is not stated."""
        return self.plan.shape.accounting.version

    def again(self, constants: overhead.Constants) -> Case:
        """The same run, planned with other constants."""
        return Case(self.raw, self.models, plan(self.raw, self.models, constants))

    def error(self, planned: float | None, printed: float | None) -> Error | None:
        """The difference, where both are known."""
        if planned is None or printed is None:
            return None
        return Error(self.id, self.family, planned, printed)

    def token_bytes_error(self) -> Error | None:
        """KV bytes per token, where the run states them for all layers of the deployment."""
        if self.id in _OTHER_MEANING:
            return None
        return self.error(self.plan.kv_bytes_per_token, self.raw.get("expected_bytes_per_token"))

    def weights_error(self) -> Error | None:
        """GiB of weights on the GPU whose log is quoted, where the checkpoint is described."""
        if self.id in _WEIGHTS_NOT_DESCRIBED:
            return None
        return self.error(weights_gib(self.plan), self.observed.get("model_loading_gib_per_gpu"))

    def activation_error(self) -> Error | None:
        """GiB of the profiling peak; the newer log line includes the graphs that are subtracted."""
        gpu = self.plan.gpus[-1]
        graphs = gpu.cuda_graph_bytes if self.plan.shape.accounting.subtracts_graphs else 0
        return self.error(
            (gpu.activation_bytes + graphs) / GIB, self.observed.get("activation_peak_gib")
        )

    def pool_error(self, *, loaded: bool = False, any_version: bool = False) -> Error | None:
        """GiB of KV cache, for runs of 0.11 and later that state their utilization."""
        gpu = self.plan.tightest
        old = not any_version and self.version < (0, 11)
        if (
            gpu is None
            or gpu.kv_cache_bytes is None
            or "gpu_memory_utilization" not in self.raw
            or old
        ):
            return None
        planned = gpu.kv_cache_bytes / GIB
        if loaded:
            printed = self.observed.get("model_loading_gib_per_gpu")
            if printed is None:
                return None
            planned += weights_gib(self.plan) - printed
        return self.error(planned, self.observed.get("available_kv_gib"))

    def printed_tokens_error(self) -> Error | None:
        """KV tokens of the whole plan."""
        if "gpu_memory_utilization" not in self.raw:
            return None
        return self.error(
            self.plan.capacity.kv_cache_tokens or None, self.observed.get("kv_cache_tokens")
        )

    def tokens_error(self) -> Error | None:
        """KV tokens that the printed pool makes: the KV arithmetic alone, to the two decimals of the GiB line."""
        pool, printed = self.observed.get("available_kv_gib"), self.observed.get("kv_cache_tokens")
        if (
            pool is None
            or printed is None
            or "inconsistent" in self.raw
            or self.id in _DRAFT_NOT_DESCRIBED
        ):
            return None
        fixed = plan({**self.raw, "kv_cache_bytes": round(pool * GIB)}, self.models)
        return self.error(fixed.capacity.kv_cache_tokens, printed)

    @property
    def refused(self) -> bool:
        """Whether the engine stopped for want of memory."""
        return self.raw["outcome"] in {"oom", "kv_too_small"}

    @property
    def counts_for_fit(self) -> bool:
        """Whether the run says enough to judge a verdict."""
        decided = self.raw["outcome"] in {"ok", "oom", "kv_too_small"}
        return decided and self.plan.fits is not None and "gpu_memory_utilization" in self.raw

    @cached_property
    def fits_sampler(self) -> bool:
        """Whether the sampler decides this run's activation."""
        return (
            (0, 17) <= self.version < (0, 21)
            and "activation_peak_gib" in self.observed
            and "method" not in self.raw
            and self.plan.gpus[-1].activation_bytes
            > self.again(_NO_SAMPLER).plan.gpus[-1].activation_bytes
        )

    def sampler_point(self) -> tuple[float, float]:
        """(logits, bytes that the constants must explain)."""
        known = self.plan.gpus[-1].activation_bytes
        logits = overhead.logit_rows(self.plan.shape) * overhead.vocabulary(self._text)
        explained = overhead.FITTED.sampler * logits + overhead.FITTED.fixed_activation
        return float(logits), self.observed["activation_peak_gib"] * GIB - (known - explained)

    @property
    def _text(self) -> Any:
        return ModelFacts("", self.models[self.raw["model"]]["config"]).text_config


_NO_SAMPLER = overhead.Constants(sampler=-2.0)
_OTHER_MEANING = {"gptoss20-moeoff", "vllm-27508", "spec-draft-q4b", "vllm-22624", "vllm-34076"}
"""Runs whose stated bytes per token leave layers out; the page says which."""
_DRAFT_NOT_DESCRIBED = {"club-1086", "club-46"}
_WEIGHTS_NOT_DESCRIBED = {
    "spec-peagle-q8b",
    "spec-peagle-q8b-pruned",
    "vllm-22624",
    "q36-nvfp4-mtp2",
    "spec-mtp-q36-nvfp4",
}
"""Runs whose drafter or mix of formats is not described, or whose log leaves the draft out."""


def cases() -> list[Case]:
    """Every run that names its model, planned."""
    models, raw = load()
    return [Case(c, models, plan(c, models)) for c in raw if "model" in c]
