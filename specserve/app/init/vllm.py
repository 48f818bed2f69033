"""vLLM's arguments and environment as keys of ours; ``extra_args`` only for what has none."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence

import yaml
from pydantic import JsonValue

from specserve.app.init import template
from specserve.app.init.arguments import Argument, kinds, parse
from specserve.app.init.sheet import Sheet, hidden_text, hide, hide_text
from specserve.config import legacy
from specserve.config.extra_args import ExtraArgs, read_flag
from specserve.config.models import DraftModel
from specserve.config.speculation import WITHOUT_DRAFT, SpeculativeDecoding
from specserve.engine.command.removed import FLAGS as REMOVED
from specserve.engine.command.removed import VARIABLES as REMOVED_VARIABLES
from specserve.engine.installed.profiles import newest

_SPEC, _DRAFT, _TARGET = (
    "speculative_decoding",
    "models.draft_model",
    "models.target_model",
)
VLLM_GPU_SHARE = 0.92
"""vLLM 0.32's own ``--gpu-memory-utilization`` (``config/cache.py``)."""
EVERY_ADDRESS = "0.0.0.0"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_OWN = {
    name: key
    for name, key in legacy.OWN_FLAGS.items()
    if not key.startswith(_SPEC)
    and name
    not in (
        "api_key",
        "hf_token",
        "headless",
        "spec_model",
        "served_model_name",
        "model",
    )
}
"""vLLM's flags (underscores) -> the key that says the same."""
_SPEC_FLAGS: Mapping[str, str] = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "speculative_method": "method",
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_model_quantization": "quantization",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "acceptance_method": "rejection_sample_method",
    "spec_decoding_acceptance_method": "rejection_sample_method",
}
"""Flags of vLLM's, today's short ones and those of up to 0.8 -> the key of SpeculativeConfig."""
_DRAFT_KEYS: Mapping[str, str] = {
    "model": "path",
    "draft_tensor_parallel_size": "tensor_parallel_size",
    **{name: name for name in DraftModel.model_fields if name not in ("path", "dtype", "sha256")},
}
_ONLY_FOR = {"prompt_lookup_": ("ngram", "ngram_gpu"), "suffix_": ("suffix",)}
_HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"})
_API_KEY = "VLLM_API_KEY"
_OF_CONTAINER = frozenset(
    {
        "PATH",
        "HOME",
        "HOSTNAME",
        "USER",
        "SHELL",
        "PWD",
        "TZ",
        "LANG",
        "LC_ALL",
        "TERM",
        "PUID",
        "PGID",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_DISABLE_REQUIRE",
        "POD_IP",
        "POD_NAME",
        "POD_NAMESPACE",
        "NODE_NAME",
    }
)
"""Variables of a container or login, not of the engine."""
_OF_ENGINE = re.compile(
    r"(VLLM|CUDA|NCCL|HF|HUGGING|TRANSFORMERS|TORCH|PYTORCH|OMP|MKL|GLOO|UCX|RAY|TOKENIZERS"
    r"|ROCM|HIP|HSA|AITER|TRITON|FLASHINFER|LMCACHE|NIXL|SAFETENSORS|NVIDIA|XDG)_"
    r"|(HTTPS?|NO)_PROXY|https?_proxy|no_proxy|LD_PRELOAD|LD_LIBRARY_PATH|PYTHON"
)
"""Exported variables that are the engine's and not the script's own."""
_RENAMED_SAME_VALUE = ("structured-outputs-config.", "eplb-config.", "pooler-config")
_JSON_LISTS = frozenset({"allowed-origins", "allowed-methods", "allowed-headers"})
_WRONG_IN_OURS = frozenset({"none", "null"})


def translate(
    sheet: Sheet,
    words: Sequence[str],
    env: Mapping[str, str],
    exported: Mapping[str, str],
    *,
    in_container: bool,
    of_vllm: bool = True,
) -> None:
    """Write what the arguments and the environment of a vLLM server say into the sheet."""
    reader = _Reader(sheet)
    for argument in parse(words):
        reader.take(argument)
    reader.finish()
    _environment(sheet, env, exported)
    _address(sheet, in_container=in_container)
    if of_vllm and "engine.gpu_memory_utilization" not in sheet.values:
        sheet.put(
            "engine.gpu_memory_utilization",
            VLLM_GPU_SHARE,
            "not given: vLLM 0.32's default; that of specserve is 0.9",
        )


class _Reader:
    """One command's arguments, in order: the last of two wins, as in vLLM."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.spec: dict[str, JsonValue] = {}
        self.has_spec = False
        self.extra: dict[str, JsonValue] = {}
        self.headless = False

    def take(self, argument: Argument) -> None:
        """One argument."""
        if any(template.commands_in(value) for value in (argument.written, *argument.values)):
            self.has_spec = self.has_spec or argument.name == "speculative-config"
            shown = _written(argument)
            self.sheet.leave(shown, "nothing is executed to learn its value; write it yourself")
            return
        if not argument.name:
            self._positional(argument.values[0])
            return
        name = legacy.normal(argument.name)
        if name == "speculative_config":
            self._speculative(argument)
        elif name in _SPEC_FLAGS and not argument.path:
            self.has_spec = True
            self.spec[_SPEC_FLAGS[name]] = _scalar_raw(_first(argument))
        elif name == "model" and not argument.path:
            self._positional(_first(argument), named=True)
        elif name == "served_model_name":
            self._names(argument)
        elif name == "api_key":
            self._api_key(argument)
        elif name == "hf_token":
            _hub_token(self.sheet, _first(argument) or template.variable("HF_TOKEN"))
        elif name == "headless":
            self.headless = True
        elif name == "config":
            self.sheet.leave(
                f"--config {_first(argument)}",
                "the file was not read; give it to init as well",
            )
        elif name in _OWN and not argument.path:
            self._own(argument, _OWN[name])
        elif argument.name in REMOVED and argument.name not in kinds():
            self._removed(argument)
        elif name in legacy.TODAY and argument.name not in kinds():
            self.sheet.leave(_written(argument), legacy.TODAY[name])
        else:
            self._extra(argument)

    def _positional(self, word: str, *, named: bool = False) -> None:
        if f"{_TARGET}.path" in self.sheet.values:
            if named:
                self.sheet.say(f"the model is given twice; {hidden_text(word)} wins")
            else:
                self.sheet.leave(word, "a word that belongs to no flag")
                return
        self.sheet.put(f"{_TARGET}.path", template.config_text(word))

    def _names(self, argument: Argument) -> None:
        names: list[JsonValue] = [template.config_text(value) for value in argument.values]
        if len(names) == 1:
            self.sheet.put("server.served_model_name", names[0])
        elif names:
            self.sheet.put("server.served_model_name", names)

    def _api_key(self, argument: Argument) -> None:
        if not argument.values:
            return
        if len(argument.values) > 1:
            self.sheet.leave(
                f"{len(argument.values)} API keys",
                "write them into a file, one a line, and set server.api_key_file to it",
            )
        _api_key(self.sheet, argument.values[0])

    def _own(self, argument: Argument, key: str) -> None:
        sheet = self.sheet
        if argument.kind in ("toggle", "switch"):
            is_on = not argument.negated
            if argument.values:
                is_on = argument.values[0].lower() not in ("false", "0", "no")
            sheet.put(key, is_on)
            return
        value = _first(argument)
        if value == "" or value.lower() in _WRONG_IN_OURS:
            return
        if key == "engine.drain_timeout_seconds" and value == "0":
            sheet.leave("--shutdown-timeout 0", "specserve always lets running requests finish")
            return
        if key in sheet.values:
            sheet.say(f"{argument.written} is given twice; the last wins, as in vLLM")
        sheet.put(key, _scalar(value))

    def _speculative(self, argument: Argument) -> None:
        self.has_spec = True
        if argument.path:
            _put_at(self.spec, argument.path, _dotted(argument))
            return
        text = _first(argument)
        found = read_json(text, self.sheet, argument.written)
        if isinstance(found, dict):
            self.spec |= {key.replace("-", "_"): value for key, value in found.items()}
        elif text.strip().lower() in ("", *_WRONG_IN_OURS):
            self.has_spec = bool(self.spec)
        else:
            self.sheet.leave(
                f"{argument.written} {text}",
                "it is not JSON; the keys of speculative_decoding say it",
            )

    def _removed(self, argument: Argument) -> None:
        removed = REMOVED[argument.name]
        instead = removed.instead or ""
        if instead.startswith(_RENAMED_SAME_VALUE):
            flag, *path = instead.split(".")
            value: JsonValue = not argument.negated
            if argument.values:
                value = _scalar(argument.values[0])
            if path:
                value = {**_mapping(self.extra.get(flag)), path[0]: value}
            self.extra[flag] = value
            self.sheet.say(f"{argument.written}: its place today is --{instead}")
        else:
            self.sheet.leave(_written(argument), f"removed from vLLM: {removed.why}")

    def _extra(self, argument: Argument) -> None:
        name = argument.name
        if argument.kind is None:
            self.sheet.say(
                f"{argument.written}: vLLM {newest()} has no such flag; passed on as it is"
            )
        if argument.path:
            here = _mapping(self.extra.get(name))
            _put_at(
                here,
                argument.path,
                hide(argument.path[-1], _dotted(argument), self.sheet),
            )
            self.extra[name] = here
            return
        value = self._value(argument)
        if argument.kind == "repeat" and isinstance(self.extra.get(name), list):
            value = [*_items(self.extra[name]), *_items(value)]
        elif name in self.extra and isinstance(value, dict):
            value = {**_mapping(self.extra[name]), **value}
        elif name in self.extra:
            self.sheet.say(f"{argument.written} is given twice; the last wins, as in vLLM")
        self.extra[name] = value

    def _value(self, argument: Argument) -> JsonValue:
        name, values = argument.name, argument.values
        if argument.kind in ("toggle", "switch"):
            if values:
                return values[0].lower() not in ("false", "0", "no")
            return not argument.negated
        if not values:
            return not argument.negated
        if argument.kind in ("list", "repeat"):
            return [hide(name, _scalar_raw(value), self.sheet) for value in values]
        text = values[0]
        if text.lstrip().startswith("{"):
            found = read_json(text, self.sheet, argument.written)
            if isinstance(found, dict):
                return hide(name, found, self.sheet)
        if name in _JSON_LISTS:
            with contextlib.suppress(ValueError):
                return hide(name, json.loads(text), self.sheet)
        return hide(name, _scalar_raw(text), self.sheet)

    def finish(self) -> None:
        """What can be said only when everything was read."""
        self._speculation()
        if self.headless and not self.sheet.values.get("engine.node_rank"):
            self.sheet.leave("--headless", "set engine.node_rank: 1 or more; rank 0 has the API")
        if self.extra:
            merged = ExtraArgs(self.extra).values
            self.sheet.put("engine.extra_args", {**merged})

    def _speculation(self) -> None:
        sheet, spec = self.sheet, dict(self.spec)
        if self.has_spec and not spec:
            sheet.put(
                f"{_SPEC}.enabled",
                False,
                "how the command speculates could not be read",
            )
            return
        if not spec:
            sheet.put(f"{_SPEC}.enabled", False, "the command does not speculate")
            return
        method = spec.pop("method", None)
        model = spec.get("model")
        if method is None and isinstance(model, str) and model.strip("[]") in WITHOUT_DRAFT:
            method = model.strip("[]")
        if method is not None:
            sheet.put(f"{_SPEC}.method", _config_value(method))
        if method in WITHOUT_DRAFT:
            spec.pop("model", None)
        extra: dict[str, JsonValue] = {}
        for key, value in spec.items():
            if value is None:
                continue
            self._spec_key(key, value, str(method), extra, has_draft="model" in spec)
        if extra:
            sheet.put(f"{_SPEC}.extra_config", extra)

    def _spec_key(
        self,
        key: str,
        value: JsonValue,
        method: str,
        extra: dict[str, JsonValue],
        *,
        has_draft: bool,
    ) -> None:
        sheet = self.sheet
        for prefix, methods in _ONLY_FOR.items():
            if key.startswith(prefix) and method not in methods:
                sheet.leave(f'"{key}": {value}', f"method {method} does not read it")
                return
        if key == "use_heterogeneous_vocab" and method not in ("draft_model", "None"):
            sheet.leave(f'"{key}": {value}', f"method {method} does not read it")
            return
        if key in _DRAFT_KEYS and has_draft:
            sheet.put(f"{_DRAFT}.{_DRAFT_KEYS[key]}", _config_value(_number(value)))
        elif key == "num_speculative_tokens_per_batch_size":
            sheet.put(f"{_SPEC}.schedule", _config_value(value))
        elif key == "disable_by_batch_size":
            sheet.put(
                f"{_SPEC}.max_batch_size",
                _config_value(value),
                "vLLM up to 0.8 counted waiting requests, this the sequences of a step",
            )
        elif key in SpeculativeDecoding.model_fields and key not in (
            "extra_config",
            "enabled",
        ):
            sheet.put(f"{_SPEC}.{key}", _config_value(_number(value)))
        else:
            extra[key] = hide(key, value, sheet)


def _number(value: JsonValue) -> JsonValue:
    """A number that was written as text."""
    if isinstance(value, str):
        return _scalar_raw(value)
    return value


def _config_value(value: JsonValue) -> JsonValue:
    """A value with its variables as a config writes them."""
    match value:
        case str():
            return template.config_text(value)
        case dict():
            return {key: _config_value(item) for key, item in value.items()}
        case list():
            return [_config_value(item) for item in value]
        case _:
            return value


def read_json(text: str, sheet: Sheet, flag: str) -> JsonValue:
    """JSON, or what was meant to be: with variables for numbers, a placeholder without quotes, or
    Python's single quotes; None where it cannot be read."""
    if text[:1] in ("'", '"') and text[-1:] == text[:1]:
        text = text[1:-1]
    for attempt in (text, template.quoted_variables(text), template.resolved(text)):
        with contextlib.suppress(ValueError, RecursionError):
            found: JsonValue = json.loads(attempt)
            if attempt != text and attempt == template.resolved(text):
                sheet.say(f"{flag}: variables inside its JSON are taken at their defaults")
            return found
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        loose: JsonValue = yaml.safe_load(text)
        if isinstance(loose, dict) and all(value is not None for value in loose.values()):
            sheet.say(
                f"{flag}: was not valid JSON; read as {hidden_text(json.dumps(loose, default=str))}"
            )
            return {str(key): value for key, value in loose.items()}
    return None


def _dotted(argument: Argument) -> JsonValue:
    """The value of a dotted flag."""
    value: JsonValue = True
    if argument.values:
        value = argument.values[0]
    key = argument.written.lstrip("-")
    return read_flag(key, value).value


def _put_at(mapping: dict[str, JsonValue], path: Sequence[str], value: JsonValue) -> None:
    here = mapping
    for key in path[:-1]:
        inner = _mapping(here.get(key))
        here[key] = inner
        here = inner
    here[path[-1]] = value


def _mapping(value: JsonValue) -> dict[str, JsonValue]:
    if isinstance(value, dict):
        return dict(value)
    return {}


def _items(value: JsonValue) -> list[JsonValue]:
    if isinstance(value, list):
        return value
    return [value]


def _first(argument: Argument) -> str:
    if argument.values:
        return argument.values[0]
    return ""


def _written(argument: Argument) -> str:
    if not argument.name:
        return argument.values[0]
    return " ".join([argument.written, *argument.values])


def _scalar(text: str) -> JsonValue:
    """A text as the file writes it: a number where it reads the same as one."""
    return _config_value(_scalar_raw(text))


def _scalar_raw(text: str) -> JsonValue:
    if re.fullmatch(r"-?(0|[1-9]\d{0,17})", text):
        return int(text)
    if re.fullmatch(r"-?(0|[1-9]\d{0,8})?\.\d{1,8}", text):
        return float(text)
    return text


def _api_key(sheet: Sheet, value: str) -> None:
    variables = template.variables_in(value)
    if variables and not template.resolved(value):
        sheet.put("server.api_key", template.config_text(value))
        return
    sheet.put(
        "server.api_key",
        f"${{{_API_KEY}}}",
        "the key itself was not copied: set the variable, or use api_key_file",
    )


def _hub_token(sheet: Sheet, value: str) -> None:
    variables = template.variables_in(value)
    if "" in variables.values():
        sheet.say(
            "the Hub token is taken from HF_TOKEN where it is set; "
            "models.hub_token_file names a file"
        )
        return
    name = "HF_TOKEN"
    if variables and not template.resolved(value):
        name = next(iter(variables))
    sheet.put(
        "models.hub_token",
        f"${{{name}}}",
        "the token itself was not copied: set the variable, or use hub_token_file",
    )


def is_of_engine(name: str) -> bool:
    """Whether a variable is read by the engine or what it stands on, as far as names tell.

    >>> is_of_engine("VLLM_LOGGING_LEVEL"), is_of_engine("MODEL")
    (True, False)
    """
    return _OF_ENGINE.match(name) is not None


def _environment(sheet: Sheet, env: Mapping[str, str], exported: Mapping[str, str]) -> None:
    """Variables of the engine; secrets as variables, those of a container left out."""
    ours: dict[str, JsonValue] = {}
    meant = {name: value for name, value in exported.items() if is_of_engine(name)}
    for name, value in {**meant, **env}.items():
        if template.commands_in(value):
            sheet.leave(f"{name}={value}", "nothing is executed to learn its value")
        elif name in _HUB_TOKENS:
            if value:
                _hub_token(sheet, value)
        elif name == _API_KEY:
            if value and "server.api_key" not in sheet.values:
                _api_key(sheet, value)
        elif name in _OF_CONTAINER or not re.fullmatch(r"[A-Za-z_]\w*", name):
            sheet.leave(f"{name}", "a variable of the container, not of the engine")
        elif name in REMOVED_VARIABLES:
            _removed_variable(sheet, name, value)
        elif template.variables_in(value) in ({name: ""}, {name: None}):
            sheet.say(f"{name} is passed on from the environment where it is set")
        else:
            ours[name] = _variable_value(name, value, sheet)
    if ours:
        sheet.put("engine.env", ours)


def _removed_variable(sheet: Sheet, name: str, value: str) -> None:
    """A variable that vLLM no longer reads; the backend of attention has a flag today."""
    removed = REMOVED_VARIABLES[name]
    extra = _mapping(sheet.values.get("engine.extra_args"))
    if name == "VLLM_ATTENTION_BACKEND" and removed.instead and removed.instead not in extra:
        extra[removed.instead] = _scalar(value)
        sheet.put("engine.extra_args", extra)
        sheet.say(f"{name}: its place today is --{removed.instead}")
        return
    sheet.leave(f"{name}={value}", f"removed from vLLM: {removed.why}")


def _variable_value(name: str, value: str, sheet: Sheet) -> str:
    """An unset variable is empty in the environment of a process, and no error."""
    text = hide_text(name, value, sheet)
    for variable, default in template.variables_in(value).items():
        if default is None:
            text = text.replace(f"${{{variable}}}", f"${{{variable}:-}}")
    return text


def _address(sheet: Sheet, *, in_container: bool) -> None:
    """Where it listens: vLLM on every address without a key, specserve only when told so."""
    if "server.host" not in sheet.values and in_container:
        sheet.put("server.host", EVERY_ADDRESS, "a container is reached from outside")
    host = sheet.values.get("server.host")
    if host is None:
        sheet.say(
            "no --host: vLLM listens on every address, specserve on 127.0.0.1 until server.host "
            "(and server.api_key_file) is set"
        )
    elif host not in _LOOPBACK and "server.api_key" not in sheet.values:
        sheet.put(
            "server.allow_unauthenticated",
            True,
            "as the command had it: anyone who reaches the port can use the model",
        )


def variables_needed(values: Iterable[JsonValue]) -> list[str]:
    """Variables without a default that the file's values name, in order."""
    text = json.dumps(list(values)).replace("$$", "")
    return list(dict.fromkeys(re.findall(r"\$\{(\w+)\}", text)))
