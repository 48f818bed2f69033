"""What the engine's own log lines say: the loading phase, and the memory it reported.

Wording read in vLLM 0.32's sources and, for GPUs, in public logs of 0.20 to 0.29 (2026-11-29). A line that a
version words otherwise is not found, and what was not found is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specserve.units import GIB

_PHASES = {
    "starting server": r"Starting vLLM (?:API )?server|Started server process|Waiting for application startup",
    "warming up": r"Warming up|[Ww]armup",
    "capturing graphs": r"Graph capturing|[Cc]apturing\b.*(?:graph|model)|Profiling CUDA graph memory",
    "profiling memory": (
        r"KV cache size: |Available KV cache memory|[Mm]emory profiling|Initial free memory|Total non KV cache memory"
    ),
    "compiling": r"torch\.compile|Dynamo bytecode transform|Compiling a graph|Inductor",
    "loading draft": r"Loading draft(?:er)? model|Detected EAGLE|Detected MTP|Sharing target model|Loading speculator",
    "loading target weights": (
        r"Starting to load model|Loading model from scratch|Loading safetensors|Loading weights took|"
        r"Model loading took|Loading pt checkpoint"
    ),
    "importing": (
        r"Initializing an? V1 LLM engine|Resolved architecture|Automatically detected platform|"
        r"version \d|non-default args|Using max model len|[Cc]hunked prefill is enabled"
    ),
}
PHASES = tuple((name, re.compile(pattern)) for name, pattern in _PHASES.items())
"""Later phases first: the first pattern that is found names the line's phase."""


def phase(line: str) -> str | None:
    """The loading phase that a line belongs to; None when it says nothing about it.

    >>> phase("INFO 11-29 [gpu_model_runner.py:4] Starting to load model Qwen/Qwen3-8B...")
    'loading target weights'
    """
    return next((name for name, pattern in PHASES if pattern.search(line)), None)


@dataclass(frozen=True)
class EngineReport:
    """What the engine said about itself while loading. Per GPU, of the first worker that spoke."""

    model_loading_bytes: int | None = None
    """Memory that weights took, target and draft together where the engine counts both."""
    available_kv_bytes: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    """Requests of the full context that fit at once."""
    max_concurrency_tokens: int | None = None
    """The context that ``max_concurrency`` was reckoned for."""
    graph_capture_bytes: int | None = None
    max_model_len: int | None = None
    runner: str | None = None
    """``v1`` or ``v2``: the model runner, where a line names it."""


_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?)"
_UNITS = {"GiB": GIB, "GB": GIB, "MiB": 1024**2, "MB": 1024**2}
_BYTES = {
    "model_loading_bytes": re.compile(rf"Model loading took {_NUMBER} (GiB|GB|MiB|MB)"),
    "available_kv_bytes": re.compile(rf"Available KV cache memory: {_NUMBER} (GiB|GB|MiB|MB)"),
    "graph_capture_bytes": re.compile(rf"Graph capturing finished in .*took {_NUMBER} (GiB|GB|MiB|MB)"),
}
_TOKENS = re.compile(rf"KV cache size: {_NUMBER} tokens")
_CONCURRENCY = re.compile(rf"Maximum concurrency for {_NUMBER} tokens per request: {_NUMBER}x")
_MODEL_LEN = re.compile(rf"Using max model len {_NUMBER}")
_RUNNER = re.compile(r"Using (V[12]) Model Runner|Model Runner (V2) does not yet support", re.IGNORECASE)


def _plain(text: str) -> float:
    return float(text.replace(",", ""))


def read_report(lines: Iterable[str]) -> EngineReport:
    """Everything a log says about the engine's memory; the first mention of each counts.

    >>> read_report(["GPU KV cache size: 619,202 tokens"]).kv_cache_tokens
    619202
    """
    found: dict[str, Any] = {}
    for line in lines:
        found = _read(line) | found
    return EngineReport(**found)


def _read(line: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, pattern in _BYTES.items():
        if match := pattern.search(line):
            found[key] = round(_plain(match.group(1)) * _UNITS[match.group(2)])
    if match := _TOKENS.search(line):
        found["kv_cache_tokens"] = int(_plain(match.group(1)))
    if match := _CONCURRENCY.search(line):
        found["max_concurrency_tokens"] = int(_plain(match.group(1)))
        found["max_concurrency"] = _plain(match.group(2))
    if match := _MODEL_LEN.search(line):
        found["max_model_len"] = int(_plain(match.group(1)))
    if match := _RUNNER.search(line):
        found["runner"] = "v1" if match.group(2) else str(match.group(1)).lower()
    return found
