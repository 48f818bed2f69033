"""Known-bad combinations: a dated data file, and the features of a configuration it is held
against.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specserve.checkpoint.context import native_length, uses_mrope
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.quantization import kv_cache_dtype
from specserve.config.schema import Settings
from specserve.engine.command import args
from specserve.engine.installed.introspect import EngineFacts, release
from specserve.engine.installed.method import Runner
from specserve.findings import Finding, Severity
from specserve.pair import match

FILE = Path(__file__).with_name("known_bad.yaml")


@dataclass(frozen=True)
class Entry:
    """One row of ``known_bad.yaml``; the file explains the columns."""

    id: str
    severity: Severity
    says: str
    fix: str
    reference: str
    methods: tuple[str, ...] = ()
    when: frozenset[str] = frozenset()
    unless: frozenset[str] = frozenset()
    since: tuple[int, ...] = ()
    until: tuple[int, ...] | None = None

    @property
    def code(self) -> str:
        """The code of its finding."""
        return f"known-bad-{self.id}"

    def applies(self, method: str, features: frozenset[str], version: str) -> bool:
        """Whether method, features and version are all in its range.

        A version without numbers is in none.
        """
        number = release(version)
        return (
            bool(number)
            and (not self.methods or method in self.methods)
            and self.when <= features
            and not self.unless & features
            and self.since <= number
            and (self.until is None or number < self.until)
        )


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All rows of the file."""
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8"))["entries"]
    return tuple(_entry(dict(row)) for row in rows)


def _entry(row: dict[str, Any]) -> Entry:
    since, until = row.pop("from", None), row.get("until")
    return Entry(
        **row
        | {
            "methods": tuple(row.get("methods", ())),
            "when": frozenset(row.get("when", ())),
            "unless": frozenset(row.get("unless", ())),
            "since": release(since) if since else (),
            "until": release(until) if until else None,
        }
    )


def findings(method: str, features: frozenset[str], version: str) -> list[Finding]:
    """A finding per row that applies."""
    return [
        Finding(
            e.code,
            e.severity,
            f"method {method}, vLLM {version}",
            f"{e.says} ({e.reference})",
            e.fix,
        )
        for e in entries()
        if e.applies(method, features, version)
    ]


def features(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    engine: EngineFacts | None,
    runner: Runner | None,
) -> frozenset[str]:
    """What of a configuration the table speaks about."""
    extra = settings.engine.flags.values
    spec = args.speculative_config(settings) or {}
    found = {
        "pipeline-parallel": settings.models.target_model.pipeline_parallel_size > 1,
        "data-parallel": (settings.engine.flags.number("data-parallel-size") or 1) > 1,
        "lora": bool(extra.get("enable-lora")),
        "constrained-output": any(
            extra.get(k)
            for k in ("enable-auto-tool-choice", "tool-call-parser", "reasoning-parser")
        ),
        "short-lookup": (settings.speculative_decoding.prompt_lookup_min or 5) < 8,
        "schedule": settings.schedule is not None,
        "prefix-caching": extra.get("enable-prefix-caching") is not False,
        "async-scheduling": extra.get("async-scheduling") is True,
        "no-async-scheduling": extra.get("async-scheduling") is False,
        "kv-sharing-fast-prefill": extra.get("kv-sharing-fast-prefill") is True,
        "several-api-servers": _number(extra.get("api-server-count")) > 1,
        "kv-producer": _is_producer(extra.get("kv-transfer-config")),
        "draft-tp-differs": spec.get("draft_tensor_parallel_size")
        not in (None, settings.models.target_model.tensor_parallel_size),
        "draft-inherits-kv": spec.get("kv_cache_dtype") is None,
        "unpadded-drafts": bool(spec.get("disable_padded_drafter_batch")),
        "other-vocabulary": bool(spec.get("use_heterogeneous_vocab")),
        "local-argmax": bool(spec.get("use_local_argmax_reduction")),
        "adaptive-verification": bool(spec.get("enable_adaptive_verification")),
        "several-tokens": settings.speculative_decoding.num_speculative_tokens > 1,
        "more-than-two-tokens": settings.speculative_decoding.num_speculative_tokens > 2,
        "sequence-parallel-misfit": _sequence_parallel_misfit(settings, extra),
        "remote-weights": "://" in settings.models.target_model.path,
        "sampling-not-repaired": "cpu-speculative-sampling" not in settings.engine.repairs,
        "yielding-not-repaired": "cpu-yielding" not in settings.engine.repairs,
        "cpu": engine is not None and engine.platform == "cpu",
        "runner-v1": runner is not None and runner.name == "v1",
        "runner-v2": runner is not None and runner.name == "v2",
    }
    return frozenset(
        name for name, holds in (found | _of_models(settings, target, draft)).items() if holds
    )


def _of_models(
    settings: Settings, target: ModelFacts | None, draft: ModelFacts | None
) -> dict[str, bool]:
    config: Mapping[str, Any] = target.text_config if target else {}
    whole: Mapping[str, Any] = target.config if target else {}
    layers: Sequence[Any] = config.get("layer_types") or ()
    return {
        "hybrid-target": any(
            "linear" in str(t) or "mamba" in str(t) or "recurrent" in str(t) for t in layers
        )
        or bool(config.get("full_attention_interval") or config.get("hybrid_override_pattern")),
        "moe-target": any(
            config.get(k) for k in ("num_experts", "num_local_experts", "n_routed_experts")
        ),
        "m-rope-target": target is not None and uses_mrope(target),
        "m-rope-draft": draft is not None and uses_mrope(draft),
        "fp8-kv": kv_cache_dtype(settings.engine.kv_cache_dtype, whole).startswith("fp8"),
        "short-draft-context": _short_context(settings, target, draft),
    }


def _short_context(settings: Settings, target: ModelFacts | None, draft: ModelFacts | None) -> bool:
    if draft:
        own = native_length(draft)
    else:
        own = None
    if target:
        served = match.served_length(settings, target)
    else:
        served = settings.engine.asked_length
    return own is not None and served is not None and own < served


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _is_producer(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("kv_role") == "kv_producer"


def _sequence_parallel_misfit(settings: Settings, extra: Mapping[str, Any]) -> bool:
    compilation = extra.get("compilation-config")
    if isinstance(compilation, Mapping):
        passes = compilation.get("pass_config")
    else:
        passes = None
    on = isinstance(passes, Mapping) and any(
        passes.get(k) for k in ("enable_sp", "enable_sequence_parallelism")
    )
    width = settings.speculative_decoding.num_speculative_tokens + 1
    size = settings.models.target_model.tensor_parallel_size
    return on and size > 1 and width % size != 0 and size % width != 0
