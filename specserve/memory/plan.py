"""The memory plan of a deployment: per GPU every term, what is left for the KV cache, and what that
holds.

Order of the arithmetic, as in vLLM's v1/worker/gpu_worker.py (determine_available_memory, read
2026-11-29): budget = utilization x what CUDA reports; KV cache = budget - weights - activation peak
- non-torch (- estimated CUDA graphs since 0.21); blocks = KV cache // block bytes, and the smallest
GPU decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specserve.checkpoint.fields import Config
from specserve.checkpoint.quantization import quant_method
from specserve.gpu.names import cuda_bytes, lookup
from specserve.memory import deployment as shapes
from specserve.memory import kv_cache, overhead, terms
from specserve.memory import layers as cache_layers
from specserve.memory import weights as weighing
from specserve.memory.layers import CacheLayer
from specserve.memory.placement import stages
from specserve.memory.result import (
    CacheCapacity,
    Calibration,
    Confidence,
    GpuPlan,
    MemoryPlan,
    Refusal,
    Stage,
    UnknownPart,
    UnknownSize,
)
from specserve.pair import consistency

if TYPE_CHECKING:
    from specserve.checkpoint.facts import ModelFacts
    from specserve.config.schema import Settings
    from specserve.gpu.devices import Device, DeviceProcess


@dataclass(frozen=True)
class _Parts:
    """Both models: weights on one GPU, caching layers, what they were reckoned from, and what was
    assumed.
    """

    config: Config
    target: tuple[int, ...]
    """Weights of each stage."""
    draft: int
    """Weights of the proposer, on the last stage."""
    sources: tuple[str, str]
    layers: tuple[CacheLayer, ...]
    proposer: tuple[CacheLayer, ...]
    tower: Config | None
    assumed: tuple[str, ...]
    unknown: tuple[UnknownSize, ...]
    cache_is_known: bool


@dataclass(frozen=True)
class _Gpu:
    """A GPU to plan for; no total when nothing is known about it."""

    index: int
    total: int | None
    used: int
    name: str | None
    processes: tuple[DeviceProcess, ...] = ()


@dataclass(frozen=True)
class _Machine:
    """What a deployment is planned for."""

    gpus: list[_Gpu]
    found: int | None
    """How many GPUs there are; None when none is known."""
    calibration: Calibration | None
    constants: overhead.Constants


def plan(
    settings: Settings,
    target: ModelFacts,
    draft: ModelFacts | None = None,
    *,
    devices: Sequence[Device] | None = None,
    engine_version: str | None = None,
    backend: shapes.Backend = "gpu",
    free_ram_bytes: int | None = None,
    processor: shapes.Processor | None = None,
    calibration: Calibration | None = None,
    constants: overhead.Constants = overhead.FITTED,
) -> MemoryPlan:
    """Plan the memory of a deployment. Pure: hardware comes from ``settings.hardware`` or
    ``devices``.

    ``free_ram_bytes`` and ``processor`` are for the CPU backend; ``calibration`` replaces modelled
    terms by what an earlier start measured for the same deployment.
    """
    gpus, found = _gpus(settings, devices, backend, free_ram_bytes)
    shape = shapes.resolve(
        settings,
        target,
        backend=backend,
        engine_version=engine_version,
        gpu_bytes=min((g.total for g in gpus if g.total is not None), default=None),
        gpu_name=gpus[0].name or "",
        processor=processor,
    )
    on = _Machine(gpus, found, calibration, constants)
    made = _plan(target, draft, shape, on)
    fitting = made.largest_max_model_len
    if shape.fits_length and made.refusal == "memory" and 0 < fitting < shape.max_model_len:
        shape = replace(shape, max_model_len=fitting)
        return _plan(target, draft, shape, on)
    return made


def _plan(
    target: ModelFacts,
    draft: ModelFacts | None,
    shape: shapes.Shape,
    on: _Machine,
) -> MemoryPlan:
    """The plan for one length of sequences."""
    gpus, found, calibration, constants = on.gpus, on.found, on.calibration, on.constants
    parts = _parts(target, draft, shape)
    board = lookup(gpus[0].name)
    if board is not None and board.maker != "nvidia":
        note = f"overheads: those of NVIDIA GPUs, since none of {board.name} is on record"
        parts = replace(parts, assumed=(*parts.assumed, note))
    built = _stages(parts, shape, constants, gpus[0].name)
    planned = [_gpu_plan(gpu, n, built, shape, calibration) for n, gpu in enumerate(gpus)]
    capacity, length = _capacity(planned, built, shape.max_model_len), shape.max_model_len
    fullest = max(built, key=lambda s: s.target + s.draft + s.overhead.activation)
    limit = max(length, shapes.default_length(target, shape.accounting))
    refusal, unknown = _refusal(parts, planned, built, shape, found), parts.unknown
    if refusal is None and not parts.cache_is_known and found is not None:
        counted = replace(parts, cache_is_known=True)
        if _refusal(counted, planned, built, shape, found) is not None:
            # It fits only if these layers keep less than was assumed.
            notes = "; ".join(n for n in parts.assumed if "KV cache" in n)
            unknown = (*unknown, UnknownSize("KV cache", notes.removeprefix("KV cache: ")))
    confidence: Confidence = "modelled"
    if calibration is not None:
        confidence = "measured"
    elif parts.assumed or unknown:
        confidence = "assumed"
    token_bytes = max(s.cache.token_bytes(length) for s in built)
    alone, alone_token_bytes = _without_draft(parts, shape, constants, gpus, calibration)
    return MemoryPlan(
        backend=shape.backend,
        shape=shape,
        capacity=capacity,
        gpus=tuple(
            replace(g, kv_cache_tokens=None if found is None else capacity.kv_cache_tokens)
            for g in planned
        ),
        kv_bytes_per_token=token_bytes,
        without_draft=alone,
        draft_kv_bytes_per_token=max(0, token_bytes - alone_token_bytes),
        largest_max_model_len=min(
            built[g.stage].cache.longest(g.kv_cache_bytes or 0, limit) for g in planned
        ),
        request_bytes=max(s.cache.request_bytes(length) for s in built),
        late_bytes=max(s.overhead.unprofiled_logits for s in built),
        terms=terms.of_stage(fullest, shape, parts.sources, max(g.used for g in gpus), calibration),
        confidence=confidence,
        assumed=parts.assumed,
        gpu_name=gpus[0].name,
        gpus_found=found,
        target_format=shape.quantization or shapes.storage(target.config, shape),
        draft_format=shapes.storage(draft.config, shape)
        if draft and shape.drafts_with_a_model
        else None,
        refusal=refusal,
        unknown=unknown,
        possible_tp=_possible_tp(parts.config, shape, found)
        if refusal in ("gpu-count", "split")
        else None,
    )


def _parts(target: ModelFacts, draft: ModelFacts | None, shape: shapes.Shape) -> _Parts:
    """Both models.

    The draft sits on the last stage; the target's online quantization is not the draft's.
    """
    config = target.text_config
    main = weighing.of_model(
        target, shape, online=shape.quantization if shape.weight_format is None else None
    )
    model = cache_layers.of_target(config, shape)
    if draft is not None and draft.shares_targets_cache:
        proposer = cache_layers.CacheModel(())
    else:
        proposer = cache_layers.of_draft(
            shape.method, config, draft.text_config if draft else None, shape
        )
    cache_notes = model.assumed + tuple(f"draft {a}" for a in proposer.assumed)
    assumed = [*main.assumed, *cache_notes]
    if shape.extra.get("enable-lora"):
        assumed.append("LoRA slots: not counted")
    unknown: list[tuple[UnknownPart, str | None]] = [
        ("target weights", main.unknown),
        ("KV cache", model.unknown or proposer.unknown),
    ]
    weight, source = 0, "none"
    if shape.drafts_with_a_model and draft is not None:
        online = None
        if quant_method(draft.config) is None:
            online = shape.draft_quantization
        own = weighing.of_model(draft, shape, tp=shape.draft_tp, online=online)
        weight, source = own.stage_bytes[0], own.source
        unknown.append(("draft weights", own.unknown))
        if shape.method == "mtp" and own.mtp_bytes:  # of its folder nothing else is loaded
            weight = own.mtp_bytes
        assumed += [f"draft {note}" for note in own.assumed]
    elif shape.drafts_with_a_model:
        weight, source = main.mtp_bytes, f"MTP module in the target's {main.source}"
        if not weight:
            why = "no checkpoint of the draft was read"
            if shape.method == "mtp":
                why = "the target shows no MTP module"
            unknown.append(("draft weights", why))
    vision = target.config.get("vision_config")
    if isinstance(vision, Mapping) and not shape.language_model_only:
        tower = vision
    else:
        tower = None
    return _Parts(
        config,
        main.stage_bytes,
        weight,
        (main.source, source),
        model.layers,
        proposer.layers,
        tower,
        tuple(assumed),
        tuple(UnknownSize(part, why) for part, why in unknown if why is not None),
        not cache_notes,
    )


def _stages(
    parts: _Parts, shape: shapes.Shape, constants: overhead.Constants, gpu_name: str | None
) -> list[Stage]:
    built, start, end = [], 0, shape.pp - 1
    for i, count in enumerate(stages(len(parts.layers), shape.pp, shape.layer_split)):
        layers = parts.layers[start : start + count] + (parts.proposer if i == end else ())
        start += count
        extra = overhead.of_stage(
            parts.config,
            shape,
            constants,
            gpu_name=gpu_name,
            first=i == 0,
            last=i == end,
            layers=count,
            tower=parts.tower,
        )
        if i == end:
            draft = parts.draft
        else:
            draft = 0
        built.append(Stage(parts.target[i], draft, extra, kv_cache.arrange(layers, shape)))
    return built


def _without_draft(
    parts: _Parts,
    shape: shapes.Shape,
    constants: overhead.Constants,
    gpus: Sequence[_Gpu],
    calibration: Calibration | None,
) -> tuple[CacheCapacity, int]:
    """The same deployment serving the target alone, and its bytes of KV cache per token."""
    alone = replace(shape, method=None, num_speculative_tokens=0)
    layers = cache_layers.of_target(parts.config, alone).layers  # a state is smaller without drafts
    built = _stages(
        replace(parts, draft=0, layers=layers, proposer=()), alone, constants, gpus[0].name
    )
    if calibration is not None:
        calibration = replace(
            calibration, weights_bytes=max(0, calibration.weights_bytes - parts.draft)
        )
    planned = [_gpu_plan(gpu, n, built, alone, calibration) for n, gpu in enumerate(gpus)]
    length = shape.max_model_len
    token_bytes = max(s.cache.token_bytes(length) for s in built)
    return _capacity(planned, built, length), token_bytes


def _gpus(
    settings: Settings,
    devices: Sequence[Device] | None,
    backend: shapes.Backend,
    free_ram: int | None,
) -> tuple[list[_Gpu], int | None]:
    """The GPUs that the deployment gets, in order, and how many there are.

    What-if comes before what is there.
    """
    model, hardware = settings.models.target_model, settings.hardware
    need = model.tensor_parallel_size * model.pipeline_parallel_size
    if backend == "cpu":
        if free_ram is None:
            share = None
        else:
            share = free_ram // need
        return [_Gpu(i, share, 0, None) for i in range(need)], need
    if hardware.gpu_name or hardware.gpu_memory_gib:
        total = cuda_bytes(hardware.gpu_name, hardware.gpu_memory_gib)
        found = [_Gpu(i, total, 0, hardware.gpu_name) for i in range(hardware.gpu_count or need)]
        if total is None:
            known = None
        else:
            known = len(found)
    else:
        seen = list(devices or ())[: hardware.gpu_count]
        found = [
            _Gpu(d.index, d.total_bytes - d.reserved_bytes, d.used_bytes, d.name, d.processes)
            for d in seen
        ]
        if devices is not None:
            known = len(found)
        else:
            known = None
    nodes = settings.engine.node_count
    if nodes > 1:  # the others are taken to be like this one
        found = [_Gpu(n, g.total, g.used, g.name) for n, g in enumerate(found * nodes)]
        if known is None:
            known = None
        else:
            known = known * nodes
    missing = [_Gpu(i, None, 0, None) for i in range(len(found), need)]
    return [*found, *missing][:need], known


def _gpu_plan(
    gpu: _Gpu,
    number: int,
    built: Sequence[Stage],
    shape: shapes.Shape,
    calibration: Calibration | None,
) -> GpuPlan:
    at = number // shape.tp
    stage, extra, budget = built[at], built[at].overhead, None
    if gpu.total is not None:  # never more than is free
        budget = min(math.ceil(gpu.total * shape.utilization), gpu.total - gpu.used)
    made = GpuPlan(
        gpu.index,
        gpu.total,
        budget,
        stage.target,
        stage.draft,
        extra.activation,
        extra.cuda_graphs,
        extra.non_torch,
        None,
        None,
        gpu.used,
        gpu.processes,
        at,
        shape.accounting.subtracts_graphs,
        extra.outside,
    )
    if shape.backend == "cpu":
        made = replace(made, activation_bytes=0, cuda_graph_bytes=0, non_torch_bytes=0)
    if calibration is not None:
        made = replace(
            made,
            target_weights_bytes=max(0, calibration.weights_bytes - stage.draft),
            non_torch_bytes=0,
            activation_bytes=calibration.overhead_bytes,
            cuda_graph_bytes=calibration.cuda_graph_bytes or 0,
            graphs_in_budget=False,
        )
    if shape.kv_cache_bytes is not None:
        return replace(made, kv_cache_bytes=shape.kv_cache_bytes)
    if budget is None:
        return made
    return replace(made, kv_cache_bytes=max(0, budget - made.fixed_bytes))


def _capacity(gpus: Sequence[GpuPlan], built: Sequence[Stage], length: int) -> CacheCapacity:
    """The smallest GPU's blocks, which all of them use."""
    if any(g.kv_cache_bytes is None for g in gpus):
        return CacheCapacity(0, 0.0)
    counted = [
        (built[g.stage].cache.blocks(g.kv_cache_bytes or 0), built[g.stage].cache) for g in gpus
    ]
    blocks, cache = min(counted, key=lambda pair: pair[0])
    return CacheCapacity(cache.tokens(blocks, length), cache.requests(blocks, length))


def _refusal(
    parts: _Parts,
    gpus: Sequence[GpuPlan],
    built: Sequence[Stage],
    shape: shapes.Shape,
    found: int | None,
) -> Refusal | None:
    """Why the engine would not start; None when it would."""
    if found is not None and found < shape.gpus:
        return "gpu-count"
    if consistency.undivided(parts.config, shape.tp) is not None:
        return "split"
    verdicts = (
        _gpu_refusal(gpu, built[gpu.stage], shape, known=parts.cache_is_known) for gpu in gpus
    )
    return next((v for v in verdicts if v is not None), None)


def _possible_tp(config: Config, shape: shapes.Shape, found: int | None) -> int | None:
    if found is None:
        most = shape.tp - 1
    else:
        most = min(shape.tp - 1, found // shape.pp)
    counts = range(most, 0, -1)
    return next((n for n in counts if consistency.undivided(config, n) is None), None)


def _gpu_refusal(gpu: GpuPlan, stage: Stage, shape: shapes.Shape, *, known: bool) -> Refusal | None:
    """An assumed KV cache (not ``known``) refuses nothing; one block is never given out."""
    if gpu.total_bytes is None or gpu.budget_bytes is None:
        return None
    cache, pool = stage.cache, gpu.kv_cache_bytes or 0
    holds_one = gpu.budget_bytes >= gpu.fixed_bytes
    if cache.groups and known:
        holds_one = cache.request_blocks(shape.max_model_len) <= cache.blocks(pool) - 1
    if shape.backend == "cpu":
        if holds_one and gpu.fixed_bytes + pool <= gpu.total_bytes:
            return None
        return "memory"
    outside = gpu.total_bytes - gpu.budget_bytes - gpu.other_bytes
    if gpu.total_bytes - gpu.other_bytes < gpu.total_bytes * shape.utilization:
        return "other-processes"
    if not holds_one or (shape.accounting.v0 and _first_engine_draft(pool, cache) > outside):
        return "memory"
    if outside < stage.overhead.least_outside:
        return "headroom"
    return None


def _first_engine_draft(pool: int, cache: kv_cache.CachePlan) -> int:
    """The first engine gave the whole pool to the target; the draft's layers came on top, outside
    the budget.
    """
    draft = sum(layer.token_bytes for layer in cache.layers if layer.draft)
    target = sum(layer.token_bytes for layer in cache.layers if not layer.draft)
    if draft and target:
        return pool * draft // target
    return 0
