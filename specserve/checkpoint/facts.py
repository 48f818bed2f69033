"""What a checkpoint's own files say: config, tensors, tokenizer. Read, never loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from specserve.checkpoint.safetensors import DTYPE_BITS, TensorFacts
from specserve.errors import PreflightRefused
from specserve.findings import Finding

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of config.json under which a model of several parts has its language model."""
_NESTED_CONFIGS = frozenset({*TEXT_CONFIGS, "vision_config", "audio_config"})


ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types that draft from the target's own KV cache."""
_WRAPPERS = ("transformer_layer_config", "model")
"""Keys under which a head has the config of its layers: speculators, and vLLM's EAGLE format."""


class Source(Protocol):
    """Where a checkpoint's files come from: a folder, or a repository on the Hub."""

    @property
    def name(self) -> str:
        """As configured."""

    @property
    def folder(self) -> Path | None:
        """Where the files lie on this machine; None when they stay remote."""

    @property
    def revision(self) -> str | None:
        """The resolved commit; None for a plain folder."""

    def files(self) -> Mapping[str, int]:
        """File name -> size in bytes, of every file of the checkpoint."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Up to ``length`` bytes of one file from ``start``."""


class CheckpointRefused(PreflightRefused):
    """Raised when a checkpoint cannot be read, with every reason as a finding."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__([f.as_problem() for f in self.findings])


@dataclass(frozen=True)
class ModelFacts:
    """One checkpoint, as its files describe it.

    What was not found is None or empty, never a guess.
    """

    path: str
    """As configured: a folder or a Hub id."""
    config: Mapping[str, Any]
    """config.json, whole."""
    folder: Path | None = None
    """Where the files lie on this machine; None when only metadata was read."""
    revision: str | None = None
    """The resolved Hub commit; None for a plain folder."""
    tensors: Mapping[str, TensorFacts] | None = None
    """Name -> header entry; None when no header was at hand (index only, or nothing)."""
    total_size_bytes: int | None = None
    """Bytes of all tensors: sum of headers, else the index's ``metadata.total_size``."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    """Names of all files seen in the checkpoint."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """File name -> bytes."""
    chat_template: str | None = None
    """From chat_template.jinja, chat_template.json or tokenizer_config.json."""
    findings: tuple[Finding, ...] = ()
    """What reading already showed: weights missing, pickles, GGUF, a shard that the index names and
    nobody has.
    """
    source: Source | None = field(default=None, repr=False, compare=False)
    """To read more: tokenizer files, a small tensor."""

    def overridden_by(self, overrides: Mapping[str, Any]) -> ModelFacts:
        """These facts with vLLM's ``--hf-overrides`` laid over config.json.

        As vLLM 0.32 does it (``config/model.py``, ``_apply_dict_overrides``): the config of a part
        takes the keys that are named, and any other value is replaced whole.

        >>> model = ModelFacts("m", {"a": {"x": 1}, "text_config": {"x": 1, "y": 2}})
        >>> model.overridden_by({"a": {"z": 3}, "text_config": {"x": 3}}).config
        {'a': {'z': 3}, 'text_config': {'x': 3, 'y': 2}}
        """
        if not overrides:
            return self
        parts = {
            key: _laid_over(self.config[key], value)
            for key, value in overrides.items()
            if key in _NESTED_CONFIGS and key in self.config
        }
        return replace(self, config={**self.config, **overrides, **parts})

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json: ``text_config`` (or alike) where nested, a
        head's own layers where they are wrapped, else the whole.
        """
        for key in TEXT_CONFIGS:
            nested = self.config.get(key)
            if isinstance(nested, Mapping):
                inner = nested.get("text_config")
                if isinstance(inner, Mapping):
                    return inner
                return nested
        return unwrapped(self.config)

    @property
    def shares_targets_cache(self) -> bool:
        """Whether all its attention reads the target's KV cache (vLLM's ``v1/spec_decode/gemma4``
        sets ``kv_sharing_target_layer_name`` for every layer of an assistant).
        """
        return self.model_type in ASSISTANTS

    @property
    def architectures(self) -> tuple[str, ...]:
        """``architectures`` of config.json."""
        names = self.config.get("architectures")
        if isinstance(names, list):
            return tuple(str(n) for n in names)
        return ()

    @property
    def model_type(self) -> str:
        """``model_type`` of config.json; empty when absent."""
        name = self.config.get("model_type")
        if isinstance(name, str):
            return name
        return ""

    @property
    def parameters(self) -> int | None:
        """Elements of all tensors;
        None without headers. Packed quantized weights count as they are stored.
        """
        if self.tensors is None:
            return None
        return sum(t.nbytes * 8 // DTYPE_BITS[t.dtype] for t in self.tensors.values())


def unwrapped(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A head's config as vLLM unwraps it: that of its layers, and over it what stands outside but
    for the wrapper's own name. Any other config is itself.

    >>> unwrapped({"model_type": "eagle", "model": {"model_type": "llama"}, "k": 1})
    {'model_type': 'llama', 'k': 1}
    """
    for key in _WRAPPERS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            outside = {
                k: v for k, v in config.items() if k not in {"architectures", "model_type", key}
            }
            return {**inner, **outside}
    return config


def _laid_over(value: object, override: object) -> object:
    """The override; where both are mappings, key by key."""
    if not isinstance(value, Mapping) or not isinstance(override, Mapping):
        return override
    merged = {key: _laid_over(value.get(key), inner) for key, inner in override.items()}
    return {**value, **merged}
