"""Spellings that guides, vLLM's command line and other servers teach, with what to write here.

Sources: vLLM's release notes and `vllm/config/speculative.py` at 0.32, read 2026-11-29; the
arguments of SGLang, TGI, llama.cpp and TensorRT-LLM, read 2026-11-30.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specserve.config.document import KeyPath, dotted
from specserve.config.extra_args import FLAG_ALIASES, ExtraArgs
from specserve.config.models import DraftModel

_SPEC = "speculative_decoding"
_DRAFT = "models.draft_model"
_TARGET = "models.target_model"
_OF_DRAFT = frozenset(DraftModel.model_fields)

_OTHER_SERVERS = (
    (f"write '{_SPEC}.method'", "speculative_algorithm decoding_type"),
    (
        f"write '{_SPEC}.num_speculative_tokens'",
        "speculative_num_steps speculative_num_draft_tokens max_draft_len speculate",
    ),
    (
        f"write '{_SPEC}.num_speculative_tokens'",
        "num_assistant_tokens num_draft_tokens draft_length n_draft draft_max",
    ),
    (f"write '{_SPEC}.num_speculative_tokens'", "gamma k lookahead"),
    (
        f"write '{_DRAFT}.path'",
        "speculative_draft_model_path speculative_model_dir model_draft assistant_model",
    ),
    (f"write '{_TARGET}.path'", "model_path model_id model_name_or_path"),
    (f"write '{_TARGET}.tensor_parallel_size'", "tp tp_size num_shard num_gpus"),
    ("write 'engine.gpu_memory_utilization'", "mem_fraction_static gpu_memory_fraction"),
    ("write 'engine.max_model_len'", "context_length ctx_size n_ctx max_total_tokens max_seq_len"),
    ("write 'engine.max_num_seqs'", "max_running_requests"),
    ("write 'server.max_concurrent_requests'", "max_concurrent_requests"),
    ("remove it: vLLM drafts one sequence, not a tree", "speculative_eagle_topk"),
    ("remove it: vLLM drafts as many tokens in every step", "draft_min draft_p_min"),
    (
        "remove it: the target decides; to be told, set 'alerts.acceptance_rate.fire_below'",
        "acceptance_threshold",
    ),
    ("remove it: vLLM keeps whole models in GPU memory", "n_gpu_layers gpu_layers_draft"),
    ("remove it: clients send it with each request", "temperature top_p top_k max_tokens"),
)
"""(what to do, keys) for what other servers and their guides write."""

TODAY: Mapping[str, str] = {
    # Flags and keys of vLLM up to 0.8, and of its own speculative JSON.
    "speculative_model": f"write '{_DRAFT}.path'",
    "speculative_model_quantization": f"write '{_DRAFT}.quantization'",
    "speculative_draft_tensor_parallel_size": f"write '{_DRAFT}.tensor_parallel_size'",
    "draft_tensor_parallel_size": f"write '{_DRAFT}.tensor_parallel_size'",
    "speculative_max_model_len": f"write '{_DRAFT}.max_model_len'",
    "speculative_disable_by_batch_size": f"write '{_SPEC}.max_batch_size'",
    "disable_by_batch_size": f"write '{_SPEC}.max_batch_size'",
    "speculative_disable_mqa_scorer": "remove it: there is no such scorer any more",
    "disable_mqa_scorer": "remove it: there is no such scorer any more",
    "speculative_config": f"write the keys of '{_SPEC}' and '{_DRAFT}'",
    "speculative_method": f"write '{_SPEC}.method'",
    "num_speculative_tokens_per_batch_size": f"write '{_SPEC}.schedule'",
    "ngram_prompt_lookup_max": f"write '{_SPEC}.prompt_lookup_max'",
    "ngram_prompt_lookup_min": f"write '{_SPEC}.prompt_lookup_min'",
    "spec_decoding_acceptance_method": f"write '{_SPEC}.rejection_sample_method'",
    "acceptance_method": f"write '{_SPEC}.rejection_sample_method'",
    "typical_acceptance_sampler_posterior_threshold": (
        "remove it: typical acceptance is gone from vLLM"
    ),
    "typical_acceptance_sampler_posterior_alpha": "remove it: typical acceptance is gone from vLLM",
    "posterior_threshold": "remove it: typical acceptance is gone from vLLM",
    "posterior_alpha": "remove it: typical acceptance is gone from vLLM",
    "use_v2_block_manager": "remove it: there is only one block manager",
    "disable_logprobs_during_spec_decoding": "remove it: logprobs always come with speculation",
    "num_lookahead_slots": f"remove it: it follows from '{_SPEC}.num_speculative_tokens'",
    # Keys that belong elsewhere in this file.
    "num_speculative_tokens": f"write '{_SPEC}.num_speculative_tokens'",
    "draft_model_path": f"write '{_DRAFT}.path'",
    "draft_model": "write the section 'models.draft_model'",
    "target_model": "write the section 'models.target_model'",
    "model": "write 'models.target_model.path', and 'models.draft_model.path' for the draft",
    "swap_space": "remove it: this vLLM does not swap",
    **{name: said for said, names in _OTHER_SERVERS for name in names.split()},
}
"""Old, foreign or misplaced key (underscores, no dashes) -> what to do."""

WITHOUT_KEY = (
    "code_revision",
    "disable_eagle_block_drop",
    "draft_load_config",
    "dspark_draft_topk",
    "enable_adaptive_verification",
    "enforce_eager",
    "index_share_for_mtp_iteration",
    "synthetic_acceptance_length",
    "synthetic_acceptance_rates",
    "use_local_argmax_reduction",
)
"""Fields of vLLM's SpeculativeConfig that have no key here: they speak of the draft alone, and go
into ``extra_config``.
"""

IN_SECTION: Mapping[tuple[str, str], str] = {
    (_SPEC, "tensor_parallel_size"): f"write '{_DRAFT}.tensor_parallel_size'",
    (_SPEC, "model"): f"write '{_DRAFT}.path'",
    (_SPEC, "draft_model"): f"write '{_DRAFT}.path'",
    (_SPEC, "quantization"): f"write '{_DRAFT}.quantization'",
    (_SPEC, "revision"): f"write '{_DRAFT}.revision'",
    (_SPEC, "max_model_len"): f"write '{_DRAFT}.max_model_len'",
    (_SPEC, "kv_cache_dtype"): f"write '{_DRAFT}.kv_cache_dtype'",
    (_SPEC, "attention_backend"): f"write '{_DRAFT}.attention_backend'",
    (_SPEC, "moe_backend"): f"write '{_DRAFT}.moe_backend'",
    **{
        (section, name): f"write '{_SPEC}.extra_config.{name}'"
        for section in (_SPEC, _DRAFT)
        for name in WITHOUT_KEY
    },
}
"""Keys whose meaning depends on the section they stand in."""

OWN_FLAGS: Mapping[str, str] = {
    "model": "models.target_model.path",
    "revision": "models.target_model.revision",
    "dtype": "models.target_model.dtype",
    "quantization": "models.target_model.quantization",
    "tensor_parallel_size": "models.target_model.tensor_parallel_size",
    "pipeline_parallel_size": "models.target_model.pipeline_parallel_size",
    "trust_remote_code": "models.target_model.trust_remote_code",
    "host": "server.host",
    "port": "server.port",
    "served_model_name": "server.served_model_name",
    "api_key": "server.api_key_file",
    "ssl_certfile": "server.tls.cert_file",
    "ssl_keyfile": "server.tls.key_file",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "enforce_eager": "engine.enforce_eager",
    "kv_cache_dtype": "engine.kv_cache_dtype",
    "max_num_queued_reqs": "server.max_concurrent_requests",
    "shutdown_timeout": "engine.drain_timeout_seconds",
    "nnodes": "engine.node_count",
    "node_rank": "engine.node_rank",
    "master_addr": "engine.leader_address",
    "headless": "engine.node_rank",
    "speculative_config": _SPEC,
    "spec_method": f"{_SPEC}.method",
    "spec_model": f"{_DRAFT}.path",
    "spec_tokens": f"{_SPEC}.num_speculative_tokens",
    "per_request_spec_decode_metrics": f"{_SPEC}.per_request_spec_decode_metrics",
    "hf_token": "models.hub_token_file",
}
"""vLLM flags that have a key of their own here; setting both would leave two truths."""

_OTHER_NAMES = {
    short for short, name in FLAG_ALIASES.items() if name.replace("-", "_") in OWN_FLAGS
}
_NOT_EXTRA = "|".join(sorted({*OWN_FLAGS, *TODAY, *_OTHER_NAMES})).replace("-", "_")
NOT_EXTRA = f"^-*(no[-_])?({_NOT_EXTRA.replace('_', '[-_]')})([.=].*)?$"
"""Pattern of the flags that ``engine.extra_args`` refuses, for JSON Schema."""


def normal(key: str) -> str:
    """A key or flag as vLLM would compare it.

    >>> normal("--Speculative-Model")
    'speculative_model'
    """
    return key.lstrip("-").replace("-", "_").lower()


def advice(path: KeyPath) -> str | None:
    """What to write instead of an unknown key, when it is a known old, foreign or misplaced
    spelling.
    """
    name = normal(str(path[-1]))
    section = dotted(path[:-1])
    said = IN_SECTION.get((section, name)) or TODAY.get(name)
    if said is None and name in OWN_FLAGS:
        said = f"write '{OWN_FLAGS[name]}'"
    if said and section == _DRAFT and said.removeprefix(f"write '{_TARGET}.")[:-1] in _OF_DRAFT:
        return said.replace(_TARGET, _DRAFT)
    return said


def in_extra_args(extra_args: ExtraArgs) -> Iterator[tuple[str, str]]:
    """(key, sentence) for every flag in ``engine.extra_args`` that belongs elsewhere."""
    for flag in extra_args.flags:
        name = normal(flag.name)
        if name in OWN_FLAGS:
            key = OWN_FLAGS[name]
            yield flag.key, f"vLLM's '--{flag.name}' has a key of its own; write '{key}'"
        elif name in TODAY:
            yield flag.key, f"'{flag.key}' does not belong here; {TODAY[name]}"
