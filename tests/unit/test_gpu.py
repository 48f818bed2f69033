"""GPUs: which are visible, and what a name says about memory."""

from __future__ import annotations

import pytest

from specserve.gpu import devices as gpu
from specserve.memory.gpus import cuda_bytes, lookup
from specserve.units import GIB


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("", []),
        ("0,7,1", [0]),
        ("GPU-1", [1]),
        ("-1", []),
    ],
)
def test_visible_devices(selection: str | None, indices: list[int]) -> None:
    """CUDA_VISIBLE_DEVICES takes numbers or UUIDs and ends at the first entry that names nothing."""
    found = [gpu.Device(i, f"GPU-{i}", "NVIDIA L4", 22 * GIB, 0) for i in range(3)]
    assert [d.index for d in gpu.visible(found, selection)] == indices


def test_a_machine_without_nvml_has_no_devices_and_no_error() -> None:
    """Where there is no driver the answer is None, not an empty list: nothing was seen is not nothing is there."""
    found = gpu.devices()
    assert found is None or all(d.total_bytes > d.reserved_bytes >= 0 for d in found)


@pytest.mark.parametrize(
    ("name", "stated", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", None, 79.19),
        ("NVIDIA H100 80GB HBM3", 80.0, 79.19),
        ("NVIDIA H100 80GB HBM3", 79.0, 79.0),
        ("NVIDIA GeForce RTX 3090", 24.0, 23.56),
        ("NVIDIA A100-SXM4-80GB", None, 79.15),
        ("NVIDIA A100-SXM4-40GB", None, 39.38),
        ("NVIDIA H100 NVL", None, 93.02),
        ("NVIDIA GH200 480GB", 96.0, 94.5),
        ("NVIDIA B200", 192.0, 178.35),
        ("NVIDIA GeForce RTX 4090", 48.0, 48.0),
        ("Board of Tomorrow", 123.0, 123.0),
    ],
)
def test_eighty_gb_is_not_eighty_gib(name: str, stated: float | None, expected: float) -> None:
    """A known name caps a marketing size; a smaller size, or a much larger one (a modified board), is believed."""
    assert (cuda_bytes(name, stated) or 0) / GIB == pytest.approx(expected, abs=1e-6)


def test_an_unknown_name_alone_says_nothing() -> None:
    """No capacity is invented for a board that is not listed."""
    assert cuda_bytes("Board of Tomorrow", None) is None
    assert lookup(None) is None
    for part in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"):
        assert lookup(part) is None
