"""What a GPU's name says about its memory: "80 GB" is neither 80 GiB nor what CUDA hands out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specserve.units import GIB


@dataclass(frozen=True, slots=True)
class GpuCapacity:
    """One model of GPU."""

    pattern: str
    """What its NVML name contains, as a regular expression, case ignored."""
    cuda_gib: float
    """Total that CUDA (and so vLLM's budget) sees."""
    nvlink: bool = False
    """Hopper or later with NVLink: vLLM then allocates buffers for its own all-reduce."""


CAPACITIES: tuple[GpuCapacity, ...] = (
    GpuCapacity(r"b300", 276.5, True),
    GpuCapacity(r"b200", 178.35, True),
    GpuCapacity(r"gh200", 94.5, True),  # vLLM issues name it "96GB H100"
    GpuCapacity(r"h200", 139.8, True),
    GpuCapacity(r"h100 nvl", 93.02, True),
    GpuCapacity(r"h20\b", 95.1, True),
    GpuCapacity(r"h[18]00", 79.19, True),  # 79.11 (vllm#27508) to 79.22 (vllm#10511)
    GpuCapacity(r"a[18]00.*80", 79.15),  # SXM; PCIe 79.25
    GpuCapacity(r"a100.*40", 39.38),  # 39.49 with older drivers
    GpuCapacity(r"v100.*32", 31.73),
    GpuCapacity(r"v100", 15.77),
    GpuCapacity(r"rtx pro 6000", 94.97),
    GpuCapacity(r"rtx pro 5000", 47.26),
    GpuCapacity(r"rtx pro 4500", 31.38),  # vllm#51590
    GpuCapacity(r"rtx pro 4000", 23.89),
    GpuCapacity(r"l40s?\b", 44.39),
    GpuCapacity(r"rtx 6000 ada", 47.37),  # 44.43 with ECC on
    GpuCapacity(r"rtx a6000", 47.43),  # 44.43 with ECC on
    GpuCapacity(r"a40\b", 44.55),
    GpuCapacity(r"l4\b", 22.03),
    GpuCapacity(r"a10g?\b", 22.06),
    GpuCapacity(r"t4\b", 14.56),
    GpuCapacity(r"rtx a5000", 23.67),
    GpuCapacity(r"quadro rtx 6000", 23.46),
    GpuCapacity(r"rtx 5090", 31.36),
    GpuCapacity(r"rtx 5080|rtx 5070 ti", 15.47),  # vllm#14452: 15.48
    GpuCapacity(r"rtx 5060 ti", 15.48),
    GpuCapacity(r"rtx 4090", 23.51),
    GpuCapacity(r"rtx 3090", 23.56),  # vllm#10517: 23.58
)
"""First match wins. Totals as PyTorch printed them for the named GPU in public logs (out-of-memory
messages, start banners), the least where drivers differ; looked up 2026-11-30."""


def lookup(name: str | None) -> GpuCapacity | None:
    """The capacity of a GPU by its name; None for one that is not listed.

    >>> lookup("NVIDIA H100 80GB HBM3").cuda_gib, lookup("Graphics of the future")
    (79.19, None)
    """
    text = re.sub(r"nvidia|geforce|[_-]", " ", (name or "").lower())
    # Less memory than the board of that name: a mobile one, or a part.
    if re.search(r"\b(laptop|mig|grid)\b", text):
        return None
    return next((c for c in CAPACITIES if re.search(c.pattern, text)), None)


def cuda_bytes(name: str | None, memory_gib: float | None) -> int | None:
    """What CUDA hands out on one GPU, from a name, a stated size, or both.

    A stated size above the known one is a marketing size, or the whole board's: the known one
    counts. One that is more than a tenth larger is another board.

    >>> round(cuda_bytes("NVIDIA H100 80GB HBM3", 80) / 2**30, 2), cuda_bytes(None, None)
    (79.19, None)
    """
    known = lookup(name)
    if known is None or (memory_gib or 0) > known.cuda_gib * 1.1:
        if memory_gib is None:
            return None
        return int(memory_gib * GIB)
    return int(min(memory_gib or known.cuda_gib, known.cuda_gib) * GIB)
