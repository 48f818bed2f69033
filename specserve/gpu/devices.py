"""The GPUs of this machine, as NVML sees them. Reads; never allocates or changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that holds memory of a device."""

    pid: int
    used_bytes: int | None
    """None where NVML does not tell (containers, MIG, WSL)."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    """NVML's total: the whole board, a little more than CUDA hands out."""
    used_bytes: int
    """In use now by anybody; the driver's own reservation is not in it."""
    reserved_bytes: int = 0
    """What driver and firmware keep for themselves (NVML's ``reserved``); CUDA's total is total -
    reserved."""
    processes: tuple[DeviceProcess, ...] = ()
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None where NVML does not tell."""


def driver_version() -> str | None:
    """The NVIDIA driver's version; None where there is no NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def devices() -> tuple[Device, ...] | None:
    """All devices of this machine; None where there is no NVML (no driver, no GPU, another
    vendor)."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return tuple(_device(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def visible(found: Sequence[Device], selection: str | None) -> tuple[Device, ...]:
    """The devices that ``CUDA_VISIBLE_DEVICES`` leaves to the engine, in its order.

    Numbers and UUID prefixes are understood; as in CUDA, the list ends at the first entry that
    names no device.

    >>> gpus = [Device(i, f"GPU-{i}", "NVIDIA L4", 0, 0) for i in range(3)]
    >>> [d.index for d in visible(gpus, "2,0")], visible(gpus, "")
    ([2, 0], ())
    """
    if selection is None:
        return tuple(found)
    chosen: list[Device] = []
    for entry in (part.strip() for part in selection.split(",")):
        for device in found:
            by_uuid = entry != "" and not entry.isdigit() and device.uuid.startswith(entry)
            if entry == str(device.index) or by_uuid:
                chosen.append(device)
                break
        else:
            break
    return tuple(chosen)


def of_engine(found: Sequence[Device] | None, selection: str | None) -> tuple[Device, ...] | None:
    """The devices for the engine; None where nothing is known: a board's total is not that of one
    of its MIG slices.

    >>> of_engine([Device(0, "GPU-0", "NVIDIA H100", 0, 0)], "MIG-5b2e")
    """
    if found is None or (selection or "").strip().startswith("MIG-"):
        return None
    return visible(found, selection)


def _device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    reserved = 0
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except nvml.NVMLError:
        # Drivers before 510 count their reservation as used and do not tell it apart.
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(
        index,
        nvml.nvmlDeviceGetUUID(handle),
        nvml.nvmlDeviceGetName(handle),
        int(memory.total),
        int(memory.used),
        reserved,
        _processes(nvml, handle),
        _capability(nvml, handle),
    )


def _capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:
        return None
    return int(major), int(minor)


def _processes(nvml: Any, handle: Any) -> tuple[DeviceProcess, ...]:
    """Compute and graphics processes; empty where the driver hides them from this container."""
    found: dict[int, DeviceProcess] = {}
    for query in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        with suppress(nvml.NVMLError):
            for process in query(handle):
                used = process.usedGpuMemory
                if used is not None:
                    used = int(used)
                found[process.pid] = DeviceProcess(process.pid, used, _name(process.pid))
    return tuple(found.values())


def _name(pid: int) -> str | None:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None
