"""The memory plan of a deployment: per GPU every term, what is left for the KV cache, and what that holds.

Order of the arithmetic, as in vLLM's v1/worker/gpu_worker.py (determine_available_memory, read 2026-11-29):
budget = utilization x what CUDA reports; KV cache = budget - weights - activation peak - non-torch
(- estimated CUDA graphs since 0.21); blocks = KV cache // block bytes, the smallest GPU decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from specserve.pair import cache_layers, kv_cache, overhead, shape as shapes, weights as weighing
from specserve.pair.capacities import cuda_bytes
from specserve.pair.placement import stages

from specserve.units import MIB

if TYPE_CHECKING:
    from specserve.config.schema import Settings
    from specserve.findings import Finding
    from specserve.gpu import Device
    from specserve.pair.calibration import Calibration
    from specserve.pair.facts import ModelFacts

_LEAST_OUTSIDE = 128 * MIB
"""Memory outside the budget without which the first step after start runs out."""

Confidence = Literal["measured", "modelled", "assumed"]


@dataclass(frozen=True)
class Term:
    """One line of the sum."""

    name: str
    bytes: int
    formula: str
    source: str
    detail: str = ""
    """A few words for the table of a person."""


@dataclass(frozen=True)
class GpuPlan:
    """One GPU's sum. ``index`` is the device's, or a plain count on what-if hardware."""

    index: int
    total_bytes: int | None
    budget_bytes: int | None
    target_weights_bytes: int
    draft_weights_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    non_torch_bytes: int
    kv_cache_bytes: int | None
    kv_cache_tokens: int | None
    other_bytes: int = 0
    """In use by other processes."""
    stage: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Everything that is not the KV cache and comes out of the budget."""
        return self.target_weights_bytes + self.draft_weights_bytes + self.activation_bytes + self.non_torch_bytes


@dataclass(frozen=True)
class Capacity:
    """What a pool holds."""

    kv_cache_bytes: int
    kv_cache_tokens: int
    requests: float


@dataclass(frozen=True)
class Plan:
    """The whole deployment's memory."""

    backend: shapes.Backend
    fits: bool | None
    """None when there is no GPU to plan for."""
    gpus: tuple[GpuPlan, ...]
    kv_bytes_per_token: int
    max_model_len: int
    capacity: Capacity
    without_draft: Capacity
    largest_max_model_len: int
    terms: tuple[Term, ...]
    confidence: Confidence
    assumed: tuple[str, ...]
    shape: shapes.Shape
    request_bytes: int
    """One request of max_model_len, on one GPU, rounded to blocks."""
    unprofiled_logits_bytes: int
    gpu_name: str | None
    draft: str | None
    refusal: str | None = None
    """Why it does not fit."""

    @property
    def tightest(self) -> GpuPlan | None:
        """The GPU that decides: the one with the least KV cache."""
        return min(self.gpus, key=lambda g: g.kv_cache_bytes or 0) if self.gpus else None

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract: bytes as integers."""
        return {
            "fits": self.fits, "backend": self.backend, "gpus": [_gpu_dict(g) for g in self.gpus],
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "max_concurrency": {"tokens": self.max_model_len, "requests": round(self.capacity.requests, 2)},
            "without_draft": {"kv_cache_tokens": self.without_draft.kv_cache_tokens,
                              "requests": round(self.without_draft.requests, 2)},
            "largest_max_model_len": self.largest_max_model_len,
            "terms": [{"name": t.name, "bytes": t.bytes, "formula": t.formula, "source": t.source} for t in self.terms],
            "confidence": self.confidence, "assumed": list(self.assumed),
        }  # fmt: skip

    def findings(self) -> list[Finding]:
        """The verdict in the shape of every other check."""
        from specserve.pair import vram_text

        return vram_text.findings(self)


def _gpu_dict(gpu: GpuPlan) -> dict[str, int | None]:
    keys = ("index", "total_bytes", "budget_bytes", "target_weights_bytes", "draft_weights_bytes", "activation_bytes",
            "cuda_graph_bytes", "non_torch_bytes", "kv_cache_bytes", "kv_cache_tokens", "other_bytes")  # fmt: skip
    return {key: getattr(gpu, key) for key in keys}


@dataclass(frozen=True)
class _Stage:
    """One pipeline stage without a budget: what every GPU of it holds."""

    target: int
    draft: int
    overhead: overhead.Overhead
    cache: kv_cache.CachePlan


@dataclass(frozen=True)
class _Gpu:
    """A GPU to plan for; no total when nothing is known about it."""

    index: int
    total: int | None
    used: int
    name: str | None


def plan(
    settings: Settings,
    target: ModelFacts,
    draft: ModelFacts | None = None,
    *,
    devices: Sequence[Device] | None = None,
    engine_version: str | None = None,
    backend: shapes.Backend = "gpu",
    free_ram_bytes: int | None = None,
    calibration: Calibration | None = None,
) -> Plan:
    """Plan the memory of a deployment. Pure: hardware comes from ``settings.hardware`` or ``devices``.

    ``free_ram_bytes`` is for the CPU backend; ``calibration`` replaces modelled terms by what an earlier start
    measured for the same deployment.
    """
    gpus, missing = _gpus(settings, devices, backend, free_ram_bytes)
    totals = [g.total for g in gpus if g.total is not None]
    name = gpus[0].name if gpus else None
    shape = shapes.resolve(
        settings, target, backend=backend, engine_version=engine_version, gpu_bytes=min(totals, default=None),
        gpu_name=name or "",
    )  # fmt: skip
    weighed = _weigh(target, draft, shape)
    built = _stages(target, draft, shape, weighed, name)
    planned = tuple(_gpu_plan(gpu, built, shape, calibration) for gpu in gpus)
    bare_shape = replace(shape, method=None, num_speculative_tokens=0)
    bare_stages = _stages(target, None, bare_shape, replace(weighed, draft=(0,) * shape.pp), name)
    bare = tuple(_gpu_plan(gpu, bare_stages, bare_shape, calibration) for gpu in gpus)
    capacity = _capacity(planned, built, shape.max_model_len)
    assumed = weighed.assumed
    limit = max(shape.max_model_len, shapes.default_length(target, shape.accounting))
    longest = min((built[g.stage].cache.longest(g.kv_cache_bytes or 0, limit) for g in planned), default=0)
    refusal = missing or _indivisible(target, shape) or _refusal(planned, built, shape, backend)
    fullest = max(built, key=lambda s: s.target + s.draft + s.overhead.activation)
    return Plan(
        backend=backend, fits=None if not totals and refusal is None else refusal is None,
        gpus=tuple(replace(g, kv_cache_tokens=capacity.kv_cache_tokens if totals else None) for g in planned),
        kv_bytes_per_token=max(s.cache.token_bytes(shape.max_model_len) for s in built),
        max_model_len=shape.max_model_len, capacity=capacity,
        without_draft=_capacity(bare, bare_stages, shape.max_model_len), largest_max_model_len=longest,
        terms=_terms(fullest, shape, weighed, planned, calibration),
        confidence="measured" if calibration else "assumed" if assumed else "modelled", assumed=assumed, shape=shape,
        request_bytes=max(s.cache.request_bytes(shape.max_model_len) for s in built),
        unprofiled_logits_bytes=max(s.overhead.unprofiled_logits for s in built), gpu_name=name,
        draft=shape.method, refusal=refusal,
    )  # fmt: skip


@dataclass(frozen=True)
class _Weighed:
    target: tuple[int, ...]
    draft: tuple[int, ...]
    source: str
    draft_source: str
    tower: cache_layers.Config | None
    assumed: tuple[str, ...]


def _weigh(target: ModelFacts, draft: ModelFacts | None, shape: shapes.Shape) -> _Weighed:
    """Weights of both models, for each stage. The draft sits on the last one."""
    online = shape.quantization if not target.config.get("quantization_config") else None
    main = weighing.of_model(target, shape, online=online)
    proposer, source, assumed = 0, "none", main.assumed
    if shape.drafts_with_a_model and draft is not None:
        own = weighing.of_model(draft, shape, tp=shape.draft_tp)
        proposer, source, assumed = own.largest, own.source, (*assumed, *(f"draft {a}" for a in own.assumed))
    elif shape.drafts_with_a_model:
        proposer, source = main.mtp_bytes, f"MTP module in the target's {main.source}"
        if not proposer:
            assumed = (*assumed, "draft weights: the target shows no MTP module, counted as 0")
    return _Weighed(
        main.stage_bytes, (0,) * (shape.pp - 1) + (proposer,), main.source, source,
        _tower(target, shape), assumed,
    )  # fmt: skip


def _tower(target: ModelFacts, shape: shapes.Shape) -> cache_layers.Config | None:
    vision = target.config.get("vision_config")
    return vision if isinstance(vision, Mapping) and not shape.language_model_only else None


def _stages(
    target: ModelFacts, draft: ModelFacts | None, shape: shapes.Shape, weighed: _Weighed, name: str | None
) -> list[_Stage]:
    config = target.text_config
    model = cache_layers.of_target(config, shape)
    proposer = cache_layers.of_draft(shape.method, config, draft.text_config if draft else None, shape)
    counts = stages(len(model.layers), shape.pp, shape.layer_split)
    built, start = [], 0
    for i, count in enumerate(counts):
        last = i == shape.pp - 1
        layers = model.layers[start : start + count] + (proposer.layers if last else ())
        start += count
        extra = overhead.of_stage(
            config, shape, gpu_name=name, first=i == 0, last=last, layers=count, tower=weighed.tower
        )
        built.append(_Stage(weighed.target[i], weighed.draft[i], extra, kv_cache.arrange(layers, shape)))
    return built


def _gpus(
    settings: Settings, devices: Sequence[Device] | None, backend: shapes.Backend, free_ram: int | None
) -> tuple[list[_Gpu], str | None]:
    """The GPUs that the deployment gets, in order, and what is missing. What-if hardware comes before what is there."""
    model, hardware = settings.models.target_model, settings.hardware
    need = model.tensor_parallel_size * model.pipeline_parallel_size
    if backend == "cpu":
        return [_Gpu(i, free_ram, 0, "CPU") for i in range(need)], None
    stated = cuda_bytes(hardware.gpu_name, hardware.gpu_memory_gib)
    if hardware.gpu_name or hardware.gpu_memory_gib:
        count = hardware.gpu_count or need
        found = [_Gpu(i, stated, 0, hardware.gpu_name) for i in range(count)]
    else:
        seen = list(devices or ())[: hardware.gpu_count]
        found = [_Gpu(d.index, d.total_bytes - d.reserved_bytes, d.used_bytes, d.name) for d in seen]
    if not found:
        return [_Gpu(i, None, 0, None) for i in range(need)], None
    missing = f"needs {need} GPUs (TP x PP), there are {len(found)}" if len(found) < need else None
    return found[:need], missing


def _gpu_plan(gpu: _Gpu, built: Sequence[_Stage], shape: shapes.Shape, calibration: Calibration | None) -> GpuPlan:
    position = gpu.index if gpu.total is None else gpu.index
    number = min(position // shape.tp, len(built) - 1) if len(built) > 1 else 0
    stage, extra = built[number], built[number].overhead
    target, activation, non_torch = stage.target, extra.activation, extra.non_torch
    if calibration is not None:
        target, activation, non_torch = calibration.weights_bytes - stage.draft, calibration.overhead_bytes, 0
    if shape.backend == "cpu":
        activation = non_torch = 0
    graphs = extra.cuda_graphs if calibration is None else calibration.cuda_graph_bytes or extra.cuda_graphs
    fixed = target + stage.draft + activation + non_torch
    if shape.accounting.subtracts_graphs and calibration is None:
        fixed += graphs
    budget = None if gpu.total is None else _budget(gpu, shape)
    pool = shape.kv_cache_bytes if shape.kv_cache_bytes is not None else None if budget is None else budget - fixed
    return GpuPlan(
        gpu.index, gpu.total, budget, target, stage.draft, activation, graphs, non_torch,
        None if pool is None else max(pool, 0), None, gpu.used, number,
    )  # fmt: skip


def _budget(gpu: _Gpu, shape: shapes.Shape) -> int:
    """What vLLM may take: its share of the GPU, and never more than is free."""
    assert gpu.total is not None
    return min(math.ceil(gpu.total * shape.utilization), gpu.total - gpu.used)


def _capacity(gpus: Sequence[GpuPlan], built: Sequence[_Stage], length: int) -> Capacity:
    """The smallest GPU's blocks, which all of them use."""
    if not gpus or any(g.kv_cache_bytes is None for g in gpus):
        return Capacity(0, 0, 0.0)
    pairs = [(built[g.stage].cache.blocks(g.kv_cache_bytes or 0), g) for g in gpus]
    blocks, gpu = min(pairs, key=lambda p: p[0])
    cache = built[gpu.stage].cache
    return Capacity(gpu.kv_cache_bytes or 0, cache.tokens(blocks, length), cache.requests(blocks, length))


def _refusal(
    gpus: Sequence[GpuPlan], built: Sequence[_Stage], shape: shapes.Shape, backend: shapes.Backend
) -> str | None:
    """Why the engine would not start; None when it would."""
    for gpu in gpus:
        cache, later = built[gpu.stage].cache, built[gpu.stage].overhead.collectives
        if gpu.total_bytes is None or gpu.budget_bytes is None:
            continue
        if backend == "cpu" and gpu.fixed_bytes + (gpu.kv_cache_bytes or 0) > gpu.total_bytes:
            return "does not fit"
        if backend == "gpu" and gpu.total_bytes - gpu.other_bytes < gpu.total_bytes * shape.utilization:
            return "other processes"
        if cache.request_blocks(shape.max_model_len) > cache.blocks(gpu.kv_cache_bytes or 0) - 1:
            return "does not fit"
        if backend == "gpu" and gpu.total_bytes - gpu.budget_bytes - gpu.other_bytes < later + _LEAST_OUTSIDE:
            return "nothing is left"
        if shape.accounting.v0 and _first_engine_draft(gpu, cache) > gpu.total_bytes - gpu.budget_bytes:
            return "does not fit"
    return None


def _first_engine_draft(gpu: GpuPlan, cache: kv_cache.CachePlan) -> int:
    """The first engine gave the whole pool to the target; the draft's layers came on top, outside the budget."""
    draft = sum(layer.token_bytes for layer in cache.layers if layer.draft)
    target = sum(layer.token_bytes for layer in cache.layers if not layer.draft)
    return (gpu.kv_cache_bytes or 0) * draft // target if draft and target else 0


def _indivisible(target: ModelFacts, shape: shapes.Shape) -> str | None:
    """TP must divide the attention heads and the vocabulary, padded to 64."""
    config = target.text_config
    heads = cache_layers.first_int(config, "num_attention_heads", "n_head") or shape.tp
    rows = overhead.vocabulary(config)
    if heads % shape.tp or ("vocab_size" in config and rows % shape.tp):
        return f"cannot be split over {shape.tp} GPUs: {heads} attention heads, {rows} vocabulary rows"
    return None


def _terms(
    stage: _Stage, shape: shapes.Shape, weighed: _Weighed, gpus: Sequence[GpuPlan], calibration: Calibration | None
) -> tuple[Term, ...]:
    from specserve.pair import terms

    return terms.of_stage(stage.target, stage.draft, stage.overhead, stage.cache, shape, weighed.source,
                          weighed.draft_source, gpus, calibration)  # fmt: skip
