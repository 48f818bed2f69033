"""What GPUs read and multiply a second, by the names of :mod:`specserve.gpu.names`.

As the vendors' data sheets state them: memory bandwidth, and dense operations (half of what is
printed "with sparsity") of the tensor cores with 32-bit sums. NVIDIA: data sheets of each board and
the architecture white papers of Ampere, Ada, Hopper and Blackwell; AMD: data sheets of Instinct
MI300X, MI325X and MI355X. Collected 2026-12-01; those of B200, B300, GB200, H100, H200, A100 and
RTX 4090 were compared with public copies that day. Boards of one name in several forms have the
values of the fastest (SXM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specserve.gpu.names import lookup

Format = Literal["16 bits", "fp8", "fp4"]
"""What weights are multiplied in. Packed integers (AWQ, GPTQ) are unpacked to 16 bits."""


PCIE = 16.0
"""GB/s between boards without NVLink or Infinity Fabric: half of what PCIe 4.0 x16 states one way
(32 GB/s), since without peer-to-peer access the bytes go through the host's memory."""


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """One board."""

    name: str
    gb_per_second: float
    tflops: float
    """In 16 bits."""
    fp8_tflops: float | None = None
    """None where the board multiplies no FP8."""
    fp4_tflops: float | None = None
    link_gb_per_second: float = PCIE
    """To another board of its machine, one way."""

    def flops(self, form: Format) -> float:
        """Operations a second in a format; in the next wider one that the board multiplies.

        >>> speed_of("A100-80GB").flops("fp8") / 1e12, speed_of("H100").flops("fp8") / 1e12
        (312.0, 1979.0)
        """
        choices = [self.tflops]
        if form != "16 bits" and self.fp8_tflops is not None:
            choices.append(self.fp8_tflops)
        if form == "fp4" and self.fp4_tflops is not None:
            choices.append(self.fp4_tflops)
        return max(choices) * 1e12


SPEEDS: tuple[GpuSpeed, ...] = (
    GpuSpeed("B300", 8000, 2250, 4500, 13125, link_gb_per_second=900),
    GpuSpeed("GB200", 8000, 2500, 5000, 10000, link_gb_per_second=900),
    GpuSpeed("B200", 8000, 2250, 4500, 9000, link_gb_per_second=900),
    GpuSpeed("GH200 96GB", 4000, 989, 1979, link_gb_per_second=450),
    GpuSpeed("GH200 144GB", 4900, 989, 1979, link_gb_per_second=450),
    GpuSpeed("H200", 4800, 989, 1979, link_gb_per_second=450),
    GpuSpeed("H100 80GB", 3350, 989, 1979, link_gb_per_second=450),
    GpuSpeed("H100 NVL", 3900, 835, 1671, link_gb_per_second=300),
    GpuSpeed("H20", 4000, 148, 296, link_gb_per_second=450),
    GpuSpeed("A100 80GB", 2039, 312, link_gb_per_second=300),
    GpuSpeed("A100 40GB", 1555, 312, link_gb_per_second=300),
    GpuSpeed("A30", 933, 165),
    GpuSpeed("V100 32GB", 900, 125, link_gb_per_second=150),
    GpuSpeed("V100 16GB", 900, 125, link_gb_per_second=150),
    GpuSpeed("RTX PRO 6000", 1792, 504, 1007, 2015),
    GpuSpeed("L40", 864, 181, 362),
    GpuSpeed("L40S", 864, 362, 733),
    GpuSpeed("RTX 6000 Ada", 960, 364, 729),
    GpuSpeed("RTX A6000", 768, 155),
    GpuSpeed("A40", 696, 150),
    GpuSpeed("L4", 300, 121, 242),
    GpuSpeed("A10", 600, 125),
    GpuSpeed("T4", 320, 65),
    GpuSpeed("RTX 5090", 1792, 210, 419, 1676),
    GpuSpeed("RTX 4090", 1008, 165, 330),
    GpuSpeed("RTX 3090", 936, 71),
    GpuSpeed("MI355X", 8000, 2516, 5033, 10066, link_gb_per_second=77),
    GpuSpeed("MI325X", 6000, 1307, 2615, link_gb_per_second=64),
    GpuSpeed("MI300X", 5300, 1307, 2615, link_gb_per_second=64),
)


def speed_of(name: str | None) -> GpuSpeed | None:
    """The board that a name says; None where no such board is on record here.

    >>> speed_of("NVIDIA H200").gb_per_second, speed_of("some GPU")
    (4800, None)
    """
    board = lookup(name)
    if board is None:
        return None
    return next((speed for speed in SPEEDS if speed.name == board.name), None)
