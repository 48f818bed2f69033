"""Log tails of failed engines -> named causes. The files are real output of vLLM 0.32, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.engine.output.failures import diagnose, plain, signs

LOGS = Path(__file__).parents[1] / "data/logs"

REAL = {
    "bad-choice": (
        "bad-flag-value",
        "vLLM refuses the value of --kv-cache-dtype: invalid choice: 'fp7'",
    ),
    "mangled-json": (
        "bad-flag-value",
        "vLLM refuses the value of --speculative-config/-sc: Value {method: mtp} cannot",
    ),
    "unknown-flag": ("unknown-flag", "this vLLM does not know --max-num-sequences"),
    "unknown-key": (
        "unknown-speculative-key",
        "this vLLM's SpeculativeConfig has no key 'draft_tp'",
    ),
    "port-taken": ("port-in-use", "port 18431 is taken by another process"),
    "vllm-port-uri": (
        "vllm-port-uri",
        "VLLM_PORT is tcp://10.0.0.7:8000: Kubernetes made it for a Service that is named",
    ),
    "missing-path": ("model-not-found", "there is no model at /data/models/absent"),
    "hub-offline": (
        "hub-offline",
        "the model is not on this machine and the Hub cannot be reached",
    ),
    "custom-code": (
        "custom-code",
        "the checkpoint ships Python code that vLLM will not run unasked",
    ),
    "unsupported-architecture": (
        "unsupported-architecture",
        "this vLLM has no model class for 'FancyNewForCausalLM'",
    ),
    "suffix-without-arctic": (
        "arctic-inference-missing",
        "method 'suffix' needs the package arctic-inference, which is",
    ),
    "vocabulary": (
        "vocabulary-mismatch",
        "target and draft have different vocabularies: 512 and 320 tokens",
    ),
    "draft-tensor-parallel": (
        "draft-tensor-parallel",
        "the draft's TP is 1 and the target's is 2; draft_model runs only",
    ),
    "plain-model-as-head": (
        "head-weights",
        "the checkpoint has a tensor 'model' that LlamaModel does not: a plain model",
    ),
    "weights-missing": ("weights-missing", "there are no weights in no-weights"),
    "weights-shape": (
        "weights-shape",
        "config.json does not describe the weights: vLLM wants loaded_weight.shape[output_",
    ),
    "context-too-long": (
        "context-too-long",
        "engine.max_model_len is 4096, the model's own limit is 2048",
    ),
    "kv-too-small": ("context-does-not-fit", "one request of 2048 tokens needs"),
    "cpu-memory": (
        "host-memory",
        "13.54 of 15.21 GiB memory are free, and the engine asks for 15.06 GiB",
    ),
    "engine-core-killed": ("engine-died", "the engine process died while it served"),
}

TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len (40960), (5.62 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (2.10 GiB). Based on the available memory, the estimated "
    "maximum model length is 15296. Try increasing"
)
BUSY = (
    "ValueError: Free memory on device cuda:0 (10.1/79.1 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.2 GiB). Decrease GPU memory utilization"
)
SAMPLES = [
    ("unsupported-target", "AssertionError: Eagle3 is only supported for ['llama', 'qwen'] models. Got gemma3_text"),
    ("unsupported-target", "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs"),
    ("pipeline-parallel", "NotImplementedError: Pipeline parallelism is not supported for this model."),
    ("draft-model-absent", "NotImplementedError: Speculative decoding with draft model is not supported yet."),
    ("graph-sizes", "cudagraph shapes that are both a multiple of 3 (k + 1) required by spec-decode and 4 (TP"),
    ("draft-context", "/tmp/x.py:7: unknown: block: [3,0,0] Assertion `index out of bounds: 0 <= tmp4 < 2048` failed."),
    ("context-does-not-fit", TOO_LONG),
    ("no-kv-memory", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ("gpu-busy", BUSY),
    ("torch-companions", "RuntimeError: operator torchvision::nms does not exist"),
    ("vllm-missing", "ModuleNotFoundError: No module named 'vllm'"),
    ("vllm-missing", "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm"),
    ("hub-gated", "huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo"),
    ("not-divisible-by-n-predict", "ValueError: num_speculative_tokens:3 must be divisible by n_predict=2"),
    ("m-rope", "NotImplementedError: Speculative Decoding with draft models does not support M-RoPE yet"),
    ("model-runner", "ValueError: Model Runner V2 does not yet support: speculative method 'medusa'"),
    ("attention-backend", "ValueError: No valid attention backend found for cuda with head_size=64"),
    ("head-weights", "KeyError: 'embed_tokens.weight'"),
    ("weights-corrupt", "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"),
    ("heads-not-divisible", "Total number of attention heads (14) must be divisible by tensor parallel size (4)"),
    ("dtype-unsupported", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."),
    ("shared-memory", "Error while creating shared memory segment /dev/shm/nccl-PaYlE3 (size 9637888)"),
    ("driver-too-old", "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."),
    ("no-gpu", "RuntimeError: No CUDA GPUs are available"),
    ("too-few-gpus", "ValueError: World size (4) is larger than the number of available GPUs (2) in this node."),
    ("nccl", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled cuda error"),
    ("disk-full", "OSError: [Errno 28] No space left on device"),
    ("cpu-ranks", "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers."),
    ("draft-tensor-parallel", "ValueError: speculative_draft_tensor_parallel_size=4 cannot be other value than 1"),
    ("killed", "Engine core proc EngineCore_DP0 died unexpectedly, exitcode=-9"),
    ("port-in-use", "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use"),
    ("user-without-name", "KeyError: 'getpwuid(): uid not found: 1000910000'"),
    ("cache-not-writable", "torch._inductor.exc.InductorError: PermissionError: [Errno 13] Permission denied: '/.triton'"),
    ("cache-not-writable", "OSError: [Errno 30] Read-only file system: '/home/vllm/.cache/vllm/torch_compile_cache'"),
    ("cache-not-writable", "PermissionError: [Errno 13] Permission denied: '/tmp/torchinductor_root/x'"),
    ("cache-not-writable", "There was a problem when trying to write in your cache folder (/home/triton-server/.cache/huggingface/hub)."),
    ("gpu-hook", "error running createContainer hook #6: exit status 1, stdout: , stderr: mkdirat etc/nvidia: read-only file system"),
    ("gpu-hook", 'error executing hook `/usr/bin/nvidia-cdi-hook` (exit code: 1)","level":"error"'),
    ("gpu-runtime", 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'),
    ("gpu-plugin", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
    ("no-gpu-in-container", "INFO 05-20 20:12:25 [__init__.py:252] No platform detected, vLLM is running on UnspecifiedPlatform\nRuntimeError: Failed to infer device type"),
    ("metrics-folder", "[Errno 2] No such file or directory: '/tmp/tmpnofm47vw/gauge_mostrecent_20577.db'"),
    ("metrics-folder", "RuntimeError: Read beyond file size detected, /home/git/counter_1000.db is corrupted."),
    ("fused-collectives", "ValueError: The buffer size in the given workspace is insufficient for\n    the given problem size. Buffer: 698368 bytes, Required: 802816 bytes."),
    ("fused-collectives", "  File \"comm/trtllm_ar.py\", line 9, in check_trtllm_allreduce_fusion_workspace_metadata\nValueError: workspace"),
    ("grammar", "  File \"vllm/v1/worker/utils.py\", line 3, in apply_grammar_bitmask\nRuntimeError: The size of tensor a (4040) must match the size of tensor b (4041) at non-singleton dimension 1"),
    ("grammar", "EngineCore encountered a fatal error.\n  File \"vllm/v1/structured_output/backend_xgrammar.py\", line 162, in accept_tokens\nAssertionError"),
    ("illegal-memory-access", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_log_is_named(name: str) -> None:
    """The tail of a real failure yields its cause, a sentence with its numbers, and a line of the log as evidence."""
    cause, message = REAL[name]
    lines = (LOGS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    failure = diagnose(lines)
    assert failure is not None
    assert (failure.cause, failure.message[: len(message)]) == (cause, message)
    assert failure.fix
    assert any(failure.evidence[:60] in plain(line) for line in lines)


def test_every_stored_failure_is_tested() -> None:
    """No log lies about without an expectation."""
    assert {path.stem for path in LOGS.glob("*.txt")} == set(REAL) | {"ready-cpu"}


@pytest.mark.parametrize(
    ("cause", "line"), SAMPLES, ids=[f"{i}-{s[0]}" for i, s in enumerate(SAMPLES)]
)
def test_line_is_named(cause: str, line: str) -> None:
    """One telling line, behind vLLM's usual prefix and before its usual consequence, is enough."""
    failure = diagnose(
        [
            *(
                f"(EngineCore pid=71) ERROR 11-29 22:48:01 [core.py:1510] {x}"
                for x in line.split("\n")
            ),
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ]
    )
    assert failure is not None
    assert failure.cause == cause
    assert "{" not in failure.message + failure.fix


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        ("cache-not-writable", "PermissionError: [Errno 13] Permission denied: '/data/models/config.json'"),
        ("cache-not-writable", "PermissionError: [Errno 13] Permission denied: '/.config'"),
        ("user-without-name", "KeyError: 'uid'"),
        ("gpu-hook", "WARNING the request hook #2 ended with exit status 1"),
        ("gpu-runtime", "INFO device driver with capabilities: [[gpu]] selected"),
        ("gpu-plugin", "0/3 nodes are available: 3 Insufficient memory."),
        ("no-gpu-in-container", "INFO No platform detected, vLLM is running on UnspecifiedPlatform"),
        ("metrics-folder", "FileNotFoundError: [Errno 2] No such file or directory: '/data/users_7.db'"),
        ("metrics-folder", "WARNING Found PROMETHEUS_MULTIPROC_DIR was set by user. This directory must be wiped"),
        ("fused-collectives", "WARNING   - token_num (8192) * hidden_dim (2880) exceeds workspace max_token_num (2048) * hidden_dim (2880)."),
        ("grammar", "ERROR Failed to advance FSM for request chatcmpl-1 for tokens 271. Please file an issue."),
        ("grammar", "RuntimeError: The size of tensor a (4096) must match the size of tensor b (4097) at dimension 0"),
        ("illegal-memory-access", "RuntimeError: CUDA error: an illegal instruction was encountered"),
    ],
)  # fmt: skip
def test_what_only_looks_like_it_is_not_named(cause: str, line: str) -> None:
    """A near miss is told as something else, or not at all."""
    failure = diagnose([line])
    assert failure is None or failure.cause != cause


FATAL = [
    "(EngineCore pid=9) ERROR 11-29 22:48:01 [core.py:1512] EngineCore encountered a fatal error.",
    "(EngineCore pid=9) ERROR 11-29 22:48:01 [core.py:1512] Traceback (most recent call last):",
]


@pytest.mark.parametrize(
    ("lines", "served", "when"),
    [
        (FATAL, False, "while it loaded"),
        (FATAL, None, "while it loaded"),
        (FATAL, True, "while it served"),
        (['INFO: 127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK', *FATAL], None, "while it served"),
        (['INFO: 127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK', *FATAL], False, "while it loaded"),
    ],
)  # fmt: skip
def test_a_crash_while_loading_is_not_told_as_serving(
    lines: list[str], served: bool | None, when: str
) -> None:
    """Whoever knows whether the engine was ready says so; else the log must hold an answer."""
    failure = diagnose(lines, served=served)
    assert failure is not None
    assert (failure.cause, failure.message) == ("engine-died", f"the engine process died {when}")


def test_a_dead_engine_is_told_with_its_last_error() -> None:
    """That it died says little; the exception of its own does."""
    failure = diagnose([*FATAL, "foo.bar.FrobError: the frob is bent"], served=False)
    assert failure is not None
    assert failure.message == "the engine process died while it loaded: FrobError: the frob is bent"


def test_memory_that_runs_out_long_after_the_start() -> None:
    """The lines of the start are no longer kept; that it had served decides."""
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.86 GiB."
    served, loading = diagnose([oom], served=True), diagnose([oom], served=False)
    assert served is not None
    assert loading is not None
    assert (served.cause, loading.cause) == ("oom-serving", "oom-profile")
    assert served.message == "memory ran out while it served"


def test_every_sign_has_a_log_or_a_sample() -> None:
    """Each cause of the table is produced by some text of this file."""
    named = {cause for cause, _ in REAL.values()} | {cause for cause, _ in SAMPLES}
    assert {sign.cause for sign in signs()} - named == {"speculation-refused", "config-refused"}


def test_unlisted_refusals_keep_vllms_own_words() -> None:
    """A validation error without a row of its own is quoted."""
    failure = diagnose(
        [
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig",
            "  Value error, use_heterogeneous_vocab only works with method='draft_model' [type=value_error]",
        ]
    )
    assert failure is not None
    assert failure.cause == "speculation-refused"
    assert failure.message == (
        "vLLM refuses the speculative configuration: use_heterogeneous_vocab only works with method='draft_model'"
    )
    other = diagnose(
        ["1 validation error for VllmConfig", "  Value error, no such thing [type=value_error]"]
    )
    assert other is not None
    assert other.message == "vLLM refuses its VllmConfig: no such thing"


def test_context_that_fits_is_named_in_the_fix() -> None:
    """The largest length the engine suggests is what the user is told to set."""
    failure = diagnose([TOO_LONG])
    assert failure is not None
    assert (
        failure.message
        == "one request of 40960 tokens needs 5.62 GiB of KV cache, and 2.10 GiB are left"
    )
    assert (
        failure.fix
        == "set engine.max_model_len to 15296 or less, or raise engine.gpu_memory_utilization"
    )


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ("Starting to load model /m/t...", "oom-load"),
        ("Loading drafter model...", "oom-load"),
        ("Available KV cache memory: 3.1 GiB", "oom-profile"),
        ("Capturing CUDA graphs (decode, FULL): 3%|", "oom-graphs"),
        ("INFO Starting vLLM server on http://0.0.0.0:8000", "oom-serving"),
    ],
)
def test_out_of_memory_is_named_by_phase(before: str, cause: str) -> None:
    """What to lower depends on what the engine was doing."""
    failure = diagnose(
        [before, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 72.00 MiB."]
    )
    assert failure is not None
    assert failure.cause == cause


def test_cause_wins_over_its_consequences() -> None:
    """Memory that ran out is the cause; the dead engine and the killed worker follow from it."""
    failure = diagnose(
        [
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.86 GiB.",
            "ERROR EngineCore encountered a fatal error.",
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        ]
    )
    assert failure is not None
    assert failure.cause == "oom-profile"


def test_signal_9_without_a_word() -> None:
    """The kernel's out-of-memory killer leaves no line; the exit status tells."""
    failure = diagnose(["INFO loading"], exit_status=-9)
    assert failure is not None
    assert (failure.cause, failure.evidence) == ("killed", "exit status -9")


def test_unknown_error_is_quoted_not_guessed() -> None:
    """The last error that is not a mere consequence, in its own words."""
    failure = diagnose(
        [
            "(Worker pid=3) ERROR 11-29 22:48:01 [w.py:1] foo.bar.FrobError: the frob is bent",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s)",
        ]
    )
    assert failure is not None
    assert (failure.cause, failure.message) == ("engine-error", "FrobError: the frob is bent")


@pytest.mark.parametrize(
    "lines", [[], [""], ["INFO all is well", "INFO Application startup complete."]]
)
def test_nothing_wrong_is_no_failure(lines: list[str]) -> None:
    """A healthy log names no cause."""
    assert diagnose(lines) is None


def test_a_real_healthy_start_is_no_failure() -> None:
    """No sign matches what a good start says."""
    assert diagnose((LOGS / "ready-cpu.txt").read_text(encoding="utf-8").splitlines()) is None
