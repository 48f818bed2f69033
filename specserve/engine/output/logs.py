"""What the engine's own log lines say: the loading phase, and the memory it reported.

Wording read in vLLM 0.32's sources and, for GPUs, in public logs of 0.20 to 0.29 (2026-11-29). A
line that a version words otherwise is not found, and what was not found is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specserve.units import GIB

_PHASES = {
    "importing": (
        r"Initializing an? V1 LLM engine|non-default args|Resolved architecture|"
        r"Automatically detected platform|"
        r"Using max model len|[Cc]hunked prefill is enabled"
    ),
    "loading target weights": (
        r"Starting to load model|Loading model from scratch|Loading safetensors|"
        r"Loading weights took|"
        r"Model loading took|Loading pt checkpoint"
    ),
    "loading draft": r"Loading draft(?:er)? model|Detected EAGLE|Detected MTP|Sharing target model|"
    r"Loading speculator",
    "compiling": r"torch\.compile (?:takes|and|took)|Dynamo bytecode transform|Compiling a graph",
    "profiling memory": (
        r"KV cache size: |Available KV cache memory|GiB\)? (?:GiB )?for KV cache|"
        r"Initial free memory|"
        r"Total non KV cache memory"
    ),
    "capturing graphs": r"Graph capturing|[Cc]apturing\b.*(?:graph|model)|"
    r"Profiling CUDA graph memory",
    "warming up": r"Warming up|init engine \(profile",
    "starting server": r"Starting vLLM (?:API )?server|Started server process|"
    r"Waiting for application startup",
}
PHASES = tuple(_PHASES)
"""In the order in which an engine goes through them."""
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _PHASES.items())


def phase(line: str) -> str | None:
    """The loading phase that a line belongs to; None when it says nothing about it.

    >>> phase("INFO 11-29 [gpu_model_runner.py:4] Starting to load model Qwen/Qwen3-8B...")
    'loading target weights'
    """
    return next((name for name, pattern in _PATTERNS if pattern.search(line)), None)


def advance(current: str | None, line: str) -> str | None:
    """The phase after a line, never going back: the draft's weights are announced in the target's
    words.

    >>> (advance("loading draft", "Loading weights took 0.1 seconds"), advance(None,
    ...  "Loading drafter model..."))
    ('loading draft', 'loading draft')
    """
    found = phase(line)
    if found is None or (current is not None and PHASES.index(found) < PHASES.index(current)):
        return current
    return found


@dataclass(frozen=True)
class EngineReport:
    """What the engine said about itself while loading. Per GPU: of the first worker that spoke, and
    for the KV cache of the one with the least memory."""

    model_loading_bytes: int | None = None
    """Memory that weights took, target and draft together where the engine counts both."""
    available_kv_bytes: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    """Requests of the full context that fit at once."""
    max_concurrency_tokens: int | None = None
    """The context that ``max_concurrency`` was reckoned for."""
    peak_activation_bytes: int | None = None
    """Most memory of the trial run above the weights."""
    graph_capture_bytes: int | None = None
    max_model_len: int | None = None
    runner: str | None = None
    """``v1`` or ``v2``: the model runner, where a line names it."""
    attention_backends: tuple[str, ...] | None = None
    """Attention kernels in the order of their choice: two names are the target's and the draft's.
    """


_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?)"
_BYTES = {
    "model_loading_bytes": re.compile(rf"Model loading took {_NUMBER} ?(GiB|GB)"),
    "available_kv_bytes": re.compile(
        rf"Available KV cache memory: {_NUMBER} ?(GiB)|(?:Explicitly|"
        rf"Auto) set \({_NUMBER}/[0-9.]+\) (GiB) for KV cache"
    ),
    "peak_activation_bytes": re.compile(
        rf"{_NUMBER} ?(GiB) for peak activation|torch peak memory increase: {_NUMBER} ?(GiB)"
    ),
    "graph_capture_bytes": re.compile(rf"Graph capturing finished in .*took {_NUMBER} ?(GiB|GB)"),
}
_TOKENS = re.compile(rf"KV cache size: {_NUMBER} tokens")
_CONCURRENCY = re.compile(rf"Maximum concurrency for {_NUMBER} tokens per request: {_NUMBER}x")
_MODEL_LEN = re.compile(rf"Using max model len {_NUMBER}")
_BACKEND = re.compile(
    r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) (?:attention )?backend\b"
)
_RUNNER = re.compile(r"Using (V2) Model Runner|using the (V1) model runner instead")


def _plain(text: str) -> float:
    return float(text.replace(",", ""))


def read_report(lines: Iterable[str]) -> EngineReport:
    """Everything a log says about the engine's memory.

    >>> read_report(["GPU KV cache size: 619,202 tokens"]).kv_cache_tokens
    619202
    """
    found: dict[str, Any] = {}
    least: list[int] = []
    backends: dict[str, None] = {}
    for line in lines:
        new = _read(line)
        if "available_kv_bytes" in new:
            least.append(new.pop("available_kv_bytes"))
        backends |= dict.fromkeys(_BACKEND.findall(line))
        found = new | found
    return EngineReport(
        **found,
        available_kv_bytes=min(least, default=None),
        attention_backends=tuple(backends) or None,
    )


def _read(line: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, pattern in _BYTES.items():
        if match := pattern.search(line):
            number = next(group for group in match.groups() if group)
            found[key] = round(_plain(number) * GIB)  # older versions write GB and mean GiB
    if match := _TOKENS.search(line):
        found["kv_cache_tokens"] = int(_plain(match.group(1)))
    if match := _CONCURRENCY.search(line):
        found["max_concurrency_tokens"] = int(_plain(match.group(1)))
        found["max_concurrency"] = _plain(match.group(2))
    if match := _MODEL_LEN.search(line):
        found["max_model_len"] = int(_plain(match.group(1)))
    if match := _RUNNER.search(line):
        found["runner"] = (match.group(1) or match.group(2)).lower()
    return found
