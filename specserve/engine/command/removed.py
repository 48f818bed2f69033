"""vLLM's flags and variables of earlier versions, with what to write today.

Read in the usage texts of vLLM 0.4 to 0.12 (docs.vllm.ai), pull requests 26315, 32812 and 33535 of
vllm-project/vllm, and held against what 0.32 knows (tests/data/engine), 2026-12-01. A name counts
as removed only where the version at hand does not know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Removed:
    """A name that is gone from vLLM."""

    instead: str | None
    """Flag that says it today, without dashes; None where nothing needs to be said."""
    why: str


_NOTHING = {
    "requests are not logged unless --enable-log-requests asks for it": "disable-log-requests",
    "--reasoning-parser alone turns reasoning on": "enable-reasoning",
    "multi-step scheduling is gone; steps overlap by themselves": (
        "num-scheduler-steps multi-step-stream-outputs disable-async-output-proc"
    ),
    "there is only one block manager": "use-v2-block-manager",
    "preempted requests are always computed again; nothing is swapped": (
        "preemption-mode swap-space"
    ),
    "the scheduler has no such setting any more": (
        "scheduler-delay-factor max-num-partial-prefills max-long-partial-prefills"
    ),
    "tokenizers have no pool any more": (
        "tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config"
    ),
    "scales of the KV cache are read from the checkpoint": (
        "quantization-param-path calculate-kv-scales"
    ),
    "the installed build decides on the device": "device",
    "there is no separate frontend to turn off": "disable-frontend-multiprocessing",
    "prompt adapters are gone": (
        "enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token prompt-adapters"
    ),
    "LoRA has no such setting any more": (
        "enable-lora-bias lora-extra-vocab-size long-lora-scaling-factors"
    ),
    "image inputs follow from the checkpoint": (
        "image-input-type image-token-id image-input-shape image-feature-size "
        "image-processor image-processor-revision disable-image-processor"
    ),
    "request-level logits processors are gone": "logits-processor-pattern",
    "the first engine's settings went with it": (
        "use-cached-outputs disable-logprobs-during-spec-decoding"
    ),
    "structured outputs never fall back to another backend": "guided-decoding-disable-fallback",
    "cascade attention is gone": "disable-cascade-attn",
}
"""Why nothing needs to be written, and the flags of which it is so."""

_TODAY = {
    "guided-decoding-backend": "structured-outputs-config.backend",
    "guided-decoding-disable-any-whitespace": "structured-outputs-config.disable_any_whitespace",
    "guided-decoding-disable-additional-properties": (
        "structured-outputs-config.disable_additional_properties"
    ),
    "max-seq-len-to-capture": "max-cudagraph-capture-size",
    "max-context-len-to-capture": "max-cudagraph-capture-size",
    "cuda-graph-sizes": "cudagraph-capture-sizes",
    "full-cuda-graph": "compilation-config.cudagraph_mode",
    "compilation-config.level": "compilation-config.mode",
    "compilation-config.use_cudagraph": "compilation-config.cudagraph_mode",
    "compilation-config.full_cuda_graph": "compilation-config.cudagraph_mode",
    "compilation-config.max_capture_size": "compilation-config.max_cudagraph_capture_size",
    "attention-config.use_fp4_indexer_cache": "attention-config.indexer_kv_dtype",
    "attention-config.use_cudnn_prefill": "attention-config.mla_prefill_backend",
    "attention-config.use_trtllm_ragged_deepseek_prefill": "attention-config.mla_prefill_backend",
    "attention-config.disable_flashinfer_prefill": "attention-config.mla_prefill_backend",
    "worker-use-ray": "distributed-executor-backend",
    "engine-use-ray": "distributed-executor-backend",
    "rope-scaling": "hf-overrides.rope_parameters",
    "rope-theta": "hf-overrides.rope_parameters",
    "task": "runner",
    "override-pooler-config": "pooler-config",
    "override-neuron-config": "additional-config",
    "disable-mm-preprocessor-cache": "mm-processor-cache-gb",
    "enable-multimodal-encoder-data-parallel": "mm-encoder-tp-mode",
    "num-redundant-experts": "eplb-config.num_redundant_experts",
    "eplb-window-size": "eplb-config.window_size",
    "eplb-step-interval": "eplb-config.step_interval",
    "eplb-log-balancedness": "eplb-config.log_balancedness",
    "chat-template-text-format": "chat-template-content-format",
    "qlora-adapter-name-or-path": "model-loader-extra-config",
    "log-config-file": "logging-config",
}
"""Flags that have another name, or a place inside a flag that takes JSON."""

FLAGS: Mapping[str, Removed] = {
    **{name: Removed(None, why) for why, names in _NOTHING.items() for name in names.split()},
    **{name: Removed(now, f"its place today is --{now}") for name, now in _TODAY.items()},
}
"""Flag without dashes -> what became of it."""

_VARIABLES_TODAY = {
    "VLLM_ATTENTION_BACKEND": "attention-backend",
    "VLLM_FLASH_ATTN_VERSION": "attention-config.flash_attn_version",
    "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH": (
        "attention-config.flash_attn_max_num_splits_for_cuda_graph"
    ),
    "VLLM_USE_TRTLLM_ATTENTION": "attention-config.use_trtllm_attention",
    "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION": "attention-config.disable_flashinfer_q_quantization",
    "VLLM_USE_CUDNN_PREFILL": "attention-config.mla_prefill_backend",
    "VLLM_USE_TRTLLM_RAGGED_DEEPSEEK_PREFILL": "attention-config.mla_prefill_backend",
    "VLLM_DISABLE_FLASHINFER_PREFILL": "attention-config.mla_prefill_backend",
    "VLLM_ALL2ALL_BACKEND": "all2all-backend",
    "VLLM_MM_INPUT_CACHE_GIB": "mm-processor-cache-gb",
    "VLLM_TORCH_PROFILER_DIR": "profiler-config.torch_profiler_dir",
    "VLLM_TORCH_PROFILER_WITH_STACK": "profiler-config.torch_profiler_with_stack",
    "VLLM_TORCH_PROFILER_RECORD_SHAPES": "profiler-config.torch_profiler_record_shapes",
    "VLLM_TORCH_COMPILE_LEVEL": "compilation-config.mode",
    "VLLM_USE_FLASHINFER_MOE_FP16": "moe-backend",
    "VLLM_USE_FLASHINFER_MOE_FP8": "moe-backend",
    "VLLM_USE_FLASHINFER_MOE_FP4": "moe-backend",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "moe-backend",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "moe-backend",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": "moe-backend",
    "VLLM_FLASHINFER_MOE_BACKEND": "moe-backend",
    "VLLM_MXFP4_USE_MARLIN": "moe-backend",
    "VLLM_NVFP4_GEMM_BACKEND": "linear-backend",
    "VLLM_USE_NVFP4_CT_EMULATIONS": "linear-backend",
}
_VARIABLES_NOTHING = {
    "there is only one engine, V1": (
        "VLLM_USE_V1 VLLM_V1_USE_PREFILL_DECODE_ATTENTION VLLM_ALLOW_DEPRECATED_BEAM_SEARCH "
        "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_RPC_TIMEOUT VLLM_NO_DEPRECATION_WARNING "
        "VLLM_LOGITS_PROCESSOR_THREADS"
    ),
    "vLLM chooses this by itself": (
        "VLLM_USE_TRITON_FLASH_ATTN VLLM_FLASHINFER_FORCE_TENSOR_CORES "
        "VLLM_USE_FLASHINFER_REJECTION_SAMPLER VLLM_USE_RAY_SPMD_WORKER "
        "VLLM_USE_RAY_COMPILED_DAG VLLM_FUSED_MOE_CHUNK_SIZE VLLM_MOE_DP_CHUNK_SIZE "
        "VLLM_ENABLE_MOE_ALIGN_BLOCK_SIZE_TRITON VLLM_CPU_MOE_PREPACK "
        "VLLM_FLASHINFER_ALLREDUCE_FUSION_THRESHOLDS_MB"
    ),
}

VARIABLES: Mapping[str, Removed] = {
    **{
        name: Removed(None, why)
        for why, names in _VARIABLES_NOTHING.items()
        for name in names.split()
    },
    **{name: Removed(now, f"its place today is --{now}") for name, now in _VARIABLES_TODAY.items()},
}
"""Variable -> what became of it."""


def instead_of(where: str, removed: Removed) -> str:
    """What to do with a key that holds a removed name.

    >>> instead_of("engine.extra_args.task", FLAGS["task"])
    'write engine.extra_args.runner instead of engine.extra_args.task'
    >>> instead_of("engine.extra_args.swap-space", FLAGS["swap-space"])
    'remove engine.extra_args.swap-space'
    """
    if removed.instead is None:
        return f"remove {where}"
    return f"write engine.extra_args.{removed.instead} instead of {where}"


def flags_of_today() -> Iterator[str]:
    """The flags that the tables name as today's, without what is behind a dot."""
    for removed in (*FLAGS.values(), *VARIABLES.values()):
        if removed.instead is not None:
            yield removed.instead.partition(".")[0]
