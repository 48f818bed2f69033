"""Three verdicts, never two: what was not looked at has neither passed nor failed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from specserve import cli
from specserve.app import preflight
from specserve.app.preflight import PreflightReport, Purpose
from specserve.config.load import Loaded, load
from specserve.engine.installed import introspect
from specserve.errors import PreflightRefused
from tests import checkpoints as make

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
DRAFT = {
    **QWEN3,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
A100 = "hardware: {gpu_name: A100-80, gpu_count: 2}\n"
HOLED = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 8192}
"""A config that lost what its sizes follow from."""


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without vLLM and, as a test machine has, without a GPU."""
    monkeypatch.setattr(introspect, "DISTRIBUTIONS", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder(path: Path, config: dict[str, Any]) -> None:
    """A checkpoint as a laptop has it: config and tokenizer, no weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(make.tokenizer()))


def file(folder: Path, body: str) -> Path:
    """A config file beside ``target`` and ``draft``."""
    path = folder / "pair.yaml"
    path.write_text(
        f"models:\n  target_model: {{path: {folder}/target, tensor_parallel_size: 2}}\n"
        f"  draft_model: {{path: {folder}/draft}}\n"
        f"speculative_decoding: {{num_speculative_tokens: 4}}\n{body}"
    )
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., Loaded]:
    """A pair of big models without weights, with whatever else the file says."""

    def made(body: str = "", target: dict[str, Any] = QWEN3) -> Loaded:
        folder(tmp_path / "target", target)
        folder(tmp_path / "draft", DRAFT)
        return load(file(tmp_path, body), environ={})

    return made


def run(loaded: Loaded, *skip: str, purpose: Purpose = "look") -> PreflightReport:
    """The whole preflight."""
    return preflight.run(loaded, skip=skip, environ=os.environ, purpose=purpose)


def codes(report: PreflightReport) -> dict[str, str]:
    """Code to severity."""
    return {f.code: f.severity for f in report.findings}


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, and stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out.splitlines(), said.err


def test_nothing_to_judge_by_is_said_in_the_last_line_and_in_json(pair, capsys) -> None:
    """Without vLLM and GPU the pair is judged; engine and memory are unknown, with a code each."""
    loaded = pair("engine: {max_model_len: 16384}\n")
    report = run(loaded)
    assert report.verdicts.as_dict() == {"pair": "fits", "engine": "unknown", "memory": "unknown"}
    assert codes(report)["vram-not-checked"] == "info"
    assert codes(report)["engine-assumed"] == "info"
    code, lines, _ = typed(capsys, "check", str(loaded.path))
    assert code == 0
    assert lines[-1].startswith("OK ")
    assert "; engine not checked: which will run is not known, assumed is vllm 0." in lines[-1]
    assert lines[-1].endswith("; memory not checked: no GPU here and none described")
    code, lines, _ = typed(capsys, "check", str(loaded.path), "--format", "json")
    body = json.loads("\n".join(lines))
    assert (code, body["ok"], body["memory"], body["engine"]) == (0, True, "unknown", "unknown")
    assert body["pair"]["verdict"] == "fits"
    stated = preflight.run(load(loaded.path, environ={}, overrides=["engine.version='0.32'"]))
    assert stated.verdicts.engine == "fits"


def test_a_folder_without_weights_is_judged_with_a_note(pair) -> None:
    """A laptop has config and tokenizer: check looks at them and says so; launch refuses."""
    loaded = pair(A100)
    report = run(loaded)
    assert report.ok
    assert codes(report)["weights-missing"] == "info"
    assert report.verdicts.memory == "fits"
    assert any("no headers of its weights" in line for line in report.unproven)
    assert codes(run(loaded, purpose="launch"))["weights-missing"] == "error"


def test_a_missing_shard_is_no_note(tmp_path, pair) -> None:
    """A download that stopped half-way is refused by check too: something is there, and wrong."""
    loaded = pair(A100)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    make.write(tmp_path / "other", make.llama())
    weights = tmp_path / "other" / "model.safetensors"
    (tmp_path / "target" / "model-1.safetensors").write_bytes(weights.read_bytes())
    assert "weights-missing" in {f.code for f in run(loaded).errors}


@pytest.mark.parametrize("command", ["check", "plan"])
def test_an_unknown_size_beside_hardware_ends_with_3(command, pair, capsys) -> None:
    """A model whose config lost its sizes never fits a described GPU: cannot say, exit code 3."""
    loaded = pair(A100, target=HOLED)
    report = run(loaded)
    assert (report.verdicts.memory, codes(report)["size-unknown"]) == ("unknown", "error")
    code, lines, err = typed(capsys, command, str(loaded.path))
    assert code == 3
    assert "cannot say whether it fits" in "\n".join(lines) + err
    assert "fits;" not in "\n".join(lines)
    code, lines, _ = typed(capsys, command, str(loaded.path), "--format", "json")
    body = json.loads("\n".join(lines))
    assert (code, body["ok"], body["memory"]) == (3, False, "unknown")
    assert body["vram"]["fits"] is None
    assert body["vram"]["gpus"][0]["target_weights_bytes"] is None


def test_an_unknown_size_without_hardware_leaves_it_to_the_others(pair) -> None:
    """No GPU, none described: the unknown size is information."""
    report = run(pair(target=HOLED))
    assert codes(report)["size-unknown"] == "info"
    assert report.ok


def test_a_launch_without_a_gpu_in_sight_is_not_refused_for_a_size(pair) -> None:
    """What is described is for looks; a launch refuses an unknown size only where it sees a GPU."""
    loaded = pair(A100, target=HOLED)
    assert codes(run(loaded, purpose="launch"))["size-unknown"] == "warning"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that shows two GPUs of 80 GiB."""
    memory = SimpleNamespace(total=80 * 2**30, used=0, reserved=0)
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: memory,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [],
    }.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.usefixtures("gpus")
def test_a_launch_that_sees_a_gpu_is_refused_for_an_unknown_size(pair) -> None:
    """On the machine that serves, not knowing is a reason to stop; --skip goes on."""
    loaded = pair(target=HOLED)
    assert codes(run(loaded, purpose="launch"))["size-unknown"] == "error"
    assert "size-unknown" not in codes(run(loaded, "size-unknown", purpose="launch"))


@pytest.mark.usefixtures("gpus")
def test_gpus_that_are_here_give_the_verdict_and_the_next_command(pair, capsys) -> None:
    """Found by the driver, not described: memory is judged, and the next thing to type serves."""
    loaded = pair("engine: {max_model_len: 16384, version: '0.32'}\n")
    code, lines, _ = typed(capsys, "check", str(loaded.path))
    assert code == 0
    assert f"next         specserve launch {loaded.path}" in lines
    assert "not checked" not in lines[-1]


def test_a_skipped_size_goes_on_and_is_still_said(pair, capsys) -> None:
    """--skip size-unknown passes, and the last line keeps what nobody knows."""
    loaded = pair(A100, target=HOLED)
    code, lines, _ = typed(capsys, "check", str(loaded.path), "--skip", "size-unknown")
    assert code == 0
    assert "cannot say whether it fits: unknown size of target weights" in lines[-1]


@pytest.mark.parametrize(("space", "verdict"), [("1", "fits"), ("1000000", "does not fit")])
def test_a_cpu_engine_is_judged_by_its_own_memory(space, verdict, pair) -> None:
    """VLLM_CPU_KVCACHE_SPACE and free memory decide; the lack of a GPU is no reason for anything."""
    body = f"engine: {{max_model_len: 512, env: {{VLLM_CPU_KVCACHE_SPACE: '{space}'}}}}\n"
    small = {**DRAFT, "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 151936}
    report = run(pair(body, target=small))
    assert report.verdicts.memory == verdict
    assert "vram-not-checked" not in codes(report)


@pytest.mark.parametrize("command", ["check", "plan"])
def test_plan_refuses_what_check_refuses(command, pair, capsys) -> None:
    """A context beyond the model's own is refused by both, with the same code and remedy."""
    loaded = pair(A100 + "engine: {max_model_len: 200000}\n")
    code, lines, _ = typed(capsys, command, str(loaded.path), "--format", "json")
    body = json.loads("\n".join(lines))
    assert code == 3
    (error,) = [f for f in body["findings"] if f["severity"] == "error"]
    assert (error["code"], error["fix"]) == (
        "context-too-long",
        "set engine.max_model_len: 40960",
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("A100", "comes with 80 or 40 GB"),
        ("banana", "not the name of a known GPU"),
        ("Ascend 910B", "memory use is not known here"),
    ],
)
def test_a_name_that_is_no_board_is_no_success_in_silence(name, said, pair, capsys) -> None:
    """The last line of check and the conclusion of plan say that memory was not checked, and why."""
    loaded = pair("engine: {max_model_len: 16384}\n")
    described = ["--set", f"hardware.gpu_name={name}"]
    code, lines, _ = typed(capsys, "check", str(loaded.path), *described)
    assert code == 0
    assert "memory not checked" in lines[-1]
    assert said in lines[-1]
    code, lines, _ = typed(capsys, "plan", str(loaded.path), *described)
    assert any("memory not checked" in line and said in line for line in lines)


def test_ok_shows_its_work(pair, capsys) -> None:
    """A line for each thing proven, each thing not looked at, the price, and what to type."""
    loaded = pair(A100 + "engine: {max_model_len: 16384}\n")
    _, lines, _ = typed(capsys, "check", str(loaded.path))
    text = "\n".join(lines)
    assert "proven       vocabulary: 320 of 320 tokens equal" in text
    assert "proven       context: 16,384 of the 40,960 tokens" in text
    assert "not checked  acceptance: only a measurement tells" in text
    assert (
        "price        184 KiB of KV per token, 56 of them the draft's: 13.2 requests instead of 19.6"
        in text
    )
    assert f"next         specserve launch {loaded.path} --dry-run" in text


def test_a_plan_that_does_not_fit_prints_its_table_once(pair, capsys) -> None:
    """Standard output has the table, the error its first line and the remedies with their price."""
    loaded = pair("hardware: {gpu_name: 4090, gpu_count: 2}\nengine: {max_model_len: 16384}\n")
    code, lines, err = typed(capsys, "plan", str(loaded.path))
    assert code == 3
    assert sum(line.strip().startswith("target weights") for line in lines) == 1
    assert "target weights" not in err
    assert "4 such GPUs" in err


REFUSED = "hardware: {gpu_name: L40S, gpu_count: 2}\n"


def test_every_remedy_fits_when_it_is_typed(pair) -> None:
    """Each priced remedy that edits the config is applied: the plan then fits, as it was promised."""
    loaded = pair(REFUSED)
    report = run(loaded)
    assert codes(report)["does-not-fit"] == "error"
    assert report.remedies
    for remedy in report.remedies:
        if not remedy.changes:
            continue
        sets = [f"{change.key}={json.dumps(change.value)}" for change in remedy.changes]
        if any("tensor_parallel" in change.key for change in remedy.changes):
            sets.append("hardware.gpu_count=8")
        again = run(load(loaded.path, environ={}, overrides=sets))
        assert again.plan is not None
        assert again.verdicts.memory == "fits", sets
        assert again.plan.capacity.requests == pytest.approx(remedy.requests)


def test_remedies_price_draft_context_cache_and_gpus(pair) -> None:
    """A 32B pair that lacks a few GiB: fewer bits, a lookup, shorter context, fp8 cache, more GPUs."""
    report = run(pair(REFUSED))
    whats = " | ".join(" ".join(remedy.row) for remedy in report.remedies)
    for part in (
        "engine.max_model_len",
        "engine.kv_cache_dtype: fp8",
        "speculative_decoding.method: ngram",
        "tensor_parallel_size: 4",
        "GiB less",
    ):
        assert part in whats
    with pytest.raises(PreflightRefused) as refused:
        preflight.require(report)
    assert "engine.kv_cache_dtype: fp8" in str(refused.value)
