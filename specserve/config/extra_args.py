"""vLLM's flags in ``engine.extra_args``: the one place that knows how each may be spelled.

Read in vLLM 0.32's parser (``vllm/utils/argparse_utils.py``, ``engine/arg_utils.py``, 2026-12-01):
dashes and underscores are the same in a name; ``--no-x`` turns ``--x`` off; ``--x.a.b 1`` is ``--x
'{"a": {"b": 1}}'``; ``-O3`` is ``--optimization-level 3``. A flag of the file may also hold its
value: ``"--seed=3":``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import JsonValue

from specserve.config.document import Yaml

FLAG_ALIASES: Mapping[str, str] = {
    "ac": "attention-config",
    "asc": "api-server-count",
    "cc": "compilation-config",
    "dc": "diffusion-config",
    "dcp": "decode-context-parallel-size",
    "device-memory-utilization": "gpu-memory-utilization",
    "dp": "data-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpm": "data-parallel-multi-port-external-lb",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "O": "optimization-level",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "r": "node-rank",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}
"""Other names of a flag -> its first long name, as vLLM 0.32 lists them (tests/data/engine)."""

FlagPath: TypeAlias = tuple[str, ...]
"""Keys below ``engine.extra_args``, as they are written."""
_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")')
_BARE_SIZE = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_LEVEL = re.compile(r"O=?([0-3])")
_SIZE = re.compile(r"(\d+)(\.\d+)?([kmgtKMGT])")


@dataclass(frozen=True)
class ExtraFlag:
    """One entry of ``engine.extra_args``."""

    key: str
    """As it is written in the config."""
    name: str
    """vLLM's long name without the leading dashes."""
    path: tuple[str, ...]
    """Keys behind the dots: the place inside a flag that takes JSON."""
    negated: bool
    value: JsonValue

    @property
    def place(self) -> tuple[str, ...]:
        """What it sets: equal for two spellings of one thing."""
        return (self.name, *self.path)


def read_flag(key: str, value: JsonValue) -> ExtraFlag:
    """One entry, whatever its spelling.

    >>> read_flag("--no_async_scheduling", True).name, read_flag("no-async-scheduling", True).value
    ('async-scheduling', False)
    >>> read_flag("-dp", 2).name, read_flag("--seed=3", None).value, read_flag("-O3", None).value
    ('data-parallel-size', '3', '3')
    >>> read_flag("attention_config.use_fp4_indexer_cache", True).place
    ('attention-config', 'use_fp4_indexer_cache')
    """
    bare, equals, given = key.lstrip("-").partition("=")
    level = _LEVEL.fullmatch(key.lstrip("-"))
    if level and value in (None, True):
        return ExtraFlag(key, FLAG_ALIASES["O"], (), False, level[1])
    if equals and value in (None, True):
        value = given
    head, *path = bare.split(".")
    name = head.replace("_", "-")
    negated = name.startswith("no-")
    name = name.removeprefix("no-")
    if negated and isinstance(value, bool):
        value = not value
    if path and path[-1].endswith("+"):
        path[-1] = path[-1].removesuffix("+")
        value = _items(value)
    elif path:
        value = _inside_json(value)
    return ExtraFlag(key, FLAG_ALIASES.get(name, name), tuple(path), negated, value)


def _items(value: JsonValue) -> JsonValue:
    """The value of a dotted flag that ends in a plus sign: a list, in text parted by commas.

    vLLM keeps the items as texts; where each is JSON it is that here, since a list is meant.
    """
    if isinstance(value, str):
        return [_inside_json(item) for item in value.split(",")]
    if isinstance(value, list):
        return value
    return [value]


def _inside_json(value: JsonValue) -> JsonValue:
    """The value of a dotted flag: JSON, else a number like 80g, else text."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        parsed: JsonValue = json.loads(value)
        return parsed
    size = human_number(value)
    if size is None:
        return value
    return size


def human_number(text: str) -> int | None:
    """vLLM's human-readable numbers: 1k = 1000, 1K = 1024; None for anything else.

    A decimal goes with k, m, g and t only (``human_readable_int`` of ``utils/argparse_utils.py``).

    >>> human_number("2G"), human_number("1500"), human_number("1.5g"), human_number("1.5G")
    (2147483648, 1500, 1500000000, None)
    """
    text = text.strip()
    match = _SIZE.fullmatch(text)
    if match is None:
        if re.fullmatch(r"[+-]?\d+(_\d+)*", text):
            return int(text)
        return None
    whole, decimal, unit = match.groups(default="")
    step = "kmgt".index(unit.lower()) + 1
    if unit.islower():
        return int(float(whole + decimal) * int("1" + "000" * step))
    if decimal:
        return None
    return int(whole) << 10 * step


def read_json(text: str, *, sizes: bool = False) -> JsonValue:
    """A value that is given as JSON. Raises ValueError.

    ``sizes``: bare numbers like 80m are read, as vLLM does for the flags that take a config.

    >>> read_json('{"a": 80m, "b": "80m"}', sizes=True)
    {'a': 80000000, 'b': '80m'}
    """
    if sizes:
        parts = _QUOTED.split(text)
        parts[::2] = (_BARE_SIZE.sub(_number, part) for part in parts[::2])
        text = "".join(parts)
    try:
        value: JsonValue = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _number(match: re.Match[str]) -> str:
    number = human_number(match.group())
    if number is None:
        return match.group()
    return str(number)


class ExtraArgs:
    """``engine.extra_args`` by vLLM's long names, however they are written.

    >>> (ExtraArgs({"--block_size": 32, "cc.mode": 3,
    ...  "compilation-config": '{"backend": "eager"}'}).values)
    {'block-size': 32, 'compilation-config': {'backend': 'eager', 'mode': 3}}
    """

    def __init__(self, written: Mapping[str, JsonValue]) -> None:
        self.flags = tuple(read_flag(key, value) for key, value in written.items())
        self.values: dict[str, JsonValue] = {}
        """Long name -> value; a flag that is negated is False."""
        for flag in sorted(self.flags, key=lambda flag: bool(flag.path)):
            self._add(flag)

    def _add(self, flag: ExtraFlag) -> None:
        if not flag.path:
            before = self.values.get(flag.name)
            if isinstance(before, dict) and isinstance(flag.value, dict):
                self.values[flag.name] = _merged(before, flag.value)
            else:
                self.values[flag.name] = flag.value
            return
        here = self.values[flag.name] = self.mapping(flag.name)
        for key in flag.path[:-1]:
            nested = here.get(key)
            if isinstance(nested, Mapping):
                here[key] = dict(nested)
            else:
                here[key] = {}
            here = here[key]  # type: ignore[assignment]
        here[flag.path[-1]] = flag.value

    def text(self, name: str) -> str | None:
        """The value as text; None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        return str(value)

    def number(self, name: str) -> int | None:
        """The value as a whole number; None when absent or something else."""
        value = self.values.get(name)
        if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
            return None
        return int(str(value))

    def decimal(self, name: str) -> float | None:
        """The value as a number; None when absent or something else."""
        text = self.text(name)
        if text is None or not re.fullmatch(r"\d+(\.\d*)?", text):
            return None
        return float(text)

    def switch(self, name: str) -> bool | None:
        """Whether a switch is on; None when nobody sets it."""
        value = self.values.get(name)
        if value in (True, "true", "True", ""):
            return True
        if value is None:
            return None
        return False

    def is_on(self, name: str) -> bool:
        """Whether a switch that is off by default was turned on."""
        return self.switch(name) is True

    def mapping(self, name: str) -> dict[str, JsonValue]:
        """The value of a flag that takes JSON, as a copy; empty when it is absent or something
        else.
        """
        value = self.values.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = read_json(value, sizes=True)
        if isinstance(value, Mapping):
            return dict(value)
        return {}


def _merged(one: dict[str, JsonValue], other: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Two mappings of one flag: layers have each what the later one left of the earlier one."""
    both = {**one, **other}
    for key in one.keys() & other.keys():
        mine, theirs = one[key], other[key]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            both[key] = _merged(mine, theirs)
    return both


def said_twice(layer: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    """(key, sentence) for every key of one layer that says again what an earlier key of it says.

    >>> list(said_twice({"max-logprobs": 5, "--max_logprobs": 7, "seed": 1}))
    [('--max_logprobs', "'--max_logprobs' and 'max-logprobs' set the same flag; keep one")]
    >>> ([key for key, _ in said_twice({"cc": {"mode": 3, "level": 1},
    ...  "compilation-config.mode": 2})])
    ['compilation-config.mode']
    """
    first: dict[tuple[str, ...], str] = {}
    for key, value in layer.items():
        flag = read_flag(key, value)
        known = {first.setdefault(place, key) for place in _places(flag.place, flag.value)}
        for other in sorted(known - {key}):
            yield key, f"'{key}' and '{other}' set the same flag; keep one"


def _places(place: tuple[str, ...], value: JsonValue) -> Iterator[tuple[str, ...]]:
    """The places of the values inside a value."""
    if not isinstance(value, Mapping) or not value:
        yield place
        return
    for key, inner in value.items():
        yield from _places((*place, key), inner)


def without(held: dict[str, Yaml], above: Sequence[FlagPath]) -> dict[str, Yaml]:
    """The flags of an earlier layer without what later layers set in another spelling.

    >>> without({"max-logprobs": 5, "cc.mode": 1, "seed": 1}, [("--max_logprobs",)])
    {'cc.mode': 1, 'seed': 1}
    >>> without({"cc.mode": 1, "cc.level": 2}, [("compilation-config", "mode")])
    {'cc.level': 2}
    >>> without({"cc": {"mode": 1, "level": 2}}, [("compilation-config.mode",)])
    {'cc': {'level': 2}}
    """
    kept = dict(held)
    for path in above:
        place = read_flag(".".join(path), None).place
        for key in [key for key in kept if key != path[0]]:
            mine = read_flag(key, None).place
            if mine[: len(place)] == place:
                del kept[key]
            elif place[: len(mine)] == mine:
                kept[key] = _without_item(kept[key], place[len(mine) :])
    return kept


def _without_item(value: Yaml, path: FlagPath) -> Yaml:
    """A mapping, or JSON of one, without what it holds at a path."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = read_json(value, sizes=True)
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return {key: inner for key, inner in value.items() if key != path[0]}
    return {**value, path[0]: _without_item(value[path[0]], path[1:])}
