"""What this machine lacks for the engine, found before anything loads.

Reads files, NVML and the environment; never imports torch or vLLM.
"""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specserve.checkpoint.access import HubAccess
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.quantization import quant_method
from specserve.config.schema import Settings
from specserve.engine.installed.introspect import release
from specserve.files import read_small
from specserve.findings import Finding
from specserve.gpu.devices import Device
from specserve.units import GIB, size

_TARGET = "models.target_model"
MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA major -> the oldest driver that runs programs built with it. From
docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, read 2026-12-01."""
MIN_CAPABILITY = {
    "fp8": 75,
    "modelopt": 80,
    "modelopt_fp4": 75,
    "modelopt_mxfp8": 80,
    "mxfp4": 80,
    "fbgemm_fp8": 80,
    "fp_quant": 100,
    "compressed-tensors": 70,
    "gptq": 60,
    "awq": 75,
    "torchao": 75,
    "experts_int8": 80,
    "moe_wna16": 70,
    "quark": 70,
}
"""Method -> what ``get_min_capability`` of its class returns in vLLM 0.32, which refuses less
(``config/vllm.py``). Marlin is counted: it serves fp8 from 7.5 and nvfp4 from 7.5."""
_BFLOAT16 = 80
_NATIVE = {"fp8": 89, "modelopt": 89, "fbgemm_fp8": 89, "modelopt_fp4": 100, "mxfp4": 100}
"""Method -> the capability from which the GPU computes in the type itself."""
_CACHE_ROOM = GIB
"""Ours: under this much room for compile caches a warning is due."""
_LFS = b"version https://git-lfs"
_LFS_BYTES = 1024
_FILES = re.compile(r"\.(safetensors|json|bin|pt|gguf|model|jinja)$")
_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|gguf)$")
_CUDA = re.compile(r"^cuda\b[^=\n]*= *['\"](\d+(?:\.\d+)*)['\"]", re.MULTILINE)
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where Python looks for the name of a user before it asks /etc/passwd."""


@dataclass(frozen=True)
class Torch:
    """The installed torch, by its metadata."""

    version: str
    cuda: str | None = None
    """The CUDA it was built with; None for another build, or where that is not known."""


@dataclass(frozen=True)
class ServingMachine:
    """What there is to judge by; None where it is not known."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Of the engine: the caller's, and ``engine.env`` over it."""
    home: Path = Path("/")
    on_cpu: bool = False
    driver: str | None = None
    devices: tuple[Device, ...] | None = None
    """Those that the engine may use."""
    torch: Torch | None = None


def installed_torch() -> Torch | None:
    """Version and CUDA of the torch beside us, from its files; None when there is none."""
    try:
        found = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        text = read_small(Path(str(found.locate_file("torch/version.py"))))
    except (OSError, ValueError):
        return Torch(found.version)
    return Torch(found.version, cuda_of(text))


def cuda_of(text: str) -> str | None:
    """The CUDA that a ``torch/version.py`` names; None for a build without.

    >>> cuda_of("cuda: Optional[str] = '13.0'"), cuda_of("cuda: Optional[str] = None\\nhip = '6.3'")
    ('13.0', None)
    """
    match = _CUDA.search(text)
    if match is None:
        return None
    return match[1]


def has_user_name(environ: Mapping[str, str]) -> bool:
    """Whether Python finds a name for the user who runs this."""
    if any(environ.get(name) for name in _NAMES):
        return True
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


def findings(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    machine: ServingMachine,
    *,
    named: bool | None = None,
) -> list[Finding]:
    """Everything that would fail, or fall back, after minutes of loading. ``named`` is
    `has_user_name`; None asks it."""
    found = [*_driver(machine), *_unequal(settings, machine)]
    found += [*_types(settings, target, machine)]
    found += [*_caches(settings, machine), *_download((target, draft), machine)]
    if named is None:
        named = has_user_name(machine.environ)
    if not named and machine.torch is not None and release(machine.torch.version) < (2, 13):
        message = (
            f"user id {os.getuid()} has no name, and this torch names its cache after the user"
        )
        fix = "--set engine.env.USER=vllm   # any name"
        found.append(Finding("user-without-name", "error", "engine.env", message, fix))
    return found


def files(settings: Settings) -> Iterator[Finding]:
    """Files of local checkpoints that cannot be read, are empty, or stand for another file."""
    models = settings.models
    places = [(f"{_TARGET}.path", models.target_model.path)]
    if settings.uses_draft_model and models.draft_model is not None:
        places.append(("models.draft_model.path", models.draft_model.path))
    for key, path in places:
        folder = Path(path)
        try:
            present = sorted(p for p in folder.iterdir() if _FILES.search(p.name))
        except OSError:
            continue  # no folder, or one whose reader says what is wrong with it
        for file in present:
            yield from _file(file, f"{key} ({file})")


def _file(file: Path, where: str) -> Iterator[Finding]:
    again = "download this file again"
    try:
        with file.open("rb") as opened:
            head = opened.read(len(_LFS))
            length = os.fstat(opened.fileno()).st_size
    except OSError as error:
        message = f"cannot be read ({error.strerror})"
        fix = f"chmod a+r {file}   # or run as a user who may read it"
        if isinstance(error, FileNotFoundError):  # a link whose file has gone
            fix = again
        yield Finding("checkpoint-unreadable", "error", where, message, fix)
        return
    if head == _LFS and length < _LFS_BYTES:
        message = f"is a Git LFS pointer of {length} bytes, not the file itself"
        fix = f"git -C {file.parent} lfs pull"
        yield Finding("checkpoint-lfs-pointer", "error", where, message, fix)
    elif length == 0 and _WEIGHTS.search(file.name):
        yield Finding("checkpoint-empty-file", "error", where, "is empty", again)


def _driver(machine: ServingMachine) -> Iterator[Finding]:
    torch, driver = machine.torch, machine.driver
    if machine.on_cpu or torch is None or torch.cuda is None or driver is None:
        return
    needed = MIN_DRIVER.get(release(torch.cuda)[0])
    has = release(driver)[:1]
    if needed is None or not has or has[0] >= needed:
        return
    message = (
        f"driver {driver} is too old for torch {torch.version}, which is built with CUDA "
        f"{torch.cuda}; it must be {needed} or newer"
    )
    fix = f"install NVIDIA driver {needed} or newer, then: nvidia-smi"
    libraries = machine.environ.get("LD_LIBRARY_PATH", "")
    if machine.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "0") in ("1", "true") or (
        "compat" in libraries
    ):
        # NVIDIA's package for newer CUDA on older drivers of data center boards.
        yield Finding("driver-too-old", "warning", "NVIDIA driver", message, fix)
        return
    yield Finding("driver-too-old", "error", "NVIDIA driver", message, fix)


def _used(settings: Settings, machine: ServingMachine) -> tuple[Device, ...]:
    """The devices of this node's workers."""
    return (machine.devices or ())[: settings.gpus_per_node]


def _unequal(settings: Settings, machine: ServingMachine) -> Iterator[Finding]:
    used = _used(settings, machine)
    sizes = {device.total_bytes - device.reserved_bytes for device in used}
    names = sorted({device.name for device in used})
    if machine.on_cpu or len(used) < 2 or (len(names) == 1 and max(sizes) < 1.02 * min(sizes)):
        return
    boards = ", ".join(f"{d.index}: {d.name} {size(d.total_bytes)}" for d in used)
    message = f"one model is split over unequal GPUs ({boards}); the smallest and slowest decides"
    best = max(used, key=lambda d: sum(o.name == d.name for o in machine.devices or ()))
    equal = [str(d.index) for d in machine.devices or () if d.name == best.name]
    fix = f"lower {_TARGET}.tensor_parallel_size, or --skip gpus-unequal"
    if len(equal) >= len(used):
        picked = ",".join(equal[: len(used)])
        fix = f"CUDA_VISIBLE_DEVICES={picked} specserve launch CONFIG"
    yield Finding("gpus-unequal", "warning", f"{_TARGET}.tensor_parallel_size", message, fix)


def _types(
    settings: Settings, target: ModelFacts | None, machine: ServingMachine
) -> Iterator[Finding]:
    """What the weakest GPU cannot compute, or only by a detour."""
    known = [d for d in _used(settings, machine) if d.capability is not None]
    if machine.on_cpu or not known:
        return
    weakest = min(known, key=lambda d: d.capability or (0, 0))
    major, minor = weakest.capability or (0, 0)
    has, board = 10 * major + minor, f"{weakest.name} has compute capability {major}.{minor}"
    ours = settings.models.target_model
    if has < _BFLOAT16 and ours.dtype == "bfloat16":
        message = f"bfloat16 needs compute capability 8.0, and {board}"
        yield Finding(
            "gpu-dtype", "error", f"{_TARGET}.dtype", message, f"--set {_TARGET}.dtype=float16"
        )
    method = ours.quantization
    if method is None and target is not None:
        method = quant_method(target.config)
    needed = MIN_CAPABILITY.get(method or "")
    where = f"{_TARGET}.quantization"
    if needed is not None and has < needed:
        message = f"{method} needs compute capability {needed / 10:.1f}, and {board}"
        fix = "use a checkpoint without it, or a newer GPU"
        yield Finding("gpu-quantization", "error", where, message, fix)
    elif method in _NATIVE and has < _NATIVE[method]:
        message = (
            f"{board}, and computes {method} from {_NATIVE[method] / 10:.1f} on; here it saves "
            "memory only, since vLLM computes in 16 bits"
        )
        yield Finding("gpu-quantization-emulated", "info", where, message)


def _caches(settings: Settings, machine: ServingMachine) -> Iterator[Finding]:
    """Compile caches that cannot be written, or have no room."""
    eager = settings.engine.enforce_eager
    severe = not machine.on_cpu and not eager
    for name, folder in _compile_caches(machine):
        if name == "TRITON_CACHE_DIR" and machine.on_cpu:
            continue
        above = _existing(folder)
        where = f"engine.env.{name} ({folder})"
        if above is None or not os.access(above, os.W_OK | os.X_OK) or not above.is_dir():
            message = f"cannot be written by user {os.getuid()}; compiled kernels go there"
            fix = (
                f"--set engine.env.{name}=/tmp/{name.lower()}   # or any folder that may be written"
            )
            if severe:
                yield Finding("cache-not-writable", "error", where, message, fix)
            else:
                yield Finding("cache-not-writable", "warning", where, message, fix)
        elif not eager and _free(above) < _CACHE_ROOM:
            message = f"{size(_free(above))} are free for compiled kernels"
            fix = "df -h   # free some space, or give another folder"
            yield Finding("cache-space", "warning", where, message, fix)


def _compile_caches(machine: ServingMachine) -> Iterator[tuple[str, Path]]:
    """As vLLM (``envs.py``), Triton (``knobs.py``) and torch find them."""
    env, home = machine.environ, machine.home
    base = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    yield "VLLM_CACHE_ROOT", _path(env.get("VLLM_CACHE_ROOT") or f"{base}/vllm", home)
    triton = env.get("TRITON_CACHE_DIR") or f"{env.get('TRITON_HOME') or home}/.triton/cache"
    yield "TRITON_CACHE_DIR", _path(triton, home)
    inductor = env.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor:  # else a folder of the user's own under the temporary folder
        yield "TORCHINDUCTOR_CACHE_DIR", _path(inductor, home)


def _path(text: str, home: Path) -> Path:
    if text == "~" or text.startswith("~/"):
        return home / text[2:]
    return Path(text)


def _existing(folder: Path) -> Path | None:
    """The folder, or the nearest above it that is there; None where none can be looked at."""
    for place in (folder, *folder.parents):
        try:
            place.stat()
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return place
    return None


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_frsize * status.f_bavail


def _download(models: tuple[ModelFacts | None, ...], machine: ServingMachine) -> Iterator[Finding]:
    """Weights that are still on the Hub, against the room where they will lie."""
    missing = [m for m in models if m is not None and m.folder is None and m.total_size_bytes]
    if not missing:
        return
    needed = sum(m.total_size_bytes or 0 for m in missing)
    access = HubAccess.of(machine.environ)
    if access.modelscope is not None:
        return
    cache = access.cache
    above = _existing(cache)
    if above is None:
        return
    if not os.access(above, os.W_OK | os.X_OK):
        message = (
            f"cannot be written by user {os.getuid()}; {size(needed)} must be downloaded to it"
        )
        fix = "--set engine.env.HF_HOME=/a/folder/with/room"
        yield Finding("cache-not-writable", "error", f"HF_HOME ({cache})", message, fix)
    elif _free(above) < needed:
        names = " and ".join(m.path for m in missing)
        message = f"{size(_free(above))} are free, and {names} need {size(needed)}"
        fix = "--set engine.env.HF_HOME=/a/folder/with/room"
        yield Finding("download-space", "error", f"HF_HOME ({cache})", message, fix)
