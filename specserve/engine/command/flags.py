"""A command held against what the installed vLLM knows, before anything loads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from pydantic import JsonValue

from specserve.config.speculation import SpeculativeDecoding
from specserve.engine.command import json_flags
from specserve.engine.command.args import OWN_FLAGS, EngineCommand
from specserve.engine.command.removed import FLAGS, instead_of
from specserve.engine.installed.introspect import EngineFacts, Flag
from specserve.errors import Change, Problem, nearest

_DRAFT_KEYS = frozenset(
    {
        "revision",
        "quantization",
        "max_model_len",
        "kv_cache_dtype",
        "attention_backend",
        "moe_backend",
    }
)
_NUMBERS = {"int": int, "float": float}
_OURS = frozenset({"--speculative-config"})
"""JSON that :func:`check_keys` judges key by key."""
_CASELESS = frozenset({"attention_backend"})


def check_flags(command: EngineCommand, engine: EngineFacts) -> Iterator[Problem]:
    """Flags that this vLLM would refuse: unknown, of wrong arity, values outside a closed set.

    Says nothing where vLLM could not be asked, nor does :func:`check_keys`.
    """
    if engine.flags:
        for option, values in _options(command.argv):
            yield from _check_flag(option, values, engine)


def check_keys(command: EngineCommand, engine: EngineFacts) -> Iterator[Problem]:
    """Unknown keys of SpeculativeConfig, and values outside a closed set."""
    if not engine.speculative_keys:
        return
    for option, values in _options(command.argv):
        if option == "--speculative-config" and values:
            config: Mapping[str, JsonValue] = json.loads(values[0])
            for key, value in config.items():
                yield from _check_key(key, value, engine)


def _options(argv: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag, values) pairs; what precedes the first flag is the entry point.

    >>> (list(_options(("python", "-P", "-m", "x", "--port", "1", "--served-model-name=a", "b",
    ...  "--grpc"))))
    [('--port', ['1']), ('--served-model-name', ['a', 'b']), ('--grpc', [])]
    """
    option: str | None = None
    values: list[str] = []
    for part in argv:
        if part.startswith("--"):
            if option is not None:
                yield option, values
            option, sign, value = part.partition("=")
            if sign:
                values = [value]
            else:
                values = []
        else:
            values.append(part)
    if option is not None:
        yield option, values


def _check_flag(option: str, values: list[str], engine: EngineFacts) -> Iterator[Problem]:
    name = option.partition(".")[0]
    flag = engine.flags.get(name) or _abbreviated(name, engine.flags)
    if flag is None:
        yield _unknown_flag(name, engine)
    elif "." not in option:
        where = _place(name)
        if flag.kind in ("switch", "toggle") and values:
            yield Problem(
                f"'{name}' takes no value, got {values[0]!r}",
                where=where,
                fix=f"{where}: true or false",
            )
        elif flag.kind not in ("switch", "toggle") and not values and not flag.optional_value:
            yield Problem(f"'{name}' needs a value", where=where, fix=f"{where}: VALUE")
        else:
            yield from _bad_values(name, values, flag)
            described = engine.json_flags.get(flag.options[0])
            if described is not None and len(values) == 1 and name not in _OURS:
                yield from json_flags.check(name, values[0], described, where)


def _bad_values(name: str, values: list[str], flag: Flag) -> Iterator[Problem]:
    for value in values:
        if flag.choices is not None and value not in flag.choices:
            yield _not_one_of(f"'{name}'", value, flag.choices, _place(name))
        elif flag.nullable and value in ("", "None"):
            continue
        elif flag.type in _NUMBERS and not _is_number(value, flag.type):
            yield Problem(f"'{name}' must be {flag.type}, got {value!r}", where=_place(name))


def _is_number(value: str, kind: str) -> bool:
    try:
        _NUMBERS[kind](value)
    except ValueError:
        return False
    return True


def _abbreviated(name: str, flags: Mapping[str, Flag]) -> Flag | None:
    """argparse takes a beginning that fits exactly one flag."""
    fitting = {id(flag): flag for option, flag in flags.items() if option.startswith(name)}
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    return None


def _unknown_flag(name: str, engine: EngineFacts) -> Problem:
    bare = name.removeprefix("--no-").removeprefix("--")
    positive = f"--{bare}"
    if name.startswith("--no-") and positive in engine.flags:
        return Problem(
            f"'{positive}' of {engine.installed} cannot be negated",
            where=_place(positive),
            fix=str(Change(_place(positive))),
            changes=(Change(_place(positive)),),
        )
    removed = FLAGS.get(bare)
    if removed is not None:
        return Problem(
            f"'{name}' is gone from vLLM ({engine.installed}): {removed.why}",
            where=_place(name),
            fix=instead_of(_place(name), removed),
            changes=() if removed.instead else (Change(_place(name)),),
        )
    hint = did_you_mean(name, [option for option in engine.flags if option.startswith("--")])
    return _unknown(f"{engine.installed} has no flag '{name}'", hint, _place(name))


def _unknown(message: str, hint: str, where: str) -> Problem:
    """Something that this vLLM does not have: to be corrected where a name is near, else taken
    out."""
    if hint:
        return Problem(message + hint, where=where, fix=f"correct {where}")
    change = Change(where)
    return Problem(message, where=where, fix=str(change), changes=(change,))


def _place(option: str) -> str:
    bare = option.removeprefix("--")
    return OWN_FLAGS.get(bare) or f"engine.extra_args.{bare.removeprefix('no-')}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause for the end of a sentence, empty when nothing is near."""
    near = nearest(word, known)
    if near:
        return f"; did you mean '{near}'?"
    return ""


def _not_one_of(what: str, value: str, choices: Iterable[str], where: str) -> Problem:
    near = nearest(value, choices)
    if near:
        hint = f" (did you mean '{near}'?)"
    else:
        hint = ""
    return Problem(
        f"{what} cannot be '{value}'{hint}; it must be one of {', '.join(choices)}",
        where=where,
        fix=f"correct {where}",
    )


def _check_key(key: str, value: JsonValue, engine: EngineFacts) -> Iterator[Problem]:
    known, where = engine.speculative_keys, key_place(key)
    bare = key.replace("-", "_")
    if bare not in known:
        message = f"SpeculativeConfig of {engine.installed} has no key '{key}'"
        yield _unknown(message, did_you_mean(bare, known), where)
        return
    choices = known[bare]
    if choices is None or value is None or not isinstance(value, str):
        return
    if bare in _CASELESS:
        given = value.upper()
    else:
        given = value
    if given not in choices and not (bare in _CASELESS and given == "AUTO"):
        yield _not_one_of(f"{bare} of {engine.installed}", value, choices, where)


def key_place(key: str) -> str:
    """The config key that writes a key of vLLM's SpeculativeConfig.

    >>> key_place("model"), key_place("prompt_lookup_max")
    ('models.draft_model.path', 'speculative_decoding.prompt_lookup_max')
    """
    if key == "model":
        return "models.draft_model.path"
    if key == "draft_tensor_parallel_size":
        return "models.draft_model.tensor_parallel_size"
    if key in _DRAFT_KEYS:
        return f"models.draft_model.{key}"
    if key == "num_speculative_tokens_per_batch_size":
        return "speculative_decoding.schedule"
    if key in SpeculativeDecoding.model_fields:
        return f"speculative_decoding.{key}"
    return f"speculative_decoding.extra_config.{key}"
