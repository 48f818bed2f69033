"""Run as a script by the interpreter that has vLLM: writes what that vLLM knows to the file named
in argv[1].

Imports nothing of specserve. Names inside vLLM move between versions, so every question stands
alone: one that fails is listed under ``unanswered`` with its reason, and the others are still
answered.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import gc
import importlib
import inspect
import json
import os
import re
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MOVED = (
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
    KeyError,
    RuntimeError,
    AssertionError,
    IndexError,
)
"""What a question can raise in a version that has another name for something."""
ROOTS = ("Module", "Protocol", "Generic", "ABC", "object")
"""Bases of model classes that are not models themselves."""
KINDS = {"_StoreTrueAction": "switch", "BooleanOptionalAction": "toggle", "_AppendAction": "repeat"}


def _cli_args() -> Any:
    """The module of the server's parser: it moves (0.33, 0.29 and 0.28 each have another home)."""
    for home in ("common", "launchers"):
        try:
            return importlib.import_module(f"vllm.entrypoints.{home}.cli_args")
        except ImportError:
            continue
    return importlib.import_module("vllm.entrypoints.openai.cli_args")


def _actions() -> list[argparse.Action]:
    """The flags of the OpenAI server's own parser."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = _cli_args().make_arg_parser(FlexibleArgumentParser())
    return [a for a in parser._actions if a.option_strings and a.dest != "help"]


def flags() -> dict[str, Any]:
    """Every flag of the OpenAI server's own parser."""
    found = {}
    for action in _actions():
        kind = "value"
        if action.nargs in ("+", "*"):
            kind = "list"
        convert, nullable = _converter(action.type)
        found[action.option_strings[0]] = {
            "options": action.option_strings,
            "kind": KINDS.get(type(action).__name__, kind),
            "optional_value": action.nargs == "?",
            "choices": action.choices and [str(choice) for choice in action.choices],
            "type": getattr(convert, "__name__", None),
            "nullable": nullable,
            "default": _plain(action.default),
        }
    return found


def json_flags() -> dict[str, Any]:
    """What the flags that take JSON take: kinds of values, and the fields of a config.

    The converters are vLLM's (``engine/arg_utils.py``): ``optional_type`` and ``parse_type`` wrap
    another one, ``parse_dataclass`` has the config's class, ``json.loads`` alone has no type, which
    is the flag's field in ``EngineArgs`` or ``FrontendArgs`` then.
    """
    hints = _hints()
    found = {}
    for action in _actions():
        convert, optional = _converter(action.type)
        name = getattr(convert, "__name__", "")
        described: dict[str, Any] = {"text": name == "union_dict_and_str", "optional": optional}
        if name == "parse_dataclass":
            described |= _config_fields(typing.cast("Any", convert).__defaults__[0])
        elif name in ("loads", "union_dict_and_str"):
            described["kinds"] = _json_kinds(hints.get(action.dest))
        else:
            continue
        found[action.option_strings[0]] = described
    return found


def _converter(convert: Any) -> tuple[Any, bool]:
    """What turns a text into a value, unwrapped, and whether ``None`` means no value."""
    optional = False
    while (inner := _wrapped(convert)) is not None:
        optional = optional or getattr(convert, "__name__", "") == "_optional_type"
        convert = inner
    return convert, optional


def _plain(value: Any) -> Any:
    """A default as JSON; None where it is none, or no plain value."""
    plain = (bool, int, float, str)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, plain) and value != argparse.SUPPRESS:
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(v, plain) for v in value):
        return list(value)
    if isinstance(value, dict) and all(isinstance(v, plain) for v in value.values()):
        return value
    return None


def _wrapped(convert: Any) -> Any:
    """The converter inside another one; None where there is none."""
    if not inspect.isfunction(convert):
        return None
    return inspect.getclosurevars(convert).nonlocals.get("return_type")


def _hints() -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    return {
        field.name: field.type
        for args in (EngineArgs, _cli_args().FrontendArgs)
        for field in dataclasses.fields(args)
    }


def _json_kinds(hint: Any) -> list[str] | None:
    """``object`` or ``array``, as the type of a field says; None where it does not."""
    kinds = set()
    for part in (hint, *typing.get_args(hint)):
        origin = typing.get_origin(part) or part
        if origin is dict:
            kinds.add("object")
        elif origin in (list, tuple, set):
            kinds.add("array")
    if len(kinds) == 1:
        return sorted(kinds)
    return None


def _config_fields(config: Any) -> dict[str, Any]:
    """The fields of a config class: their kinds, and their values where the set is closed.

    A field with a validator of its own that runs first may take more than its type says.
    """
    from pydantic import TypeAdapter

    try:
        schema = TypeAdapter(config).json_schema()
    except MOVED:
        return {"kinds": ["object"]}
    decorators = config.__pydantic_decorators__
    open_to_more = {
        name
        for validator in decorators.field_validators.values()
        if validator.info.mode != "after"
        for name in validator.info.fields
    }
    changed = any(v.info.mode != "after" for v in decorators.model_validators.values())
    fields: dict[str, Any] = {}
    for name, field in schema.get("properties", {}).items():
        parts = [_resolved(part, schema) for part in field.get("anyOf", [field])]
        if {name, "*"} & open_to_more or not all("type" in part for part in parts):
            fields[name] = {"kinds": None, "choices": None}
            continue
        kinds = sorted({part["type"] for part in parts})
        closed = [
            part.get("enum") or [part["const"]] if "const" in part or "enum" in part else None
            for part in parts
            if part["type"] != "null"
        ]
        choices = None
        if closed and all(
            one is not None and all(isinstance(v, str) for v in one) for one in closed
        ):
            choices = sorted({value for one in closed for value in one or []})
        fields[name] = {"kinds": kinds, "choices": choices}
    return {
        "kinds": ["object"],
        "fields": fields,
        "closed": schema.get("additionalProperties") is False and not changed,
    }


def _resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A part of a JSON Schema; what it refers to where it does."""
    if "$ref" in part:
        found: dict[str, Any] = schema["$defs"][part["$ref"].rsplit("/", 1)[-1]]
        return found
    return part


def speculative_keys() -> dict[str, list[str] | None]:
    """Fields of SpeculativeConfig; with the values of those that are closed sets."""
    from vllm.config.speculative import SpeculativeConfig

    hints = typing.get_type_hints(SpeculativeConfig)
    return {
        field.name: _choices(hints.get(field.name))
        for field in dataclasses.fields(SpeculativeConfig)
    }


def _choices(hint: Any) -> list[str] | None:
    """The values of a Literal or an Enum, alone or with None; else None."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return list(hint.__members__)
    if typing.get_origin(hint) is typing.Literal:
        return [str(v) for v in typing.get_args(hint)]
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if len(parts) == 1 and type(None) in typing.get_args(hint):
        return _choices(parts[0])
    return None


def methods() -> list[str]:
    """Values of ``method``."""
    from vllm.config import speculative

    return list(typing.get_args(speculative.SpeculativeMethod))


def mtp_model_types() -> list[str]:
    """Draft model types that make the method ``mtp``."""
    from vllm.config import speculative

    return list(typing.get_args(speculative.MTPModelTypes))


class _AnyConfig(SimpleNamespace):
    """A stand-in for a Hugging Face config that has every attribute the override asks for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "text_config":
            return self
        if name == "get_text_config":
            return lambda: self
        return {"layer_types": [], "mtp_config": {"num_nextn_predict_layers": 1}}.get(name, 1)

    def update(self, values: dict[str, Any]) -> None:
        vars(self).update(values)


def mtp_sources() -> dict[str, str]:
    """``model_type`` and architecture of targets -> the MTP type vLLM makes of them, by its own
    override.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from vllm.config.speculative import SpeculativeConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    known = set(mtp_model_types())
    out: dict[str, str] = {}
    for name in sorted(
        {*_CONFIG_REGISTRY, *CONFIG_MAPPING_NAMES, *ModelRegistry.get_supported_archs()}
    ):
        model_type, architecture = name, "-"
        if name[:1].isupper():
            model_type, architecture = "-", name
        config = _AnyConfig(
            model_type=model_type,
            architectures=[architecture],
            quantization_config=None,
            mtp_layer_types=None,
        )
        try:
            result = SpeculativeConfig.hf_config_override(typing.cast("Any", config)).model_type
        except MOVED:
            continue
        if result in known:
            out[name] = result
    return out


def model_types() -> list[str]:
    """``model_type`` of every config.json that can be parsed without code of its own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return sorted({*CONFIG_MAPPING.keys(), *_CONFIG_REGISTRY})


def architectures() -> list[str]:
    """Model classes that this vLLM, with its plugins, can load."""
    from vllm.model_executor.models import ModelRegistry

    return sorted(ModelRegistry.get_supported_archs())


def without_eagle3() -> list[str]:
    """Architectures whose class surely lacks the interface through which EAGLE3 and DFlash read
    hidden states.

    From the sources' class statements: importing every model would take minutes. Where a base class
    is not one of a class statement, nothing is said.
    """
    from vllm.model_executor import models

    folder, homes = Path(models.__file__).parent, set()
    bases: dict[str, set[str]] = {name: set() for name in ROOTS}
    for path in folder.rglob("*.py"):
        module = ".".join((models.__name__, *path.relative_to(folder).with_suffix("").parts))
        for name, listed in re.findall(
            r"^class (\w+)(?:\(([^)]*)\))?:", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            bases.setdefault(name, set()).update(
                re.findall(r"(\w+)\s*(?:\[[^\]]*\])?\s*(?:,|$)", listed)
            )
            homes.add((module, name))

    def family(name: str, seen: set[str]) -> set[str]:
        if name not in seen:
            seen.add(name)
            for base in bases.get(name, ()):
                family(base, seen)
        return seen

    out = []
    for architecture, entry in models.ModelRegistry.models.items():
        name = getattr(entry, "class_name", "")
        if (getattr(entry, "module_name", ""), name) in homes:
            names = family(name, set())
            if "SupportsEagle3" not in names and names <= bases.keys():
                out.append(architecture)
    return sorted(out)


def transformers_architectures() -> list[str]:
    """Model classes that vLLM could run through its Transformers backend."""
    import transformers

    return sorted(
        n for n in dir(transformers) if n.endswith(("ForCausalLM", "ForConditionalGeneration"))
    )


def environment_names() -> list[str]:
    """The ``VLLM_*`` variables that it reads."""
    import vllm.envs

    return sorted(vllm.envs.environment_variables)


def platform() -> str:
    """``cpu``, ``cuda``, ``rocm``, ...: what this vLLM would run on."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def has_triton() -> bool:
    """Whether Triton kernels can run: without it Model Runner V2 is never chosen."""
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def default_max_num_seqs() -> int | None:
    """The server's default for one GPU;
    None where it depends on a GPU that this process must not touch.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    if platform() != "cpu":
        return None
    return int(EngineArgs.get_batch_defaults(1)[1][UsageContext.OPENAI_API_SERVER])


class _Plain(SimpleNamespace):
    """A config of vLLM's with nothing switched on, whatever later versions ask of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("is_", "_is_", "uses_", "has_", "_dflash_", "_get_")):
            return lambda *_: False
        return None


def runner_refusals() -> dict[str, dict[str, list[str]]]:
    """Method -> what Model Runner V1 and V2 each say they do not support, by vLLM's own rules."""
    from vllm.config.vllm import VllmConfig

    out: dict[str, dict[str, list[str]]] = {}
    for method in methods():
        config = _Plain(
            speculative_config=_Plain(
                method=method,
                parallel_drafting=method in ("dflash", "dspark"),
                use_heterogeneous_vocab=False,
                enable_adaptive_verification=False,
            ),
            parallel_config=_Plain(
                pipeline_parallel_size=1,
                prefill_context_parallel_size=1,
                decode_context_parallel_size=1,
            ),
            scheduler_config=_Plain(async_scheduling=False),
            compilation_config=_Plain(),
        )
        out[method] = {}
        for runner in ("v1", "v2"):
            rule = getattr(VllmConfig, f"_get_{runner}_model_runner_unsupported_features", None)
            if rule is not None:  # 0.28 had rules of V2 alone
                out[method][runner] = [str(x) for x in rule(config)]
    return out


def main() -> None:
    """Answer every question and write the answers as JSON."""
    # Half of the time would go into collecting garbage while vLLM is imported, and into taking it
    # apart at the end.
    gc.disable()
    # A vLLM that fails here is broken, not merely another version.
    import vllm.engine.arg_utils  # noqa: F401

    answers: dict[str, Any] = {}
    unanswered: dict[str, str] = {}
    for question in (
        flags,
        json_flags,
        speculative_keys,
        methods,
        mtp_model_types,
        mtp_sources,
        model_types,
        architectures,
        without_eagle3,
        transformers_architectures,
        environment_names,
        platform,
        has_triton,
        default_max_num_seqs,
        runner_refusals,
    ):
        try:
            answers[question.__name__] = question()
        except MOVED as error:
            unanswered[question.__name__] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1]).write_text(json.dumps(answers | {"unanswered": unanswered}), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)
