"""Loading phases and the engine's own report."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.engine.output.logs import PHASES, EngineReport, advance, phase, read_report

READY = (
    (Path(__file__).parents[1] / "data/logs/ready-cpu.txt").read_text(encoding="utf-8").splitlines()
)
GIB = 1024**3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: compilation torch.compile",
            "importing",
        ),
        (
            "INFO [gpu_model_runner.py:5040] Starting to load model Qwen/Qwen3-8B...",
            "loading target weights",
        ),
        ("Loading safetensors checkpoint shards:  50% Completed | 2/4", "loading target weights"),
        ("INFO [gpu_model_runner.py:5071] Loading drafter model...", "loading draft"),
        ("INFO [monitor.py:34] torch.compile takes 12.33 s in total", "compiling"),
        ("INFO [gpu_worker.py:760] Available KV cache memory: 9.84 GiB", "profiling memory"),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%|", "capturing graphs"),
        (
            "INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 42.1 s",
            "warming up",
        ),
        ("INFO [entry.py:140] Starting vLLM server on http://0.0.0.0:8000", "starting server"),
        ("WARNING [vllm.py:1703] Enforce eager set, disabling JIT kernel warmup", None),
        ("INFO 127.0.0.1:5555 - GET /v1/models", None),
    ],
)
def test_phase_of_a_line(line: str, expected: str | None) -> None:
    """Lines name the phase they belong to; others name none."""
    assert phase(line) == expected


def test_phases_of_a_real_start_only_advance() -> None:
    """A real start with a draft on CPU passes through the phases in order."""
    seen: list[str] = []
    current: str | None = None
    for line in READY:
        current = advance(current, line)
        if current is not None and current not in seen[-1:]:
            seen.append(current)
    assert seen == [
        "importing",
        "loading target weights",
        "loading draft",
        "profiling memory",
        "warming up",
        "starting server",
    ]
    assert [PHASES.index(name) for name in seen] == sorted(PHASES.index(name) for name in seen)


def test_report_of_a_real_start_on_cpu() -> None:
    """The CPU engine's own words for KV cache, context and runner."""
    assert read_report(READY) == EngineReport(
        available_kv_bytes=GIB,
        kv_cache_tokens=2097152,
        max_concurrency=8192.0,
        max_concurrency_tokens=256,
        max_model_len=256,
        runner="v1",
    )


def test_report_in_gpu_wording() -> None:
    """Numbers of several workers: the first weights, the least KV memory."""
    report = read_report(
        [
            "(Worker_TP0 pid=7) INFO [gpu_worker.py:518] Using V2 Model Runner",
            "(Worker_TP0 pid=7) INFO Model loading took 14.99 GiB memory and 9.1 seconds",
            "(Worker_TP1 pid=8) INFO Model loading took 15.01 GiB memory and 9.3 seconds",
            "(Worker_TP0 pid=7) INFO Available KV cache memory: 46.80 GiB",
            "(Worker_TP1 pid=8) INFO Available KV cache memory: 46.55 GiB",
            "INFO GPU KV cache size: 715,072 tokens",
            "INFO Maximum concurrency for 131,072 tokens per request: 5.46x",
            "Actual usage is 15.03 GiB for consumed memory, 1.59 GiB for peak activation, and 0.09 GiB for CUDAGraph",
            "INFO Graph capturing finished in 5 secs, took 0.55 GiB",
        ]
    )
    assert report == EngineReport(
        model_loading_bytes=round(14.99 * GIB),
        available_kv_bytes=round(46.55 * GIB),
        kv_cache_tokens=715072,
        max_concurrency=5.46,
        max_concurrency_tokens=131072,
        peak_activation_bytes=round(1.59 * GIB),
        graph_capture_bytes=round(0.55 * GIB),
        runner="v2",
    )


def test_both_figures_on_one_line() -> None:
    """0.32 writes tokens and concurrency in one line."""
    report = read_report(
        [
            "GPU KV cache size: 460,496 tokens, Maximum concurrency for 131,072 tokens per request: 3.51x"
        ]
    )
    assert (report.kv_cache_tokens, report.max_concurrency_tokens, report.max_concurrency) == (
        460496,
        131072,
        3.51,
    )


def test_older_wording() -> None:
    """GB stood for GiB, and the activation peak had another sentence."""
    report = read_report(
        [
            "Model loading took 15.1749 GB",
            "Total non KV cache memory: 13.57GiB; torch peak memory increase: 0.77GiB; weights memory: 12.56GiB.",
        ]
    )
    assert report == EngineReport(
        model_loading_bytes=round(15.1749 * GIB), peak_activation_bytes=round(0.77 * GIB)
    )


def test_both_attention_backends_are_kept() -> None:
    """The draft may get another kernel than the target, in other words; a repetition by another worker is none."""
    lines = [
        "INFO [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'X'].",
        "INFO [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'X'].",
        "INFO [cuda.py:446] Using AttentionBackendEnum.TRITON_ATTN backend.",
        "INFO [cuda.py:547] Using backend TORCH_SDPA for vit attention",
    ]
    assert read_report(lines).attention_backends == ("FLASH_ATTN", "TRITON_ATTN")


def test_nothing_said_is_nothing_known() -> None:
    """Absent is None, not zero."""
    assert read_report(["hello"]) == EngineReport()
