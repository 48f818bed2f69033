"""Telemetry of the GPUs that the engine uses, through NVML. What a device does not report is left
out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import fsum
from statistics import fmean
from typing import Any, Protocol, Self

from specserve.gpu.devices import Device, visible
from specserve.metric_families import MetricKey, key

THROTTLE_REASONS: Mapping[str, int] = {"power": 0x4 | 0x80, "thermal": 0x20 | 0x40, "hardware": 0x8}
"""NVML's clock event reasons (nvml.h, 13.580): software power cap and power brake; software and
hardware thermal slowdown; the hardware's general slowdown."""


class Nvml(Protocol):
    """What is used of pynvml. A handle is opaque here."""

    NVMLError: type[Exception]
    NVML_TEMPERATURE_GPU: int
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: int
    NVML_MEMORY_ERROR_TYPE_CORRECTED: int
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED: int
    NVML_VOLATILE_ECC: int

    def __getattr__(self, function: str) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True)
class _Handle:
    """One device of NVML's."""

    index: int
    uuid: str
    handle: Any


class Telemetry:
    """Reads the devices once per cycle. ``nvml`` is the pynvml module, or something like it."""

    def __init__(self, nvml: Nvml, *, visible: str | None, count: int) -> None:
        """``visible`` is the engine's CUDA_VISIBLE_DEVICES; ``count`` how many devices it uses
        (TP x PP)."""
        self._nvml, self._visible, self._count = nvml, visible, count
        self._handles: list[_Handle] | None = None

    def readings(self, pids: Collection[int] = ()) -> dict[MetricKey, float]:
        """Everything about the devices in use; empty without a GPU or a driver.

        In use are those on which one of ``pids`` computes; where NVML hides processes (containers),
        the first ``count`` of the visible ones.
        """
        try:
            if self._handles is None:
                self._nvml.nvmlInit()
                self._handles = self._find()
        except self._nvml.NVMLError:
            return {}
        used = [d for d in self._handles if not set(pids).isdisjoint(self._pids(d) or ())]
        out: dict[MetricKey, float] = {}
        for device in used or self._handles[: self._count]:
            out |= self._read(device)
        return out

    def _find(self) -> list[_Handle]:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        found = [
            Device(i, _text(nvml.nvmlDeviceGetUUID(handle)), "", 0, 0)
            for i, handle in enumerate(handles)
        ]
        return [_Handle(d.index, d.uuid, handles[d.index]) for d in visible(found, self._visible)]

    def _pids(self, device: _Handle) -> list[int] | None:
        """Processes that compute on a device; None where NVML does not tell."""
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)
        except self._nvml.NVMLError:
            return None
        return [process.pid for process in running]

    def _read(self, device: _Handle) -> dict[MetricKey, float]:
        nvml, handle, gpu = self._nvml, device.handle, str(device.index)
        out: dict[MetricKey, float] = {}

        def take(what: str, read: Callable[[], float], **labels: str) -> None:
            """A figure that the device or the driver lacks is left out."""
            with suppress(nvml.NVMLError):
                out[key(f"specserve_gpu_{what}", gpu=gpu, **labels)] = float(read())

        def share(what: str, part: str, whole: str) -> None:
            used = out.get(key(f"specserve_gpu_{part}", gpu=gpu))
            total = out.get(key(f"specserve_gpu_{whole}", gpu=gpu))
            if used is not None and total:
                out[key(f"specserve_gpu_{what}", gpu=gpu)] = used / total

        name = "unknown"
        with suppress(nvml.NVMLError):
            name = _text(nvml.nvmlDeviceGetName(handle))
        take("info", lambda: 1.0, name=name, uuid=device.uuid)
        take("utilization_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        take("memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        take("memory_total_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
        sensor, limit = nvml.NVML_TEMPERATURE_GPU, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        take("temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, sensor))
        take(
            "temperature_limit_celsius",
            lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, limit),
        )
        take("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        take("power_limit_watts", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
        share("memory_used_ratio", "memory_used_bytes", "memory_total_bytes")
        share("power_ratio", "power_watts", "power_limit_watts")
        with suppress(nvml.NVMLError):
            active = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            for reason, bits in THROTTLE_REASONS.items():
                held = key("specserve_gpu_throttled", gpu=gpu, reason=reason)
                out[held] = float(bool(active & bits))
        ecc = nvml.nvmlDeviceGetTotalEccErrors
        for kind, number in (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            read = partial(ecc, handle, number, nvml.NVML_VOLATILE_ECC)
            take("ecc_errors_total", read, type=kind)
        pids = self._pids(device)
        if pids is not None:
            out[key("specserve_gpu_processes", gpu=gpu)] = float(len(pids))
        return out


def _text(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return value


def open_telemetry(visible: str | None, count: int) -> Telemetry | None:
    """Telemetry of this machine; None where there is no NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return Telemetry(pynvml, visible=visible, count=count)


class ThreadedTelemetry:
    """Telemetry read in a thread: a call into a driver that is stuck may never return, and must not
    hold up the sidecar."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        kept_seconds: float,
        wait_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``kept_seconds`` is how long the last readings stand for those that do not come in
        ``wait_seconds``; NVML answers in milliseconds."""
        self._telemetry, self._clock = telemetry, clock
        self._kept, self._wait = kept_seconds, wait_seconds
        self._last: tuple[float, dict[MetricKey, float]] = (clock(), {})
        self._thread: threading.Thread | None = None

    def readings(self, pids: Collection[int] = ()) -> dict[MetricKey, float]:
        """Those of now, else the last ones; empty once these are too old."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._read, args=(pids,), name="sidecar-gpu", daemon=True
            )
            self._thread.start()
            self._thread.join(self._wait)
        at, found = self._last
        if self._clock() - at > self._kept:
            return {}
        return found

    def _read(self, pids: Collection[int]) -> None:
        found = self._telemetry.readings(pids)
        self._last = (self._clock(), found)


_OVER_DEVICES: Mapping[str, Callable[[list[float]], float]] = {
    "specserve_gpu_utilization_ratio": fmean,
    "specserve_gpu_power_watts": fsum,
    "specserve_gpu_memory_used_bytes": fsum,
}
"""Family -> what becomes of the devices' values: a mean of shares, a sum of amounts."""


class GpuMeans:
    """Means over a stretch of time, read by a thread of its own while the ``with`` block runs.

    ``result`` maps family names without prefix to means; None without a GPU. A device that does not
    tell a figure is left out of it.
    """

    def __init__(self, telemetry: Telemetry | None, *, interval_seconds: float = 0.5) -> None:
        self._telemetry, self._interval = telemetry, interval_seconds
        self._seen: dict[str, list[float]] = {}
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-means", daemon=True)

    def __enter__(self) -> Self:
        if self._telemetry is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        if self._telemetry is not None:
            self._thread.join()

    @property
    def result(self) -> dict[str, float] | None:
        """The means so far."""
        return {
            name.removeprefix("specserve_gpu_"): fmean(values)
            for name, values in self._seen.items()
        } or None

    def _watch(self) -> None:
        assert self._telemetry is not None
        while True:
            readings = self._telemetry.readings()
            for family, over in _OVER_DEVICES.items():
                values = [v for reading, v in readings.items() if reading.family == family]
                if values:
                    self._seen.setdefault(family, []).append(over(values))
            if self._enough.wait(self._interval):
                return
