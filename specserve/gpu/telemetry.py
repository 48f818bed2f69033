"""Telemetry of the GPUs that the engine uses, through NVML. What a device does not report is left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from math import fsum
from statistics import fmean
from typing import Any, Self

from specserve.gpu.devices import Device, visible
from specserve.metric_families import MetricKey, key

THROTTLE_REASONS: Mapping[str, int] = {"power": 0x4 | 0x80, "thermal": 0x20 | 0x40, "hardware": 0x8}
"""NVML's clock event reasons (nvml.h, 13.580): software power cap and power brake; software and hardware thermal
slowdown; the hardware's general slowdown."""


class Telemetry:
    """Reads the devices once per cycle. ``nvml`` is the pynvml module, or anything with its functions."""

    def __init__(self, nvml: Any, *, visible: str | None, count: int) -> None:
        """``visible`` is the engine's CUDA_VISIBLE_DEVICES; ``count`` how many devices it uses (TP x PP)."""
        self._nvml, self._visible, self._count = nvml, visible, count
        self._handles: list[tuple[int, str, Any]] | None = None

    def readings(self, pids: Collection[int] = ()) -> dict[MetricKey, float]:
        """Everything about the devices in use; empty without a GPU or a driver.

        In use are those on which one of ``pids`` computes; where NVML hides processes (containers), the first
        ``count`` of the visible ones.
        """
        nvml = self._nvml
        try:
            if self._handles is None:
                nvml.nvmlInit()
                self._handles = self._devices()
        except nvml.NVMLError:
            return {}
        out: dict[MetricKey, float] = {}
        for index, uuid, handle in self._used(pids):
            out |= self._device(str(index), uuid, handle)
        return out

    def _devices(self) -> list[tuple[int, str, Any]]:
        nvml = self._nvml
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        found = [
            Device(i, _text(nvml.nvmlDeviceGetUUID(handle)), "", 0, 0)
            for i, handle in enumerate(handles)
        ]
        return [(d.index, d.uuid, handles[d.index]) for d in visible(found, self._visible)]

    def _used(self, pids: Collection[int]) -> list[tuple[int, str, Any]]:
        devices = self._handles or []
        running = [
            d for d in devices if pids and not set(pids).isdisjoint(self._processes(d[2]) or ())
        ]
        return running or devices[: self._count]

    def _processes(self, handle: Any) -> list[int] | None:
        try:
            return [
                process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ]
        except self._nvml.NVMLError:
            return None

    def _device(self, gpu: str, uuid: str, handle: Any) -> dict[MetricKey, float]:
        nvml = self._nvml
        out: dict[MetricKey, float] = {}

        def take(what: str, read: Callable[[], float], **labels: str) -> float | None:
            """A function that the device or the driver lacks leaves the reading out."""
            try:
                value = float(read())
            except nvml.NVMLError:
                return None
            out[key(f"specserve_gpu_{what}", gpu=gpu, **labels)] = value
            return value

        take("info", lambda: 1.0, name=_name(nvml, handle), uuid=uuid)
        take("utilization_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        used = take("memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        total = take("memory_total_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
        take(
            "temperature_celsius",
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        )
        take(
            "temperature_limit_celsius",
            lambda: nvml.nvmlDeviceGetTemperatureThreshold(
                handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
        )
        power = take("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        limit = take(
            "power_limit_watts", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        )
        for name, part, whole in (
            ("memory_used_ratio", used, total),
            ("power_ratio", power, limit),
        ):
            if part is not None and whole:
                out[key(f"specserve_gpu_{name}", gpu=gpu)] = part / whole
        for reason, bits in THROTTLE_REASONS.items():
            take("throttled", lambda b=bits: bool(_throttle(nvml, handle) & b), reason=reason)  # type: ignore[misc]
        for kind, number in (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            take(
                "ecc_errors_total",
                lambda n=number: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, n, nvml.NVML_VOLATILE_ECC
                ),  # type: ignore[misc]
                type=kind,
            )
        if (processes := self._processes(handle)) is not None:
            out[key("specserve_gpu_processes", gpu=gpu)] = float(len(processes))
        return out


def _throttle(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _name(nvml: Any, handle: Any) -> str:
    try:
        return _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError:
        return "unknown"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def open_telemetry(visible: str | None, count: int) -> Telemetry | None:
    """Telemetry of this machine; None where there is no NVML to ask."""
    import pynvml

    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return Telemetry(pynvml, visible=visible, count=count)


class Detached:
    """Telemetry read in a thread: a call into a driver that is stuck may never return, and holds up nobody here."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        kept_seconds: float,
        wait_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``kept_seconds`` is how long the last readings stand for those that do not come in ``wait_seconds``; NVML
        answers in milliseconds."""
        self._telemetry, self._kept, self._wait, self._clock = (
            telemetry,
            kept_seconds,
            wait_seconds,
            clock,
        )
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
        return found if self._clock() - at <= self._kept else {}

    def _read(self, pids: Collection[int]) -> None:
        found = self._telemetry.readings(pids)
        self._last = (self._clock(), found)


_OVER_DEVICES: Mapping[str, Callable[[list[float]], float]] = {
    "specserve_gpu_utilization_ratio": fmean,
    "specserve_gpu_power_watts": fsum,
    "specserve_gpu_memory_used_bytes": fsum,
}
"""Family -> what becomes of the devices' values: a mean of shares, a sum of amounts."""


class Means:
    """Means over a stretch of time, read by a thread of its own while the ``with`` block runs.

    ``result`` maps family names without prefix to means; None without a GPU. A device that does not tell a figure is
    left out of it.
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
