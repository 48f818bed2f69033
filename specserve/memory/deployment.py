"""The numbers of a deployment that decide about memory: settings, model and vLLM's own defaults,
resolved.

Defaults read in vLLM 0.32 (engine/arg_utils.py, config/model.py, platforms/cpu.py; 2026-11-29);
what older versions did otherwise is in :class:`Accounting`, by version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specserve.checkpoint.context import context_length
from specserve.checkpoint.quantization import kv_cache_dtype, quant_method
from specserve.config.base import FITTING
from specserve.config.extra_args import ExtraArgs, human_number
from specserve.config.speculation import WITHOUT_DRAFT
from specserve.memory.accounting import Accounting
from specserve.units import GIB

if TYPE_CHECKING:
    from specserve.checkpoint.facts import ModelFacts
    from specserve.config.schema import Settings

Backend = Literal["gpu", "cpu"]

_WITHOUT_ASYNC = {"ngram", "suffix", "medusa", "mlp_speculator"}


@dataclass(frozen=True)
class Processor:
    """What the CPU engine takes from the processor (``platforms/cpu.py``, 0.32, 2026-12-01)."""

    has_avx512_bf16: bool = True
    """Fast kernels for recurrent states, which keep their matrices in float32."""
    has_amx_tile: bool = False
    """A kernel for latent attention (MLA) that takes blocks of any size; the other takes 16 tokens.
    """


@dataclass(frozen=True)
class Shape:
    """Everything about a deployment that memory depends on, as plain numbers."""

    backend: Backend
    accounting: Accounting
    tp: int
    pp: int
    ep: int
    """GPUs that share the experts; 1 splits each expert by TP instead."""
    dcp: int
    max_model_len: int
    fits_length: bool
    """``max_model_len: auto``: shortened until one sequence fits, as vLLM does it."""
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    eager: bool
    dtype_bytes: int
    """Bytes of one weight or activation."""
    kv_dtype: str
    """vLLM's kv_cache_dtype in force; ``auto`` is the model's dtype."""
    draft_kv_dtype: str
    block_tokens: int | None
    """--block-size; None lets the backend choose."""
    state_checkpoints: bool
    """Whether recurrent states are kept for prefix caching: one more block per request and group.
    """
    hybrid_manager: bool
    async_scheduling: bool
    method: str | None
    num_speculative_tokens: int
    speculating_seqs: int
    """Sequences of the largest step that still speculates."""
    draft_tp: int
    keeps_draft_probabilities: bool
    """draft_sample_method probabilistic: the draft's distributions are kept until they are
    verified.
    """
    quantization: str | None
    """Online quantization of the target's weights; None keeps the checkpoint's."""
    draft_quantization: str | None
    """Online quantization of the draft's weights; None keeps its checkpoint's."""
    weight_format: str | None
    """``quant_method`` of the checkpoint; None for plain weights."""
    layer_split: tuple[int, ...] | None
    """Layers of each pipeline stage from VLLM_PP_LAYER_PARTITION; None splits evenly."""
    kv_cache_bytes: int | None
    """--kv-cache-memory-bytes, or VLLM_CPU_KVCACHE_SPACE: the pool's size, given."""
    cpu_offload_bytes: int
    language_model_only: bool
    processor: Processor
    """Of the machine, for the CPU engine."""
    state_dtypes: tuple[str, str]
    """mamba_cache_dtype and mamba_ssm_cache_dtype."""
    extra: Mapping[str, Any]

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that may be scheduled and not yet settled."""
        if not self.accounting.counts_in_flight:
            return self.max_num_batched_tokens
        if self.pp > 1 or not self.async_scheduling:
            batches = self.pp
        else:
            batches = 2
        if self.async_scheduling and self.second_runner and self.pp > 1:
            batches = self.pp + 1
        return batches * self.max_num_batched_tokens

    @property
    def second_runner(self) -> bool:
        """Model Runner V2 does not take these methods and falls back."""
        return self.accounting.second_runner and self.method not in {
            "draft_model",
            "ngram",
            "suffix",
            "medusa",
        }

    @property
    def drafts_with_a_model(self) -> bool:
        """Whether something with weights and KV proposes."""
        return self.method is not None and self.method not in WITHOUT_DRAFT


def resolve(
    settings: Settings,
    target: ModelFacts,
    *,
    backend: Backend,
    engine_version: str | None,
    gpu_bytes: int | None,
    gpu_name: str = "",
    processor: Processor | None = None,
) -> Shape:
    """The shape that vLLM would make of these settings on a GPU of this size."""
    engine, model, extra = (
        settings.engine,
        settings.models.target_model,
        settings.engine.flags,
    )
    spec, draft, tp, pp = (
        settings.speculative_decoding,
        settings.models.draft_model,
        model.tensor_parallel_size,
        model.pipeline_parallel_size,
    )
    accounting = Accounting.of(engine_version, gpu_name=gpu_name, method=settings.method)
    length = engine.asked_length or default_length(target, accounting)
    if gpu_bytes is not None and "a100" not in gpu_name.lower():
        big = gpu_bytes
    else:
        big = 0
    seqs, tokens = _batch_defaults(backend, big, tp * pp, accounting, length)
    max_tokens = engine.max_num_batched_tokens or min(
        tokens, (engine.max_num_seqs or seqs) * length
    )
    max_seqs = engine.max_num_seqs or min(seqs, max_tokens)
    kv_dtype = kv_cache_dtype(engine.kv_cache_dtype, target.config)
    window, matrix = (
        str(extra.values.get(n) or "auto") for n in ("mamba-cache-dtype", "mamba-ssm-cache-dtype")
    )
    asynchronous = backend == "gpu" and _switched(
        extra, "async-scheduling", default=accounting.async_scheduling
    )
    drafting_batch = settings.largest_drafting_batch
    if drafting_batch is None:
        drafting_batch = max_seqs
    return Shape(
        backend=backend,
        accounting=accounting,
        tp=tp,
        pp=pp,
        ep=tp * (extra.number("data-parallel-size") or 1)
        if extra.is_on("enable-expert-parallel")
        else 1,
        dcp=extra.number("decode-context-parallel-size") or 1,
        max_model_len=length,
        fits_length=engine.max_model_len == FITTING,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens,
        utilization=engine.gpu_memory_utilization,
        eager=engine.enforce_eager or extra.is_on("enforce-eager"),
        dtype_bytes=4
        if model.dtype in {"float", "float32"}
        else 2,  # float32 checkpoints are served in 16 bits
        kv_dtype=kv_dtype,
        draft_kv_dtype=(draft.kv_cache_dtype if draft else None) or kv_dtype,
        block_tokens=extra.number("block-size"),
        state_checkpoints=_switched(
            extra, "enable-prefix-caching", default=accounting.caches_states
        ),
        hybrid_manager=not extra.is_on("disable-hybrid-kv-cache-manager"),
        async_scheduling=asynchronous and settings.method not in _WITHOUT_ASYNC,
        method=settings.method,
        num_speculative_tokens=settings.num_speculative_tokens if settings.method else 0,
        speculating_seqs=min(max_seqs, drafting_batch),
        draft_tp=settings.draft_tensor_parallel_size(on_first_engine=accounting.v0),
        keeps_draft_probabilities=spec.draft_sample_method == "probabilistic",
        quantization=model.quantization,
        draft_quantization=draft.quantization if draft else None,
        weight_format=quant_method(target.config),
        layer_split=_partition(engine.env.get("VLLM_PP_LAYER_PARTITION")),
        kv_cache_bytes=_given_cache(settings, extra, backend),
        cpu_offload_bytes=int((extra.decimal("cpu-offload-gb") or 0) * GIB),
        language_model_only=extra.is_on("language-model-only"),
        processor=processor or Processor(),
        state_dtypes=(window, matrix),
        extra=extra.values,
    )


def storage(config: Mapping[str, Any], shape: Shape) -> str:
    """How weights are stored, in words."""
    return quant_method(config) or ("float32" if shape.dtype_bytes == 4 else "16 bits")


def default_length(model: ModelFacts, accounting: Accounting) -> int:
    """The context that vLLM serves where nobody says: the model's own, or 2048 where nothing names
    one.
    """
    own = context_length(model, scales_yarn=accounting.version < (0, 15))
    if own is None:
        return 2048
    return own.default


def _switched(flags: ExtraArgs, name: str, *, default: bool) -> bool:
    chosen = flags.switch(name)
    if chosen is None:
        return default
    return chosen


def _partition(text: str | None) -> tuple[int, ...] | None:
    if text and re.fullmatch(r"\d+(,\d+)*", text):
        return tuple(int(n) for n in text.split(","))
    return None


def _batch_defaults(
    backend: Backend, big: int, world: int, accounting: Accounting, length: int
) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens of `vllm serve` when nobody sets them;
    ``big``: bytes of no A100.
    """
    if backend == "cpu":
        return 128 * world, 2048 * world
    if accounting.v0:
        return 256, length if length <= 32768 else 512
    if big >= 160 * GIB and accounting.version >= (0, 18):
        return 1024, 16384
    if big >= 70 * GIB:
        return (1024, 8192)
    return (256, 2048)


def _given_cache(settings: Settings, extra: ExtraArgs, backend: Backend) -> int | None:
    given = extra.values.get("kv-cache-memory-bytes")
    if given is not None:
        return human_number(str(given))
    space = settings.engine.env.get("VLLM_CPU_KVCACHE_SPACE")
    if backend == "cpu" and space and space.isdigit():
        return int(space) * GIB
    return None
