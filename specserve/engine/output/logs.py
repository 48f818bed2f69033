"""What the engine's own log lines say: the loading phase, and the memory it reported.

Wording read in vLLM 0.32's sources and, for GPUs, in public logs of 0.20 to 0.29 (2026-11-29). A
line in other words is not found, and what was not found is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
    """What the engine said about itself while loading.

    Figures per GPU are those of the first worker that gave them, and for the KV cache those of the
    worker with the least memory.
    """

    model_loading_bytes: int | None = None
    """Memory of the weights, of target and draft together where the engine counts both."""
    available_kv_bytes: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    """Requests of the full context that fit at once."""
    max_concurrency_tokens: int | None = None
    """The context that ``max_concurrency`` is about."""
    peak_activation_bytes: int | None = None
    """The most memory that the trial run took above the weights."""
    graph_capture_bytes: int | None = None
    max_model_len: int | None = None
    runner: str | None = None
    """The model runner, ``v1`` or ``v2``."""
    attention_backends: tuple[str, ...] | None = None
    """Attention kernels in the order in which they were chosen: of two, the first is the target's
    and the second the draft's.
    """


_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?)"
_FIGURES = tuple(
    (name, re.compile(pattern), unit)
    for name, pattern, unit in (
        # Older versions write GB and mean GiB.
        ("model_loading_bytes", rf"Model loading took {_NUMBER} ?(?:GiB|GB)", GIB),
        ("available_kv_bytes", rf"Available KV cache memory: {_NUMBER} ?GiB", GIB),
        ("available_kv_bytes", rf"(?:Explicitly|Auto) set \({_NUMBER}/[0-9.]+\) GiB for KV", GIB),
        ("peak_activation_bytes", rf"{_NUMBER} ?GiB for peak activation", GIB),
        ("peak_activation_bytes", rf"torch peak memory increase: {_NUMBER} ?GiB", GIB),
        ("graph_capture_bytes", rf"Graph capturing finished in .*took {_NUMBER} ?(?:GiB|GB)", GIB),
        ("kv_cache_tokens", rf"KV cache size: {_NUMBER} tokens", 1),
        ("max_concurrency_tokens", rf"Maximum concurrency for {_NUMBER} tokens per request", 1),
        ("max_model_len", rf"Using max model len {_NUMBER}", 1),
    )
)
_CONCURRENCY = re.compile(rf"Maximum concurrency for .* tokens per request: {_NUMBER}x")
_BACKEND = re.compile(
    r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) (?:attention )?backend\b"
)
_RUNNERS = {"Using V2 Model Runner": "v2", "using the V1 model runner instead": "v1"}


def _number(match: re.Match[str]) -> float:
    return float(match[1].replace(",", ""))


def read_report(lines: Iterable[str]) -> EngineReport:
    """Everything a log says about the engine's memory.

    >>> read_report(["GPU KV cache size: 619,202 tokens"]).kv_cache_tokens
    619202
    """
    figures: dict[str, int] = {}
    concurrency: float | None = None
    runner: str | None = None
    backends: dict[str, None] = {}
    for line in lines:
        for name, pattern, unit in _FIGURES:
            match = pattern.search(line)
            if match is None:
                continue
            value = round(_number(match) * unit)
            if name == "available_kv_bytes":
                value = min(value, figures.pop(name, value))
            figures.setdefault(name, value)
        match = _CONCURRENCY.search(line)
        if match is not None and concurrency is None:
            concurrency = _number(match)
        for words, version in _RUNNERS.items():
            if words in line:
                runner = runner or version
        backends |= dict.fromkeys(_BACKEND.findall(line))
    return EngineReport(
        **figures,
        max_concurrency=concurrency,
        runner=runner,
        attention_backends=tuple(backends) or None,
    )
