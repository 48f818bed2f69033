"""What an engine says at its start that it runs, held against what was asked for.

vLLM logs its whole config in one line before it loads anything: ``VllmConfig.__str__`` in
``vllm/config/vllm.py`` and ``SpeculativeConfig.__repr__``, read in 0.32, and public logs of 0.20 to
0.31 (2026-12-01). Both model runners and all devices share it. A value that cannot be read is not
seen, which is never the same as equal.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specserve.config.schema import Settings
from specserve.config.speculation import WITHOUT_DRAFT

if TYPE_CHECKING:
    from pydantic import JsonValue

Verdict = Literal["equal", "different", "not seen", "not asked"]
_NO_METHOD = "none"
_LINE = re.compile(
    r"Initializing an? (?:V\d )?LLM engine \(v(?P<version>[^)\s]+)\) with config: (?P<rest>.*)"
)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_SPECULATION = re.compile(
    r"speculative_config=(?:(?P<none>None)\b|SpeculativeConfig\((?P<inside>[^()]*)\))"
)
_SAME_TYPE = {"fp8": "fp8_e4m3"}
"""vLLM's short name of a cache type -> the long one."""
_OF_MTP = re.compile(r"\w+_mtp")
"""Older names of vLLM for mtp, by model family."""


@dataclass(frozen=True)
class Statement:
    """The engine's config line; None where it does not say, or not in words that are known."""

    version: str | None = None
    speculates: bool | None = None
    method: str | None = None
    num_speculative_tokens: int | None = None
    draft: str | None = None
    """Path of the draft, the target's own where that carries it."""
    max_model_len: int | None = None
    kv_cache_dtype: str | None = None


@dataclass(frozen=True)
class Held:
    """One value as it was asked for and as the engine states it."""

    key: str
    """Of the config file."""
    asked: str | None
    """None where the choice was left to the engine."""
    said: str | None
    """None where the log does not show it."""

    @property
    def verdict(self) -> Verdict:
        """What the two amount to."""
        if self.asked is None:
            return "not asked"
        if self.said is None:
            return "not seen"
        if _same(self.key, self.asked, self.said):
            return "equal"
        return "different"

    @property
    def warning(self) -> str | None:
        """A difference in words."""
        if self.verdict != "different":
            return None
        return f"{self.key}: {self.asked} was asked for, and the engine says {self.said}"

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        return {
            "key": self.key,
            "asked": self.asked,
            "said": self.said,
            "verdict": self.verdict,
        }


def is_statement(line: str) -> bool:
    """Whether this is the line, or what is left of it."""
    return "LLM engine (v" in line


def read(lines: Iterable[str]) -> Statement:
    """The first config line of a log.

    >>> read(["x Initializing a V1 LLM engine (v0.32.0) with config: model='a, kv_cache_dtype=fp8',"
    ...       " speculative_config=None, max_seq_len=4096, kv_cache_dtype=auto, seed=0"])
    ... # doctest: +NORMALIZE_WHITESPACE
    Statement(version='0.32.0', speculates=False, method=None, num_speculative_tokens=None,
    draft=None, max_model_len=4096, kv_cache_dtype='auto')
    """
    for line in lines:
        match = _LINE.search(line)
        if match is not None:
            return _statement(match["version"], match["rest"])
    return Statement()


def _statement(version: str, rest: str) -> Statement:
    # Texts may hold anything, also what looks like another key; numbers stand for them.
    texts = _TEXT.findall(rest)
    numbers = iter(range(len(texts)))
    bare = _TEXT.sub(lambda _: f"#{next(numbers)}", rest)
    length = _value(bare, "max_seq_len")
    speculates = method = tokens = draft = None
    found = _SPECULATION.search(bare)
    if found is not None and found["none"]:
        speculates = False
    elif found is not None:
        speculates = True
        method = _text(found["inside"], "method", texts)
        draft = _text(found["inside"], "model", texts)
        tokens = _value(found["inside"], "num_spec_tokens")
    return Statement(
        version,
        speculates,
        method,
        _whole(tokens),
        draft,
        _whole(length),
        _value(bare, "kv_cache_dtype"),
    )


def _value(bare: str, key: str) -> str | None:
    """What stands after a key; None also where the line ends in it, as a line that was cut does."""
    match = re.search(rf"(?:^|, ){key}=(?P<value>[^,()\s]+)(?=, |$)", bare)
    if match is None or (match.end() == len(bare) and key not in ("num_spec_tokens", "model")):
        return None
    return match["value"]


def _text(inside: str, key: str, texts: list[str]) -> str | None:
    value = _value(inside, key)
    if value is None or not value.startswith("#"):
        return None
    text = ast.literal_eval(texts[int(value[1:])])
    return str(text)


def _whole(text: str | None) -> int | None:
    if text is None or not re.fullmatch(r"\d{1,12}", text, re.ASCII):
        return None
    return int(text)


def hold(settings: Settings, said: Statement, backends: tuple[str, ...] | None) -> tuple[Held, ...]:
    """Every value that was asked for, beside the engine's own; ``backends`` as its log names them,
    the target's first."""
    return tuple(_held(settings, said, backends or ()))


def _held(settings: Settings, said: Statement, backends: tuple[str, ...]) -> Iterator[Held]:
    spec = "speculative_decoding"
    method, stated = settings.method, said.method
    if said.speculates is False:
        stated = _NO_METHOD
    yield Held(f"{spec}.method", method or _NO_METHOD, stated)
    if method is not None:
        tokens = said.num_speculative_tokens
        yield Held(
            f"{spec}.num_speculative_tokens", str(settings.num_speculative_tokens), _str(tokens)
        )
        if method not in WITHOUT_DRAFT:
            path = settings.models.target_model.path
            if settings.uses_draft_model and settings.models.draft_model is not None:
                path = settings.models.draft_model.path
            yield Held("models.draft_model.path", path, said.draft)
    engine = settings.engine
    yield Held("engine.max_model_len", _str(engine.asked_length), _str(said.max_model_len))
    asked: str | None = engine.kv_cache_dtype
    if asked == "auto":
        asked = None
    yield Held("engine.kv_cache_dtype", asked, said.kv_cache_dtype)
    backend = engine.flags.text("attention-backend")
    yield Held("engine.extra_args.attention-backend", backend, next(iter(backends), None))
    draft = settings.models.draft_model
    if draft is not None and draft.attention_backend is not None and settings.uses_draft_model:
        # A kernel that both use is named once.
        theirs = backends[1:2] or tuple(b for b in backends if b == draft.attention_backend)
        yield Held(
            "models.draft_model.attention_backend",
            draft.attention_backend,
            next(iter(theirs), None),
        )


def _str(value: int | None) -> str | None:
    if value is None:
        return None
    return str(value)


def _same(key: str, asked: str, said: str) -> bool:
    """Whether two words mean one thing to vLLM."""
    if key.endswith("path"):
        # Offline, vLLM writes the folder of the cached snapshot in place of the name.
        cached = f"models--{asked.replace('/', '--')}/snapshots/"
        return asked.rstrip("/") == said.rstrip("/") or f"/{cached}" in said
    if key.endswith("method") and asked == "mtp":
        return said == "mtp" or _OF_MTP.fullmatch(said) is not None
    if key.endswith("dtype"):
        return _SAME_TYPE.get(asked, asked) == _SAME_TYPE.get(said, said)
    return asked.casefold() == said.casefold()


def summary(held: Iterable[Held]) -> str:
    """What is as asked and what was not seen, in a line.

    >>> summary([Held("engine.max_model_len", "4096", "4096"),
    ...          Held("engine.kv_cache_dtype", "fp8", None)])
    'max_model_len; not seen: kv_cache_dtype'
    """
    by: dict[Verdict, list[str]] = {"equal": [], "not seen": []}
    for one in held:
        if one.verdict in by:
            by[one.verdict].append(one.key.rpartition(".")[2].replace("path", "draft"))
    parts = []
    if by["equal"]:
        parts.append(", ".join(by["equal"]))
    if by["not seen"]:
        parts.append(f"not seen: {', '.join(by['not seen'])}")
    return "; ".join(parts)
