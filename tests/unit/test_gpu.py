"""GPUs: which are visible, and what a name says about memory."""

from __future__ import annotations

import pytest

from specserve.gpu import devices as gpu
from specserve.gpu.names import KNOWN, cuda_bytes, lookup, read
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


@pytest.mark.parametrize(
    ("typed", "board"),
    [
        ("H100", "H100 80GB"),
        ("H100 SXM", "H100 80GB"),
        ("h100-pcie", "H100 80GB"),
        ("H100 NVL", "H100 NVL"),
        ("H100 94GB", "H100 NVL"),
        ("a100-80g", "A100 80GB"),
        ("A100 PCIe 40 GB", "A100 40GB"),
        ("NVIDIA-A100-SXM4-80GB", "A100 80GB"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090"),
        ("MI300X", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("L40S-48GB", "L40S"),
        ("NVIDIA L4", "L4"),
        ("B200 192GB", "B200"),
        ("GB200", "GB200"),
        ("GH200", "GH200 96GB"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("GH200 144GB", "GH200 144GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000"),
        ("A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A10G", "A10"),
    ],
)
def test_names_as_people_drivers_and_clouds_write_them(typed: str, board: str) -> None:
    """Case, dashes, makers and form factors do not matter; a stated memory chooses among boards."""
    reading = read(typed)
    assert reading.capacity is not None, reading.problem
    assert reading.capacity.name == board


@pytest.mark.parametrize(
    ("typed", "problem", "fix"),
    [
        ("A100", "comes with 80 or 40 GB", "write 'A100 80GB' or 'A100 40GB'"),
        ("v100", "comes with 32 or 16 GB", "write 'V100 32GB' or 'V100 16GB'"),
        ("RTX 6000", "is several boards", "'RTX 6000 Ada'"),
        ("MI300", "is several boards", "write 'MI300X' or 'MI300A'"),
        ("H10O", "is not the name of a known GPU", "write 'H100 80GB'"),
        ("l40z", "is not the name of a known GPU", "'L40S'"),
        ("banana", "is not the name of a known GPU", "set hardware.gpu_memory_gib"),
        ("8xH100", "is a number of GPUs", "hardware.gpu_name: H100 and hardware.gpu_count: 8"),
        ("A100 96GB", "comes with 80 or 40 GB", "set hardware.gpu_memory_gib"),
        ("DGX Spark", "shares its memory with the processor", "set hardware.gpu_memory_gib"),
        ("Ascend 910B", "memory use is not known here", "measure it on the machine"),
        ("Gaudi 3", "memory use is not known here", "measure it on the machine"),
    ],
)
def test_a_name_that_is_no_board_says_why_and_what_to_write(
    typed: str, problem: str, fix: str
) -> None:
    """Several boards, a typo, a count, another accelerator: each is told apart, and none is guessed."""
    reading = read(typed)
    assert reading.capacity is None
    assert problem in (reading.problem or "")
    assert fix in (reading.fix or "")


def test_every_board_is_understood_by_its_own_name() -> None:
    """What a message or `specserve gpus` tells people to write is that very board."""
    for board in KNOWN:
        if ", or " not in board.name:
            assert read(board.name).capacity == board, board.name
    assert all(0.9 < board.cuda_gib / board.vendor_gb <= 1 for board in KNOWN)


def test_a_stated_memory_chooses_the_board_and_helps_no_other_accelerator() -> None:
    """gpu_memory_gib tells an A100 of 40 GB from one of 80; no number makes an NPU a GPU."""
    assert cuda_bytes("A100", 40) == int(39.38 * GIB)
    assert cuda_bytes("A100", 80) == int(79.15 * GIB)
    assert cuda_bytes("Ascend 910B", 64) is None
