"""What a report of a bug needs beyond versions: Python, platform, GPUs, driver, extras."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement

from specserve.gpu.devices import devices, driver_version

_TOOLS = frozenset({"test", "models"})
"""Extras of people who work on specserve itself."""


def surroundings() -> Iterator[tuple[str, str]]:
    """Name and words of each thing; nothing is imported but NVML."""
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    yield "gpu", _gpus()
    yield "extras", ", ".join(_extras()) or "none"


def _gpus() -> str:
    found = devices()
    if not found:
        return "none seen (NVML)"
    names: dict[str, int] = {}
    for device in found:
        names[device.name] = names.get(device.name, 0) + 1
    boards = ", ".join(f"{number} x {name}" for name, number in names.items())
    return f"{boards}, driver {driver_version() or 'unknown'}"


def _extras() -> list[str]:
    """The extras of which every package is installed."""
    missing: set[str] = set()
    named: dict[str, None] = {}
    try:
        about = importlib.metadata.metadata("specserve")
        wanted = importlib.metadata.requires("specserve") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    for extra in about.get_all("Provides-Extra") or []:
        if extra not in _TOOLS:
            named[extra] = None
    for line in wanted:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None:
            continue
        for extra in named:
            applies = requirement.marker.evaluate({"extra": extra})
            if applies and not _is_there(requirement.name):
                missing.add(extra)
    return [extra for extra in named if extra not in missing]


def _is_there(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
