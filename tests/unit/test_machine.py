"""The machine before anything loads: driver, GPUs, types, caches, room, files."""

from __future__ import annotations

import ast
import importlib.util
import types
from dataclasses import replace
from pathlib import Path

import pytest

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.engine.installed.machine import (
    MIN_CAPABILITY,
    ServingMachine,
    Torch,
    files,
    findings,
    installed_torch,
)
from specserve.findings import Finding
from specserve.gpu import devices as gpu
from specserve.units import GIB

H100 = gpu.Device(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 * GIB, 0, capability=(9, 0))


def settings(**target: object) -> Settings:
    return Settings.model_validate({"models": {"target_model": {"path": "org/t", **target}}})


def machine(tmp_path: Path, *devices: gpu.Device, **more: object) -> ServingMachine:
    base = ServingMachine(
        {}, tmp_path, driver="580.65.06", devices=devices, torch=Torch("2.13.0", "13.0")
    )
    return replace(base, **more)  # type: ignore[arg-type]


def codes(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in found]


def judged(
    here: ServingMachine, given: Settings | None = None, model: ModelFacts | None = None
) -> list[Finding]:
    return findings(given or settings(), model, None, here, named=True)


@pytest.mark.parametrize(
    ("driver", "cuda", "environ", "expected"),
    [
        ("580.65.06", "13.0", {}, []),
        ("575.57.08", "13.0", {}, [("driver-too-old", "error")]),
        ("575.57.08", "12.9", {}, []),
        ("520.61.05", "12.8", {}, [("driver-too-old", "error")]),
        ("575.57.08", "13.0", {"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"}, [("driver-too-old", "warning")]),
        ("575.57.08", "13.0", {"LD_LIBRARY_PATH": "/usr/local/cuda/compat"}, [("driver-too-old", "warning")]),
        ("575.57.08", None, {}, []),
        (None, "13.0", {}, []),
        ("575.57.08", "99.0", {}, []),
    ],
)  # fmt: skip
def test_driver_against_the_cuda_of_torch(
    tmp_path: Path,
    driver: str | None,
    cuda: str | None,
    environ: dict[str, str],
    expected: list[tuple[str, str]],
) -> None:
    """NVIDIA's table by CUDA major; its package for older drivers makes it a warning."""
    here = machine(tmp_path, driver=driver, torch=Torch("2.13.0", cuda), environ=environ)
    found = judged(here)
    assert codes(found) == expected
    assert all("or newer" in f.message and f.fix for f in found)


def test_torch_is_read_and_not_imported() -> None:
    """The CUDA of the installed torch, from its file; here it is a build for CPUs."""
    found = installed_torch()
    assert found is not None
    assert found.version
    assert found.cuda is None or found.cuda[0].isdigit()


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([replace(H100, index=1)], []),
        ([replace(H100, index=1, total_bytes=81 * GIB)], []),
        ([replace(H100, index=1, total_bytes=40 * GIB)], [("gpus-unequal", "warning")]),
        ([replace(H100, index=1, name="NVIDIA L4")], [("gpus-unequal", "warning")]),
    ],
)
def test_gpus_of_one_model_are_equal(
    tmp_path: Path, others: list[gpu.Device], expected: list[tuple[str, str]]
) -> None:
    """In kind and in memory, within what boards of one kind differ by."""
    given = settings(tensor_parallel_size=2)
    assert codes(judged(machine(tmp_path, H100, *others), given)) == expected
    assert judged(machine(tmp_path, H100, *others)) == []


def test_equal_gpus_are_named_where_there_are_enough(tmp_path: Path) -> None:
    """The fix picks them by their numbers."""
    l4 = replace(H100, index=1, name="NVIDIA L4")
    here = machine(tmp_path, H100, l4, replace(H100, index=2))
    (found,) = judged(here, settings(tensor_parallel_size=2))
    assert found.fix == "CUDA_VISIBLE_DEVICES=0,2 specserve launch CONFIG"


@pytest.mark.parametrize(
    ("capability", "target", "quantization", "expected"),
    [
        ((7, 5), {"dtype": "bfloat16"}, None, [("gpu-dtype", "error")]),
        ((8, 0), {"dtype": "bfloat16"}, None, []),
        ((7, 5), {"dtype": "auto"}, None, []),
        ((7, 0), {}, "fp8", [("gpu-quantization", "error")]),
        ((8, 6), {}, "fp8", [("gpu-quantization-emulated", "info")]),
        ((8, 9), {}, "fp8", []),
        ((9, 0), {}, "modelopt_fp4", [("gpu-quantization-emulated", "info")]),
        ((10, 0), {}, "modelopt_fp4", []),
        ((9, 0), {}, "fp_quant", [("gpu-quantization", "error")]),
        ((7, 0), {}, "a-method-of-tomorrow", []),
        (None, {"dtype": "bfloat16"}, "fp8", []),
    ],
)
def test_what_a_gpu_can_compute(
    tmp_path: Path,
    capability: tuple[int, int] | None,
    target: dict[str, str],
    quantization: str | None,
    expected: list[tuple[str, str]],
) -> None:
    """As vLLM refuses it, Marlin's detours counted; a method that is not known says nothing."""
    config: dict[str, object] = {}
    if quantization is not None:
        config["quantization_config"] = {"quant_method": quantization}
    here = machine(tmp_path, replace(H100, capability=capability))
    assert (
        codes(judged(here, settings(**target), ModelFacts("org/t", config, tmp_path))) == expected
    )


def test_the_table_of_capabilities_is_that_of_the_installed_vllm() -> None:
    """``get_min_capability`` of each method's class, read from vLLM's source."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs an installed vLLM")
    folder = Path(spec.submodule_search_locations[0]) / "model_executor/layers/quantization"
    said: dict[str, int] = {}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name == "get_min_capability":
                        (returned,) = [r.value for r in part.body if isinstance(r, ast.Return)][
                            :1
                        ] or [None]
                        if isinstance(returned, ast.Constant) and isinstance(returned.value, int):
                            said[node.name] = returned.value
    classes = {
        "fp8": "Fp8Config",
        "modelopt": "ModelOptFp8Config",
        "modelopt_fp4": "ModelOptNvFp4Config",
        "modelopt_mxfp8": "ModelOptMxFp8Config",
        "mxfp4": "Mxfp4Config",
        "fbgemm_fp8": "FBGEMMFp8Config",
        "fp_quant": "FPQuantConfig",
        "compressed-tensors": "CompressedTensorsConfig",
        "gptq": "AutoGPTQConfig",
        "awq": "AutoAWQConfig",
        "torchao": "TorchAOConfig",
        "experts_int8": "ExpertsInt8Config",
        "moe_wna16": "MoeWNA16Config",
        "quark": "QuarkConfig",
    }
    assert {name: said.get(cls) for name, cls in classes.items()} == MIN_CAPABILITY


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the folder's place; where nothing is compiled it is a warning."""
    (tmp_path / "file").write_text("")
    here = machine(tmp_path, environ={"TRITON_CACHE_DIR": str(tmp_path / "file/cache")})
    (found,) = judged(here)
    assert (found.code, found.severity) == ("cache-not-writable", "error")
    assert found.fix is not None
    assert found.fix.startswith("--set engine.env.TRITON_CACHE_DIR=")
    eager = Settings.model_validate(
        {"models": {"target_model": {"path": "org/t"}}, "engine": {"enforce_eager": True}}
    )
    assert codes(judged(here, eager)) == [("cache-not-writable", "warning")]
    assert judged(replace(here, on_cpu=True)) == []


def test_room_for_what_must_be_downloaded(tmp_path: Path) -> None:
    """Only what is not on this machine counts."""
    here = machine(tmp_path, environ={"HF_HOME": str(tmp_path / "hf")})
    huge = ModelFacts("org/t", {}, None, total_size_bytes=1 << 60)
    (found,) = judged(here, model=huge)
    assert (found.code, found.severity) == ("download-space", "error")
    assert "org/t need" in found.message
    assert judged(here, model=replace(huge, folder=tmp_path)) == []
    assert judged(here, model=replace(huge, total_size_bytes=1)) == []


def test_a_user_without_a_name(tmp_path: Path) -> None:
    """Torch before 2.13 cannot start without one."""
    for version, expected in (("2.12.1", ["user-without-name"]), ("2.13.0", [])):
        here = machine(tmp_path, torch=Torch(version))
        found = findings(settings(), None, None, here, named=False)
        assert [f.code for f in found] == expected


def test_files_that_stand_for_others(tmp_path: Path) -> None:
    """A Git LFS pointer, an empty shard, a link to nothing; what is whole is not named."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 976\n"
    (tmp_path / "model-1.safetensors").write_text(pointer)
    (tmp_path / "model-2.safetensors").write_text("")
    (tmp_path / "model-3.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "model-4.safetensors").write_text("whole")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("")
    found = list(files(settings(path=str(tmp_path))))
    assert [f.code for f in found] == [
        "checkpoint-lfs-pointer",
        "checkpoint-empty-file",
        "checkpoint-unreadable",
    ]
    assert all(f.severity == "error" and str(tmp_path) in f.where for f in found)
    assert list(files(settings())) == []


def test_nvml_gives_capability_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not tell leaves the capability unknown."""

    class NVMLError(Exception):
        pass

    def capability(handle: int) -> tuple[int, int]:
        if handle:
            raise NVMLError
        return 9, 0

    def processes(_: int) -> list[types.SimpleNamespace]:
        return []

    def memory(_: int, version: int = 0) -> types.SimpleNamespace:
        return types.SimpleNamespace(total=80 * GIB, used=version, reserved=0)

    fake = types.ModuleType("pynvml")
    fake.__dict__.update(
        NVMLError=NVMLError,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda i: f"GPU-{i}",
        nvmlDeviceGetName=lambda _: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=processes,
        nvmlDeviceGetGraphicsRunningProcesses=processes,
        nvmlDeviceGetCudaComputeCapability=capability,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    assert [device.capability for device in gpu.devices() or ()] == [(9, 0), None]
    assert gpu.driver_version() == "580.65.06"
