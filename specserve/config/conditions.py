"""The rules between keys that JSON Schema can state, for editors and for `helm install`.

`specserve.config.rules` is the one place that judges a config, with a sentence and a remedy each.
What stands here is generated from the same tables and says the part that a schema can say, so that
a values file fails before a pod exists. A schema cannot compare two numbers or two texts: gaps
between the rows of a schedule, ``prompt_lookup_min`` above ``prompt_lookup_max``,
``max_batch_size`` above ``max_num_seqs``, thresholds that cross and a draft that is the target
itself are refused when the config is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from pydantic import JsonValue

from specserve.config.speculation import (
    CONTROLLABLE,
    METHODS,
    NEEDS_DRAFT,
    ONLY_FOR,
    SAME_DTYPE,
    WITHOUT_DRAFT,
)

Schema: TypeAlias = dict[str, JsonValue]

_TEXT: Schema = {"type": "string", "pattern": r"[$]\{"}
"""``${NAME}``, which is known only where the config is loaded."""
_ON: JsonValue = [True, "true", "yes", "on"]
_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Tensor parallel sizes that have a condition each; others are judged when the config is loaded."""
_LONGEST = 16
"""The largest number of tokens per draft that has a condition of its own."""


def conditions() -> list[JsonValue]:
    """JSON Schemas that hold beside the types of the keys (an ``allOf``)."""
    return [_tls("cert_file", "key_file"), _tls("key_file", "cert_file"), *_speculation()]


def _below(*path: str, is_: Schema, required: bool = False) -> Schema:
    """The schema of a value some keys down; without ``required`` an absent key passes."""
    schema = is_
    for key in reversed(path):
        schema = {"properties": {key: schema}}
        if required:
            schema["required"] = [key]
    return schema


def _if(*premises: Schema, then: Schema) -> Schema:
    return {"if": {"allOf": list(premises)}, "then": then}


def _one_of(values: list[JsonValue], *, unless: Schema) -> Schema:
    """One of these values; ``if`` and ``then`` give a clearer message than ``anyOf``."""
    return {"if": {"not": unless}, "then": {"enum": values}}


def _tls(one: str, other: str) -> Schema:
    given = _below("server", "tls", one, is_={"type": "string"}, required=True)
    both: Schema = {"properties": {other: {"type": "string"}}, "required": [other]}
    return _if(given, then=_below("server", "tls", is_=both))


def _spec(key: str, is_: Schema, *, required: bool = False) -> Schema:
    return _below("speculative_decoding", key, is_=is_, required=required)


def _speculation() -> Iterator[Schema]:
    speculates = _spec("enabled", {"enum": _ON})
    for premises, then in [*_methods(), *_drafts(), *_schedules(), *_control()]:
        yield _if(speculates, *premises, then=then)


def _methods() -> Iterator[tuple[list[Schema], Schema]]:
    has_draft = _below(
        "models",
        is_={
            "required": ["draft_model"],
            "properties": {"draft_model": {"type": "object", "required": ["path"]}},
        },
    )
    yield [_spec("method", {"type": "null"})], has_draft
    needing: list[JsonValue] = [*sorted(NEEDS_DRAFT)]
    yield [_spec("method", {"enum": needing}, required=True)], has_draft
    for key, methods in ONLY_FOR.items():
        others: list[JsonValue] = [each for each in METHODS if each not in methods]
        if methods <= WITHOUT_DRAFT:
            # Without a method it is the draft's, and these methods have none.
            others.append(None)
            yield [_spec("method", {"enum": others})], _spec(key, {"type": "null"})
        else:
            yield [_spec("method", {"enum": others}, required=True)], _spec(key, {"type": "null"})
    yield (
        [_spec("use_heterogeneous_vocab", {"enum": _ON}, required=True)],
        _spec("draft_sample_method", _one_of(["greedy", None], unless=_TEXT)),
    )


def _drafts() -> Iterator[tuple[list[Schema], Schema]]:
    lookups: list[JsonValue] = [*sorted(WITHOUT_DRAFT)]
    loads = _spec("method", {"not": {"anyOf": [{"enum": lookups}, _TEXT]}})
    for dtype in ("float16", "bfloat16", "float32"):
        same: list[JsonValue] = [dtype, "auto", None]
        spelt: list[JsonValue] = [dtype]
        for name, means in SAME_DTYPE.items():
            if means == dtype:
                same.append(name)
                spelt.append(name)
        yield (
            [loads, _below("models", "target_model", "dtype", is_={"enum": spelt}, required=True)],
            _below("models", "draft_model", "dtype", is_=_one_of(same, unless=_TEXT)),
        )
    for width in _WIDTHS:
        target = _below(
            "models",
            "target_model",
            "tensor_parallel_size",
            is_={"const": width},
            required=width != 1,
        )
        widths: list[JsonValue] = [None, 1]
        if width > 1:
            widths.append(width)
        taken = _one_of(widths, unless={"type": "string"})
        yield [loads, target], _below("models", "draft_model", "tensor_parallel_size", is_=taken)


def _schedules() -> Iterator[tuple[list[Schema], Schema]]:
    rows: Schema = {"type": "array"}
    yield [], _spec("schedule", {"minItems": 1})
    yield (
        [],
        _spec("schedule", {"prefixItems": [{"prefixItems": [{"enum": [1, "1"]}]}]}),
    )
    yield [_spec("schedule", rows, required=True)], _spec("max_batch_size", {"type": "null"})
    for longest in range(1, _LONGEST + 1):
        row: Schema = {"prefixItems": [{}, {}, {"minimum": 0, "maximum": longest}]}
        yield (
            [_spec("num_speculative_tokens", {"const": longest}, required=True)],
            _spec("schedule", {"items": row}),
        )


def _control() -> Iterator[tuple[list[Schema], Schema]]:
    live: list[Schema] = [_spec("control", {"const": "live"}, required=True)]
    others: list[JsonValue] = [each for each in METHODS if each not in CONTROLLABLE]
    yield live, _spec("method", {"not": {"enum": others}})
    yield live, _below("models", "target_model", "pipeline_parallel_size", is_={"maximum": 1})
    verifies: Schema = {"not": {"const": True}}
    yield (
        live,
        _below(
            "speculative_decoding", "extra_config", "enable_adaptive_verification", is_=verifies
        ),
    )
