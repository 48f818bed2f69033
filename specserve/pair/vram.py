"""The memory plan of a deployment: per GPU every term, what is left for the KV cache, and what that holds.

Order of the arithmetic, as in vLLM's v1/worker/gpu_worker.py (determine_available_memory, read 2026-11-29):
budget = utilization x what CUDA reports; KV cache = budget - weights - activation peak - non-torch
(- estimated CUDA graphs since 0.21); blocks = KV cache // block bytes, and the smallest GPU decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specserve.pair import cache_layers, kv_cache, overhead, terms
from specserve.pair import shape as shapes
from specserve.pair import weights as weighing
from specserve.pair.capacities import cuda_bytes
from specserve.pair.fields import Config, first_int
from specserve.pair.memory import Calibration, Capacity, Confidence, GpuPlan, Plan, Refusal
from specserve.pair.placement import stages

if TYPE_CHECKING:
    from specserve.config.schema import Settings
    from specserve.gpu import Device, DeviceProcess
    from specserve.pair.facts import ModelFacts

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Stage:
    """What every GPU of a pipeline stage holds, before any budget."""

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
    processes: tuple[DeviceProcess, ...] = ()


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
    constants: overhead.Constants = overhead.FITTED,
) -> Plan:
    """Plan the memory of a deployment. Pure: hardware comes from ``settings.hardware`` or ``devices``.

    ``free_ram_bytes`` is for the CPU backend; ``calibration`` replaces modelled terms by what an earlier start
    measured for the same deployment.
    """
    gpus, found = _gpus(settings, devices, backend, free_ram_bytes)
    shape = shapes.resolve(
        settings, target, backend=backend, engine_version=engine_version,
        gpu_bytes=min((g.total for g in gpus if g.total is not None), default=None), gpu_name=gpus[0].name or "",
    )  # fmt: skip
    weighed = _weigh(target, draft, shape)
    built = _stages(
        target=target, draft=draft, shape=shape, weighed=weighed, gpu_name=gpus[0].name, constants=constants
    )
    planned = [_gpu_plan(gpu, n, built, shape, calibration) for n, gpu in enumerate(gpus)]
    capacity = _capacity(planned, built, shape.max_model_len)
    limit = max(shape.max_model_len, shapes.default_length(target, shape.accounting))
    fullest = max(built, key=lambda s: s.target + s.draft + s.overhead.activation)
    return Plan(
        backend=backend, shape=shape, capacity=capacity,
        gpus=tuple(replace(g, kv_cache_tokens=None if found is None else capacity.kv_cache_tokens) for g in planned),
        kv_bytes_per_token=max(s.cache.token_bytes(shape.max_model_len) for s in built),
        without_draft=_without_draft(
            target=target, shape=shape, weighed=weighed, gpus=gpus, calibration=calibration, constants=constants
        ),
        largest_max_model_len=min(built[g.stage].cache.longest(g.kv_cache_bytes or 0, limit) for g in planned),
        request_bytes=max(s.cache.request_bytes(shape.max_model_len) for s in built),
        late_bytes=max(s.overhead.unprofiled_logits for s in built),
        terms=terms.of_stage(fullest, shape, weighed.sources, max(g.used for g in gpus), calibration),
        confidence=_confidence(weighed.assumed, calibration), assumed=weighed.assumed, gpu_name=gpus[0].name,
        draft_format=_draft_format(draft, shape), gpus_found=found,
        refusal=_refusal(target, planned, built, shape, found=found, certain=not _assumes_cache(weighed.assumed)),
    )  # fmt: skip


def _draft_format(draft: ModelFacts | None, shape: shapes.Shape) -> str | None:
    if draft is None or not shape.drafts_with_a_model:
        return None
    return shapes.weight_format(draft.config) or ("float32" if shape.dtype_bytes == 4 else "16 bits")


def _assumes_cache(notes: Sequence[str]) -> bool:
    return any("KV cache:" in note for note in notes)


def _confidence(assumed: Sequence[str], calibration: Calibration | None) -> Confidence:
    if calibration is not None:
        return "measured"
    return "assumed" if assumed else "modelled"


@dataclass(frozen=True)
class _Weighed:
    """Weights of both models on each stage, what they were reckoned from, and what was assumed."""

    target: tuple[int, ...]
    draft: tuple[int, ...]
    sources: tuple[str, str]
    tower: Config | None
    assumed: tuple[str, ...]


def _weigh(target: ModelFacts, draft: ModelFacts | None, shape: shapes.Shape) -> _Weighed:
    """Weights of both models. The draft sits on the last stage; the target's online quantization is not the draft's."""
    online = shape.quantization if shape.weight_format is None else None
    main = weighing.of_model(target, shape, online=online)
    proposer, source, assumed = 0, "none", [*main.assumed, *_cache_notes(target, draft, shape)]
    if shape.drafts_with_a_model and draft is not None:
        own = weighing.of_model(draft, shape, tp=shape.draft_tp)
        proposer, source = own.largest, own.source
        assumed += [f"draft {note}" for note in own.assumed]
    elif shape.drafts_with_a_model:
        proposer, source = main.mtp_bytes, f"MTP module in the target's {main.source}"
        if not proposer:
            assumed.append("draft weights: the target shows no MTP module, counted as 0")
    vision = target.config.get("vision_config")
    tower = vision if isinstance(vision, Mapping) and not shape.language_model_only else None
    return _Weighed(main.stage_bytes, (0,) * (shape.pp - 1) + (proposer,), (main.source, source), tower, tuple(assumed))


def _cache_notes(target: ModelFacts, draft: ModelFacts | None, shape: shapes.Shape) -> tuple[str, ...]:
    config = target.text_config
    proposer = cache_layers.of_draft(shape.method, config, draft.text_config if draft else None, shape)
    notes = cache_layers.of_target(config, shape).assumed + tuple(f"draft {a}" for a in proposer.assumed)
    if shape.extra.get("enable_lora"):
        notes += ("LoRA slots: not counted",)
    return notes


def _stages(
    *, target: ModelFacts, draft: ModelFacts | None, shape: shapes.Shape, weighed: _Weighed, gpu_name: str | None,
    constants: overhead.Constants,
) -> list[Stage]:  # fmt: skip
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
            config, shape, constants, gpu_name=gpu_name, first=i == 0, last=last, layers=count, tower=weighed.tower
        )
        built.append(Stage(weighed.target[i], weighed.draft[i], extra, kv_cache.arrange(layers, shape)))
    return built


def _without_draft(
    *, target: ModelFacts, shape: shapes.Shape, weighed: _Weighed, gpus: Sequence[_Gpu],
    calibration: Calibration | None, constants: overhead.Constants,
) -> Capacity:  # fmt: skip
    """The same deployment serving the target alone."""
    alone = replace(shape, method=None, num_speculative_tokens=0)
    none = replace(weighed, draft=(0,) * shape.pp)
    bare = _stages(target=target, draft=None, shape=alone, weighed=none, gpu_name=gpus[0].name, constants=constants)
    if calibration is not None:
        drafts = max(weighed.draft)
        calibration = replace(calibration, weights_bytes=max(0, calibration.weights_bytes - drafts))
    return _capacity(
        [_gpu_plan(gpu, n, bare, alone, calibration) for n, gpu in enumerate(gpus)], bare, shape.max_model_len
    )


def _gpus(
    settings: Settings, devices: Sequence[Device] | None, backend: shapes.Backend, free_ram: int | None
) -> tuple[list[_Gpu], int | None]:
    """The GPUs that the deployment gets, in order, and how many there are. What-if comes before what is there."""
    model, hardware = settings.models.target_model, settings.hardware
    need = model.tensor_parallel_size * model.pipeline_parallel_size
    if backend == "cpu":
        share = None if free_ram is None else free_ram // need
        return [_Gpu(i, share, 0, None) for i in range(need)], need
    if hardware.gpu_name or hardware.gpu_memory_gib:
        total = cuda_bytes(hardware.gpu_name, hardware.gpu_memory_gib)
        found = [_Gpu(i, total, 0, hardware.gpu_name) for i in range(hardware.gpu_count or need)]
        known = None if total is None else len(found)
    else:
        seen = list(devices or ())[: hardware.gpu_count]
        found = [_Gpu(d.index, d.total_bytes - d.reserved_bytes, d.used_bytes, d.name, d.processes) for d in seen]
        known = len(found) if devices is not None else None
    nodes = settings.engine.node_count
    if nodes > 1:  # the others are taken to be like this one
        here, found = found, []
        found = [_Gpu(n, g.total, g.used, g.name) for n, g in enumerate(here * nodes)]
        known = None if known is None else known * nodes
    missing = [_Gpu(len(found) + i, None, 0, None) for i in range(max(0, need - len(found)))]
    return [*found, *missing][:need], known


def _gpu_plan(
    gpu: _Gpu, number: int, built: Sequence[Stage], shape: shapes.Shape, calibration: Calibration | None
) -> GpuPlan:
    at = number // shape.tp
    stage, extra = built[at], built[at].overhead
    made = GpuPlan(
        gpu.index, gpu.total, None if gpu.total is None else _budget(gpu.total, gpu.used, shape), stage.target,
        stage.draft, extra.activation, extra.cuda_graphs, extra.non_torch, None, None, gpu.used, gpu.processes, at,
        shape.accounting.subtracts_graphs, extra.outside,
    )  # fmt: skip
    if shape.backend == "cpu":
        made = replace(made, activation_bytes=0, cuda_graph_bytes=0, non_torch_bytes=0)
    if calibration is not None:
        made = replace(
            made, target_weights_bytes=max(0, calibration.weights_bytes - stage.draft), non_torch_bytes=0,
            activation_bytes=calibration.overhead_bytes, cuda_graph_bytes=calibration.cuda_graph_bytes or 0,
            graphs_in_budget=False,
        )  # fmt: skip
    if shape.kv_cache_bytes is not None:
        return replace(made, kv_cache_bytes=shape.kv_cache_bytes)
    if made.budget_bytes is None:
        return made
    return replace(made, kv_cache_bytes=max(0, made.budget_bytes - made.fixed_bytes))


def _budget(total: int, used: int, shape: shapes.Shape) -> int:
    """What vLLM may take: its share of the GPU, and never more than is free."""
    return min(math.ceil(total * shape.utilization), total - used)


def _capacity(gpus: Sequence[GpuPlan], built: Sequence[Stage], length: int) -> Capacity:
    """The smallest GPU's blocks, which all of them use."""
    if any(g.kv_cache_bytes is None for g in gpus):
        return Capacity(0, 0.0)
    counted = [(built[g.stage].cache.blocks(g.kv_cache_bytes or 0), built[g.stage].cache) for g in gpus]
    blocks, cache = min(counted, key=lambda pair: pair[0])
    return Capacity(cache.tokens(blocks, length), cache.requests(blocks, length))


def _refusal(
    target: ModelFacts, gpus: Sequence[GpuPlan], built: Sequence[Stage], shape: shapes.Shape, *, found: int | None,
    certain: bool,
) -> Refusal | None:  # fmt: skip
    """Why the engine would not start; None when it would. An assumed KV cache (not ``certain``) refuses nobody."""
    if found is not None and found < shape.gpus:
        return "gpu-count"
    if _indivisible(target, shape):
        return "split"
    verdicts = [_gpu_refusal(gpu, built[gpu.stage], shape, certain=certain) for gpu in gpus]
    return next((v for v in verdicts if v is not None), None)


def _gpu_refusal(gpu: GpuPlan, stage: Stage, shape: shapes.Shape, *, certain: bool) -> Refusal | None:
    if gpu.total_bytes is None or gpu.budget_bytes is None:
        return None
    if shape.backend == "cpu":
        held = gpu.fixed_bytes + (gpu.kv_cache_bytes or 0)
        return "memory" if held > gpu.total_bytes or not _holds_one(gpu, stage, shape, certain=certain) else None
    outside = gpu.total_bytes - gpu.budget_bytes - gpu.other_bytes
    if gpu.total_bytes - gpu.other_bytes < gpu.total_bytes * shape.utilization:
        return "other-processes"
    if not _holds_one(gpu, stage, shape, certain=certain):
        return "memory"
    if shape.accounting.v0 and _first_engine_draft(gpu, stage.cache) > outside:
        return "memory"
    return "headroom" if outside < stage.overhead.least_outside else None


def _holds_one(gpu: GpuPlan, stage: Stage, shape: shapes.Shape, *, certain: bool) -> bool:
    """Whether one request of max_model_len fits; one block of the pool is never given out."""
    cache = stage.cache
    if not cache.groups or not certain:
        return (gpu.budget_bytes or 0) >= gpu.fixed_bytes
    return cache.request_blocks(shape.max_model_len) <= cache.blocks(gpu.kv_cache_bytes or 0) - 1


def _first_engine_draft(gpu: GpuPlan, cache: kv_cache.CachePlan) -> int:
    """The first engine gave the whole pool to the target; the draft's layers came on top, outside the budget."""
    draft = sum(layer.token_bytes for layer in cache.layers if layer.draft)
    target = sum(layer.token_bytes for layer in cache.layers if not layer.draft)
    return (gpu.kv_cache_bytes or 0) * draft // target if draft and target else 0


def _indivisible(target: ModelFacts, shape: shapes.Shape) -> bool:
    """TP must divide the attention heads, and the vocabulary padded to 64."""
    heads = first_int(target.text_config, "num_attention_heads", "n_head") or shape.tp
    return bool(
        heads % shape.tp or ("vocab_size" in target.text_config and overhead.vocabulary(target.text_config) % shape.tp)
    )
