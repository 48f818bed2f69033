"""States of servers for the doctor's tests: what was done to each, and the cause that must be named first.

Lines of public reports are short quotations, with the thread beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.virtual_engine import VirtualEngine

LOGS = Path(__file__).parent / "data/logs"
AT = "11-29 23:01:{:02d}"
LOADING = [
    f"(APIServer pid=1) INFO {AT.format(1)} [model.py:733] Resolved architecture: LlamaForCausalLM",
    f"(APIServer pid=1) INFO {AT.format(2)} [model.py:2152] Using max model len 4096",
    f"(EngineCore pid=2) INFO {AT.format(9)} [gpu_model_runner.py:4] Starting to load model target...",
]
READY = [
    *LOADING,
    f"(EngineCore pid=2) INFO {AT.format(20)} [gpu_model_runner.py:5] Loading drafter model...",
    f"(EngineCore pid=2) INFO {AT.format(25)} [kv_cache_utils.py:9] GPU KV cache size: 619,202 tokens",
    f"(APIServer pid=1) INFO {AT.format(30)} [entry.py:140] Starting vLLM server on http://0.0.0.0:8000",
    'INFO:     127.0.0.1:40306 - "POST /v1/completions HTTP/1.1" 200 OK',
]


@dataclass(frozen=True)
class LogState:
    """A log, and the first cause that must be read out of it."""

    name: str
    lines: list[str]
    code: str
    step: str
    source: str = "recorded with vLLM 0.32"


def recorded() -> list[LogState]:
    """Real failures of vLLM 0.32."""
    causes = {
        "bad-choice": ("bad-flag-value", "parameters"),
        "mangled-json": ("bad-flag-value", "parameters"),
        "unknown-flag": ("unknown-flag", "parameters"),
        "unknown-key": ("unknown-speculative-key", "parameters"),
        "port-taken": ("port-in-use", "load"),
        "vllm-port-uri": ("vllm-port-uri", "load"),
        "missing-path": ("model-not-found", "load"),
        "hub-offline": ("hub-offline", "load"),
        "custom-code": ("custom-code", "load"),
        "unsupported-architecture": ("unsupported-architecture", "load"),
        "suffix-without-arctic": ("arctic-inference-missing", "load"),
        "vocabulary": ("vocabulary-mismatch", "vocabulary"),
        "draft-tensor-parallel": ("draft-tensor-parallel", "parameters"),
        "plain-model-as-head": ("head-weights", "vocabulary"),
        "weights-missing": ("weights-missing", "load"),
        "weights-shape": ("weights-shape", "vocabulary"),
        "context-too-long": ("context-too-long", "parameters"),
        "kv-too-small": ("context-does-not-fit", "memory"),
        "cpu-memory": ("host-memory", "memory"),
        "engine-core-killed": ("engine-died", "load"),
    }
    return [
        LogState(name, (LOGS / f"{name}.txt").read_text(encoding="utf-8").splitlines(), *cause)
        for name, cause in causes.items()
    ]


REPORTED = [
    LogState("head-embedding", [*LOADING, "KeyError: 'embed_tokens.weight'"], "head-weights", "vocabulary",
             "vllm-project/vllm#18906"),
    LogState("head-architecture", [*LOADING[:1], "ValueError: Model architectures ['EagleQwen2ForCausalLM'] are not supported for now."],
             "unsupported-architecture", "load", "vllm-project/vllm#24967"),
    LogState("eagle3-target", [*LOADING, "AssertionError: Eagle3 is only supported for ['llama', 'qwen'] models. Got gemma3_text"],
             "unsupported-target", "load", "vllm-project/vllm#26328"),
    LogState("graph-sizes", [*LOADING, ("ValueError: Can't determine cudagraph shapes that are both a multiple of 3 (num_speculative_tokens + 1) "
                             "required by spec-decode and 4 (tensor_parallel_size)")], "graph-sizes", "parameters", "vllm-project/vllm#29036"),
    LogState("pipeline", [*LOADING, "NotImplementedError: Pipeline parallelism is not supported for this model."], "pipeline-parallel",
             "parameters", "vllm-project/vllm#14117"),
    LogState("draft-tp", ["ValueError: speculative_draft_tensor_parallel_size=4 cannot be other value than 1"], "draft-tensor-parallel",
             "parameters", "vllm-project/vllm#10483"),
    LogState("m-rope", [*LOADING, "NotImplementedError: Speculative Decoding with draft models or parallel drafting does not support M-RoPE yet"],
             "m-rope", "vocabulary", "vllm-project/vllm-ascend#14666"),
    LogState("runner-v2", ["ValueError: Model Runner V2 does not yet support: speculative method 'draft_model'"], "model-runner",
             "parameters", "intel/intel-xpu-backend-for-triton#7166"),
    LogState("no-draft-models", [*LOADING[:2], ("NotImplementedError: Speculative decoding with draft model is not supported yet. "
                                 "Please consider using other speculative decoding methods")], "draft-model-absent", "load",
             "vllm-project/vllm#31883"),
    LogState("draft-context", [*READY, "/tmp/x.py:7: unknown: block: [3,0,0] Assertion `index out of bounds: 0 <= tmp4 < 2048` failed.",
                               "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."], "draft-context",
             "parameters", "vllm-project/vllm#48894"),
    LogState("no-kv", [*LOADING, "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"],
             "no-kv-memory", "memory", "vllm-project/vllm#28051"),
    LogState("shm", [*LOADING, "Error while creating shared memory segment /dev/shm/nccl-PaYlE3 (size 9637888)"], "shared-memory",
             "memory", "vllm-project/production-stack#276"),
    LogState("service-port", [("ValueError: VLLM_PORT 'tcp://10.0.0.7:8000' appears to be a URI. This may be caused by a Kubernetes "
                              "service discovery issue")], "vllm-port-uri", "load", "vllm-project/vllm#34199"),
    LogState("old-flag", ["vllm: error: unrecognized arguments: --num-speculative-tokens 5"], "unknown-flag", "parameters",
             "Alex8791-cyber/cognithor#506"),
    LogState("quoting", ["vllm: error: argument --speculative-config: Value \\{\\\"method\\\" cannot be converted to <function loads>"],
             "bad-flag-value", "parameters", "eugr/spark-vllm-docker#111"),
    LogState("n-predict", [*LOADING[:1], "ValueError: num_speculative_tokens:3 must be divisible by n_predict=2"],
             "not-divisible-by-n-predict", "parameters", "vllm-project/vllm#13626"),
    LogState("draft-oom", [*LOADING, "Loading drafter model...", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 72.00 MiB"],
             "oom-load", "memory", "vllm-project/vllm#8731"),
    LogState("prefill-oom", [*READY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.86 GiB",
                             "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."], "oom-serving", "memory",
             "vllm-project/vllm#8073"),
    LogState("padded", [*LOADING[:1], ("ValueError: Target and draft model should have the same vocabulary size. "
                        "Target model vocab_size=152064. Draft model vocab_size=151936.")], "vocabulary-mismatch", "vocabulary",
             "vllm-project/vllm#7252"),
    LogState("cache-dtype", [*LOADING, "ValueError: No valid attention backend found for cuda with kv_cache_dtype not supported"],
             "attention-backend", "load", "vllm-project/vllm#48787"),
    LogState("grammar", [*READY, '  File "vllm/v1/structured_output/backend_xgrammar.py", line 162, in accept_tokens', "AssertionError",
                         "EngineCore encountered a fatal error."], "grammar", "output", "vllm-project/vllm#11484"),
]  # fmt: skip

OTHER_LOGS = [
    LogState("unfinished", LOADING, "start-unfinished", "load", "a log that ends while loading"),
    LogState("after-a-good-start", [*READY, *LOADING, "RuntimeError: No CUDA GPUs are available"], "no-gpu", "load",
             "a second start in the same file"),
    LogState("slow-storage", [*LOADING, "INFO 11-29 23:04:01 [default_loader.py:501] Loading weights took 180.00 seconds",
                              "INFO 11-29 23:04:02 [gpu_model_runner.py:9] Model loading took 15.30 GiB memory and 181.0 seconds",
                              "INFO 11-29 23:04:30 [entry.py:140] Starting vLLM server on http://0.0.0.0:8000"], "slow-weights", "load",
             "15.3 GiB at 0.09 GB/s"),
    LogState("slow-compile", [*LOADING, "INFO 11-29 23:02:01 [backends.py:1] Dynamo bytecode transform time: 9 s",
                              "INFO 11-29 23:12:01 [gpu_worker.py:1] Available KV cache memory: 10.0 GiB",
                              "INFO 11-29 23:12:30 [entry.py:140] Starting vLLM server on http://0.0.0.0:8000"], "slow-start", "load",
             "ten minutes of compilation"),
]  # fmt: skip


def worked(
    rates: tuple[float, ...] = (0.85, 0.75, 0.65),
    *,
    drafts: float = 4000,
    requests: float = 200,
    running: float = 2,
    **more: float,
) -> VirtualEngine:
    """An engine that has served, and serves."""
    engine = VirtualEngine(positions=len(rates), running=running, kv_usage=0.3)
    engine.work(drafts=drafts, rates=rates, requests=requests)
    engine.waiting = more.get("waiting", 0)
    engine.kv_usage = more.get("kv_usage", 0.3)
    return engine


def texts(
    engine: VirtualEngine,
    *,
    moves: bool = True,
    http: dict[str, int] | None = None,
    style: str = "0.32",
) -> list[str]:
    """Three reads of it, between which it works or stands still."""
    out = []
    for _ in range(3):
        out.append(engine.text(style, http=http))
        if moves:
            engine.observe("iteration", 0.001, 5)
            engine.counters["generation_tokens"] += 12
    return out
