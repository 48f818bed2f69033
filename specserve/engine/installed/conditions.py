"""What the table of known defects may ask of a configuration: one predicate per name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from specserve.checkpoint.context import native_length, uses_mrope
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.quantization import kv_cache_dtype
from specserve.config.extra_args import ExtraArgs
from specserve.config.schema import Settings
from specserve.engine.command import args
from specserve.engine.installed.introspect import EngineFacts
from specserve.engine.installed.method import Runner
from specserve.pair import match
from specserve.pair.head_shapes import hidden_size

_LAYER_LISTS = ("layer_types", "layers_block_type")
_RECURRENT = ("linear", "mamba", "recurrent")
_HYBRID_KEYS = ("full_attention_interval", "hybrid_override_pattern")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SEVERAL = "MultiConnector"
"""A connector that holds others."""


@dataclass(frozen=True)
class Situation:
    """A configuration, the checkpoints it names, and the engine that would run it."""

    settings: Settings
    target: ModelFacts | None = None
    draft: ModelFacts | None = None
    engine: EngineFacts | None = None
    runner: Runner | None = None

    @property
    def flags(self) -> ExtraArgs:
        """vLLM's flags that have no key of ours."""
        return self.settings.engine.flags

    @property
    def tokens(self) -> int:
        """Tokens per draft."""
        return self.settings.num_speculative_tokens

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs that share the target."""
        return self.settings.models.target_model.tensor_parallel_size

    def speculative(self, key: str) -> bool:
        """Whether vLLM's SpeculativeConfig gets this key with a value that is not false."""
        return bool((args.speculative_config(self.settings) or {}).get(key))

    @cached_property
    def connectors(self) -> Mapping[str, Mapping[str, object]]:
        """Names of the KV connectors -> their own configuration."""
        given: list[object] = [self.flags.mapping("kv-transfer-config")]
        found: dict[str, Mapping[str, object]] = {}
        for one in given:
            if not isinstance(one, Mapping):
                continue
            extra = one.get("kv_connector_extra_config")
            if not isinstance(extra, Mapping):
                extra = {}
            name = str(one.get("kv_connector", ""))
            inside = extra.get("connectors")
            if name == _SEVERAL and isinstance(inside, list):
                given += inside
            elif name:
                found[name] = extra
        return found

    def connector(self, *beginnings: str) -> bool:
        """Whether a KV connector's name begins with one of these."""
        return any(name.startswith(beginnings) for name in self.connectors)


def _constrained(of: Situation) -> bool:
    """Whether answers are cut out of a grammar: tools, reasoning, schemas of clients."""
    parsers = ("enable-auto-tool-choice", "tool-call-parser", "reasoning-parser")
    return any(of.flags.values.get(name) for name in parsers)


def _draft_tp_differs(of: Situation) -> bool:
    given = (args.speculative_config(of.settings) or {}).get("draft_tensor_parallel_size")
    return given not in (None, of.tensor_parallel_size)


def _schedule_varies(of: Situation) -> bool:
    rows = of.settings.schedule
    if rows is None or not of.speculative("num_speculative_tokens_per_batch_size"):
        return False
    return any(tokens != of.tokens for _, _, tokens in rows)


def _sequence_parallel_misfit(of: Situation) -> bool:
    passes = of.flags.mapping("compilation-config").get("pass_config")
    on = isinstance(passes, Mapping) and any(
        passes.get(key) for key in ("enable_sp", "enable_sequence_parallelism")
    )
    return on and not fits_tp(of.tokens, of.tensor_parallel_size)


def fits_tp(tokens: int, tensor_parallel_size: int) -> bool:
    """Whether a graph can be a multiple of a verified draft and of the TP size."""
    width = tokens + 1
    return width % tensor_parallel_size == 0 or tensor_parallel_size % width == 0


def _fused_all_reduce(of: Situation) -> bool:
    """On by default; the pass makes its workspace when the model is compiled."""
    passes = of.flags.mapping("compilation-config").get("pass_config")
    off = isinstance(passes, Mapping) and passes.get("fuse_allreduce_rms") is False
    return not off and not of.settings.engine.enforce_eager


def _hybrid(of: Situation) -> bool:
    if of.target is None:
        return False
    config = of.target.text_config
    lists = [given for key in _LAYER_LISTS if isinstance(given := config.get(key), list)]
    if any(word in str(kind) for kinds in lists for kind in kinds for word in _RECURRENT):
        return True
    return any(config.get(key) for key in _HYBRID_KEYS)


def _moe(of: Situation) -> bool:
    return of.target is not None and any(of.target.text_config.get(key) for key in _EXPERTS)


def _kv_type(of: Situation) -> str:
    whole = of.target.config if of.target else {}
    return kv_cache_dtype(of.settings.engine.kv_cache_dtype, whole)


def _short_draft_context(of: Situation) -> bool:
    if of.draft is None:
        return False
    own, served = native_length(of.draft), of.settings.engine.asked_length
    if of.target is not None:
        served = match.served_length(of.settings, of.target)
    return own is not None and served is not None and own < served


def _draft_wider(of: Situation) -> bool:
    if of.target is None or of.draft is None:
        return False
    ours, theirs = hidden_size(of.target), hidden_size(of.draft)
    return ours is not None and theirs is not None and theirs > ours


def _tiers(of: Situation) -> bool:
    return any(
        name == "OffloadingConnector" and extra.get("secondary_tiers")
        for name, extra in of.connectors.items()
    )


def _qwen3_dspark(of: Situation) -> bool:
    """A DSpark draft of a Qwen3 kind that names the class which DeepSeek's drafts have."""
    if of.draft is None:
        return False
    return "DSparkDraftModel" in of.draft.architectures and of.draft.model_type == "qwen3"


def _ranks(of: Situation) -> bool:
    return (of.flags.number("data-parallel-size") or 1) > 1


def _runs(of: Situation, name: str) -> bool:
    return of.runner is not None and of.runner.name == name


CONDITIONS: Mapping[str, Callable[[Situation], bool]] = {
    "adaptive-verification": lambda of: of.speculative("enable_adaptive_verification"),
    "assistant-draft": lambda of: (
        of.draft is not None and of.draft.model_type.endswith("assistant")
    ),
    "async-scheduling": lambda of: of.flags.is_on("async-scheduling"),
    "no-async-scheduling": lambda of: of.flags.switch("async-scheduling") is False,
    "constrained-output": _constrained,
    "cpu": lambda of: of.engine is not None and of.engine.platform == "cpu",
    "data-parallel": _ranks,
    "draft-inherits-kv": lambda of: not of.speculative("kv_cache_dtype"),
    "draft-tp-differs": _draft_tp_differs,
    "draft-wider": _draft_wider,
    "fp8-kv": lambda of: _kv_type(of).startswith("fp8"),
    "fused-all-reduce": _fused_all_reduce,
    "hybrid-target": _hybrid,
    "kv-connector": lambda of: bool(of.connectors),
    "kv-lmcache": lambda of: of.connector("LMCache"),
    "kv-moriio": lambda of: of.connector("MoRIIO"),
    "kv-nixl": lambda of: of.connector("Nixl"),
    "kv-offloading": lambda of: of.connector("OffloadingConnector"),
    "kv-offloading-tiers": _tiers,
    "kv-producer": lambda of: (
        of.flags.mapping("kv-transfer-config").get("kv_role") == "kv_producer"
    ),
    "kv-sharing-fast-prefill": lambda of: of.flags.is_on("kv-sharing-fast-prefill"),
    "live-control": lambda of: of.settings.control == "live",
    "local-argmax": lambda of: of.speculative("use_local_argmax_reduction"),
    "lora": lambda of: of.flags.is_on("enable-lora"),
    "m-rope-draft": lambda of: of.draft is not None and uses_mrope(of.draft),
    "m-rope-target": lambda of: of.target is not None and uses_mrope(of.target),
    "moe-target": _moe,
    "more-than-two-tokens": lambda of: of.tokens > 2,
    "other-vocabulary": lambda of: of.speculative("use_heterogeneous_vocab"),
    "pipeline-parallel": lambda of: of.settings.models.target_model.pipeline_parallel_size > 1,
    "prefix-caching": lambda of: of.flags.switch("enable-prefix-caching") is not False,
    "qwen3-dspark-draft": _qwen3_dspark,
    "remote-weights": lambda of: "://" in of.settings.models.target_model.path,
    "runner-v1": lambda of: _runs(of, "v1"),
    "runner-v2": lambda of: _runs(of, "v2"),
    "sampling-not-repaired": lambda of: (
        "cpu-speculative-sampling" not in of.settings.engine.repairs
    ),
    "schedule": lambda of: of.settings.schedule is not None,
    "schedule-varies": _schedule_varies,
    "sequence-parallel-misfit": _sequence_parallel_misfit,
    "several-api-servers": lambda of: (of.flags.number("api-server-count") or 0) > 1,
    "several-tokens": lambda of: of.tokens > 1,
    "short-draft-context": _short_draft_context,
    "short-lookup": lambda of: (of.settings.speculative_decoding.prompt_lookup_min or 5) < 8,
    "tensor-parallel": lambda of: of.tensor_parallel_size > 1,
    "turboquant-kv": lambda of: _kv_type(of).startswith("turboquant"),
    "unpadded-drafts": lambda of: of.speculative("disable_padded_drafter_batch"),
    "yielding-not-repaired": lambda of: "cpu-yielding" not in of.settings.engine.repairs,
}


def holding(of: Situation) -> frozenset[str]:
    """The names of all conditions that hold."""
    return frozenset(name for name, holds in CONDITIONS.items() if holds(of))
