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

from specserve.memory.accounting import Accounting
from specserve.units import GIB

if TYPE_CHECKING:
    from specserve.checkpoint.facts import ModelFacts
    from specserve.config.schema import Settings

Backend = Literal["gpu", "cpu"]

_WITHOUT_ASYNC = {"ngram", "suffix", "medusa", "mlp_speculator"}
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_ROPE_WITH_SCALED_LENGTH = {
    "default",
    "su",
    "longrope",
    "llama3",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
    "mrope",
    "proportional",
}
"""Rope types whose ``max_position_embeddings`` already is the length (older vLLM multiplied for
yarn).
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
    weight_format: str | None
    """``quant_method`` of the checkpoint; None for plain weights."""
    layer_split: tuple[int, ...] | None
    """Layers of each pipeline stage from VLLM_PP_LAYER_PARTITION; None splits evenly."""
    kv_cache_bytes: int | None
    """--kv-cache-memory-bytes, or VLLM_CPU_KVCACHE_SPACE: the pool's size, given."""
    cpu_offload_bytes: int
    language_model_only: bool
    float32_states: bool
    """Whether recurrent matrices are float32 where nothing says their type: the CPU engine's fast
    kernels, which a processor with AVX-512 BF16 gets (``platforms/cpu.py``, vLLM 0.32, 2026-12-01).
    """
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
        return self.method not in {None, "ngram", "ngram_gpu", "suffix"}


def resolve(
    settings: Settings,
    target: ModelFacts,
    *,
    backend: Backend,
    engine_version: str | None,
    gpu_bytes: int | None,
    gpu_name: str = "",
    has_avx512_bf16: bool = True,
) -> Shape:
    """The shape that vLLM would make of these settings on a GPU of this size."""
    engine, model, extra = (
        settings.engine,
        settings.models.target_model,
        Extra(settings.engine.extra_args),
    )
    spec, draft, tp, pp = (
        settings.speculative_decoding,
        settings.models.draft_model,
        model.tensor_parallel_size,
        model.pipeline_parallel_size,
    )
    accounting = Accounting.of(engine_version, gpu_name=gpu_name, method=settings.method)
    length = (
        engine.max_model_len or extra.number("max_model_len") or default_length(target, accounting)
    )
    if gpu_bytes is not None and "a100" not in gpu_name.lower():
        big = gpu_bytes
    else:
        big = 0
    seqs, tokens = _batch_defaults(backend, big, tp * pp, accounting, length)
    max_tokens = engine.max_num_batched_tokens or min(
        tokens, (engine.max_num_seqs or seqs) * length
    )
    max_seqs = engine.max_num_seqs or min(seqs, max_tokens)
    kv_dtype = effective_kv_dtype(engine.kv_cache_dtype, target.config)
    window, matrix = (
        str(extra.values.get(n) or "auto") for n in ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
    )
    asynchronous = backend == "gpu" and extra.switch(
        "async_scheduling", default=accounting.async_scheduling
    )
    return Shape(
        backend=backend,
        accounting=accounting,
        tp=tp,
        pp=pp,
        ep=tp * (extra.number("data_parallel_size") or 1)
        if extra.flag("enable_expert_parallel")
        else 1,
        dcp=extra.number("decode_context_parallel_size") or 1,
        max_model_len=length,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens,
        utilization=engine.gpu_memory_utilization,
        eager=engine.enforce_eager or extra.flag("enforce_eager"),
        dtype_bytes=4
        if model.dtype in {"float", "float32"}
        else 2,  # float32 checkpoints are served in 16 bits
        kv_dtype=kv_dtype,
        draft_kv_dtype=(draft.kv_cache_dtype if draft else None) or kv_dtype,
        block_tokens=extra.number("block_size"),
        state_checkpoints=extra.switch("enable_prefix_caching", default=accounting.caches_states),
        hybrid_manager=not extra.flag("disable_hybrid_kv_cache_manager"),
        async_scheduling=asynchronous and settings.method not in _WITHOUT_ASYNC,
        method=settings.method,
        num_speculative_tokens=spec.num_speculative_tokens if settings.method else 0,
        speculating_seqs=_speculating(settings, max_seqs),
        draft_tp=_draft_tp(settings, accounting),
        keeps_draft_probabilities=spec.draft_sample_method == "probabilistic",
        quantization=model.quantization,
        weight_format=weight_format(target.config),
        layer_split=_partition(engine.env.get("VLLM_PP_LAYER_PARTITION")),
        kv_cache_bytes=_given_cache(settings, extra, backend),
        cpu_offload_bytes=int(float(extra.values.get("cpu_offload_gb") or 0) * GIB),
        language_model_only=extra.flag("language_model_only"),
        float32_states=backend == "cpu" and has_avx512_bf16,
        state_dtypes=(window, matrix),
        extra=extra.values,
    )


class Extra:
    """``engine.extra_args`` by vLLM's names, however they are written.

    >>> Extra({"block-size": 32, "--enforce-eager": True}).number("block_size")
    32
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {str(k).lstrip("-").replace("-", "_"): v for k, v in values.items()}

    def number(self, name: str) -> int | None:
        """The value as a whole number; None when absent or something else."""
        value = self.values.get(name)
        if isinstance(value, int | float | str) and re.fullmatch(r"\d+", str(value)):
            return int(value)
        return None

    def flag(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.values.get(name) in (True, "true", "True", "")

    def switch(self, name: str, *, default: bool) -> bool:
        """A switch that has a ``no-`` form.

        >>> Extra({"no-async-scheduling": True}).switch("async_scheduling", default=True)
        False
        """
        if self.flag(f"no_{name}"):
            return False
        if name not in self.values:
            return default
        return self.flag(name)


def default_length(model: ModelFacts, accounting: Accounting) -> int:
    """The model's own longest sequence: the smallest of its length keys, times a rope factor where
    one applies.
    """
    config = model.text_config
    lengths = [v for k in _LENGTH_KEYS if isinstance(v := config.get(k), int) and v > 0]
    if lengths:
        length = min(lengths)
    else:
        length = 2048
    limit = model.tokenizer_config.get("model_max_length")
    if isinstance(limit, int) and 0 < limit < length:
        length = limit
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "gemma3" in str(config.get("model_type")):
        return length
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "longrope" and isinstance(
        original := config.get("original_max_position_embeddings"), int
    ):
        return original
    if (
        kind == "yarn"
        and accounting.version < (0, 15)
        and isinstance(rope.get("factor"), int | float)
    ):
        return int(rope.get("original_max_position_embeddings", length) * rope["factor"])
    if kind in _ROPE_WITH_SCALED_LENGTH or not isinstance(rope.get("factor"), int | float):
        return length
    return int(length * rope["factor"])


def effective_kv_dtype(setting: str, config: Mapping[str, Any]) -> str:
    """``auto`` is the model's dtype unless the checkpoint brings calibrated scales for an fp8
    cache.
    """
    quantization = config.get("quantization_config")
    if setting != "auto" or not isinstance(quantization, Mapping):
        return setting
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8"
    if str(quantization.get("kv_cache_quant_algo", "")).upper() == "FP8":
        return "fp8"
    return setting


def _speculating(settings: Settings, max_num_seqs: int) -> int:
    """Beyond max_batch_size, or the schedule's last row that drafts, a step does not speculate."""
    spec = settings.speculative_decoding
    if spec.schedule is not None:
        return min(
            max_num_seqs, max((last for _, last, tokens in spec.schedule if tokens), default=0)
        )
    return min(max_num_seqs, spec.max_batch_size or max_num_seqs)


def _draft_tp(settings: Settings, accounting: Accounting) -> int:
    """TP of the draft: only heads, and drafts on the first engine, can lie whole on every GPU."""
    target, draft = settings.models.target_model.tensor_parallel_size, settings.models.draft_model
    if draft is None or (settings.method == "draft_model" and not accounting.v0):
        return target
    return draft.tensor_parallel_size or target


def weight_format(config: Mapping[str, Any]) -> str | None:
    """How the checkpoint says its weights are quantized."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        return str(quantization.get("quant_method"))
    return None


def storage(config: Mapping[str, Any], shape: Shape) -> str:
    """How weights are stored, in words."""
    return weight_format(config) or ("float32" if shape.dtype_bytes == 4 else "16 bits")


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


def _given_cache(settings: Settings, extra: Extra, backend: Backend) -> int | None:
    given = extra.values.get("kv_cache_memory_bytes")
    if given is not None:
        return _bytes(str(given))
    space = settings.engine.env.get("VLLM_CPU_KVCACHE_SPACE")
    if backend == "cpu" and space and space.isdigit():
        return int(space) * GIB
    return None


def _bytes(text: str) -> int | None:
    """vLLM's human-readable sizes: 1k = 1000, 1K = 1024.

    >>> _bytes("2G"), _bytes("1500"), _bytes("1.5g")
    (2147483648, 1500, 1500000000)
    """
    match = re.fullmatch(r"([0-9.]+)([kmgtKMGT]?)", text.strip())
    if not match:
        return None
    unit = match.group(2)
    if unit.isupper():
        base = 1024
    else:
        base = 1000
    return int(float(match.group(1)) * base ** (" kmgt".index(unit.lower()) if unit else 0))
