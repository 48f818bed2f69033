"""The longest sequence of a checkpoint, as vLLM derives it.

Read in 0.32, 2026-12-01: ``transformers_utils/model_arch_config_convertor.py`` for the keys and
``_get_and_verify_max_len`` in ``config/model.py`` for what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from specserve.checkpoint.facts import ModelFacts

_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_OVER_ALL_OTHERS = "model_max_length"
"""Command-R's key; where config.json has it, the others do not count."""
_YARN = frozenset({"yarn", "deepseek_yarn"})
_ALREADY_SCALED = _YARN | {"su", "longrope", "llama3", "deepseek_llama_scaling"}
"""Rope types whose length keys already hold the scaled length."""


@dataclass(frozen=True)
class ContextLength:
    """How long a sequence of a model may be, in tokens."""

    longest: int
    """vLLM refuses more, unless it is told to allow it."""
    default: int
    """What vLLM serves where nobody says: for longrope the length before scaling."""


def context_length(model: ModelFacts, *, scales_yarn: bool = False) -> ContextLength | None:
    """The model's own context; None when config.json names none.

    The tokenizer's ``model_max_length`` limits pooling models with absolute positions alone.
    ``scales_yarn``: vLLM before 0.15 multiplied the length for yarn as well.
    """
    config = model.text_config
    lengths = [n for key in _LENGTH_KEYS if (n := _count(config.get(key))) is not None]
    above = _count(config.get(_OVER_ALL_OTHERS))
    if above is not None:
        lengths = [above]
    if not lengths:
        return None
    length = min(lengths)
    ropes = list(rope_parameters(config))
    if "gemma3" not in model.model_type and "gemma3" not in str(config.get("model_type")):
        length = _scaled(length, ropes, scales_yarn=scales_yarn)
    original = _count(config.get("original_max_position_embeddings"))
    if original is not None and any(_kind(rope) == "longrope" for rope in ropes):
        return ContextLength(length, original)
    return ContextLength(length, length)


def native_length(model: ModelFacts) -> int | None:
    """The longest sequence that vLLM lets a model serve; None when nothing names one."""
    found = context_length(model)
    if found is None:
        return None
    return found.longest


def rope_parameters(config: Mapping[str, JsonValue]) -> Iterator[Mapping[str, JsonValue]]:
    """The rope parameters of a text config, one mapping per kind of layer where they are nested."""
    for key in ("rope_parameters", "rope_scaling"):
        section = config.get(key)
        if isinstance(section, Mapping):
            nested = [inner for inner in section.values() if isinstance(inner, Mapping)]
            yield from nested or [section]
            return


def uses_mrope(model: ModelFacts) -> bool:
    """Whether positions have several dimensions (text, height, width), as vLLM's ``uses_mrope``
    decides.
    """
    configs = (model.config, model.text_config)
    return any("mrope_section" in rope for config in configs for rope in rope_parameters(config))


def _kind(rope: Mapping[str, JsonValue]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _scaled(length: int, ropes: list[Mapping[str, JsonValue]], *, scales_yarn: bool) -> int:
    scaled = length
    for rope in ropes:
        factor = rope.get("factor")
        if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
            continue
        if scales_yarn and _kind(rope) in _YARN:
            original = _count(rope.get("original_max_position_embeddings"))
            scaled = int((original or length) * factor)
        elif _kind(rope) not in _ALREADY_SCALED:
            scaled = int(length * factor)
    return scaled


def _count(value: JsonValue) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return None
