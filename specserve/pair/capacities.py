"""What a GPU's name says about its memory: "80 GB" is neither 80 GiB nor what CUDA hands out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specserve.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class Capacity:
    """One model of GPU."""

    pattern: str
    """What its NVML name contains, as a regular expression, case ignored."""
    board_mib: int
    """NVML's total, as nvidia-smi prints it."""
    cuda_gib: float
    """Total that CUDA (and so vLLM's budget) sees."""
    nvlink: bool = False
    """Hopper or later with NVLink: vLLM then allocates buffers for its own all-reduce."""


CAPACITIES: tuple[Capacity, ...] = (
    Capacity(r"gb?300", 284208, 277.1, True),
    Capacity(r"gb?200", 183359, 178.36, True),
    Capacity(r"h200", 143771, 139.81, True),
    Capacity(r"gh200", 97871, 94.5, True),
    Capacity(r"h100 nvl", 95830, 93.11, True),
    Capacity(r"h20\b", 97871, 95.08, True),
    Capacity(r"h[18]00", 81559, 79.19, True),
    Capacity(r"a[18]00.*80", 81920, 79.25),
    Capacity(r"a100.*40", 40960, 39.49),
    Capacity(r"v100.*32", 32768, 31.74),
    Capacity(r"v100", 16384, 15.77),
    Capacity(r"rtx pro 6000", 97887, 94.97),
    Capacity(r"rtx pro 5000", 48935, 47.37),
    Capacity(r"rtx pro 4500", 32623, 31.38),
    Capacity(r"rtx pro 4000", 24467, 23.89),
    Capacity(r"l40s?\b", 46068, 44.39),
    Capacity(r"rtx 6000 ada|a40\b|rtx a6000", 49140, 47.5),
    Capacity(r"l4\b", 23034, 22.03),
    Capacity(r"a10g?\b", 23028, 22.06),
    Capacity(r"t4\b", 15360, 14.56),
    Capacity(r"rtx a5000", 24564, 23.67),
    Capacity(r"quadro rtx 6000", 24576, 23.65),
    Capacity(r"rtx 5090", 32607, 31.36),
    Capacity(r"rtx 5080", 16303, 15.47),
    Capacity(r"rtx 5070 ti", 16303, 15.47),
    Capacity(r"rtx 5060 ti", 16311, 15.48),
    Capacity(r"rtx 4090", 24564, 23.53),
    Capacity(r"rtx 3090", 24576, 23.58),
)
"""First match wins."""


def lookup(name: str | None) -> Capacity | None:
    """The capacity of a GPU by its name; None for one that is not listed.

    >>> lookup("NVIDIA H100 80GB HBM3").cuda_gib, lookup("Graphics of the future")
    (79.19, None)
    """
    text = re.sub(r"nvidia|geforce|[_-]", " ", (name or "").lower())
    return next((c for c in CAPACITIES if re.search(c.pattern, text)), None)


def cuda_bytes(name: str | None, memory_gib: float | None) -> int | None:
    """What CUDA hands out on one GPU, from a name, a stated size, or both.

    A stated size above the known one is a marketing size, or the whole board's: the known one counts.

    >>> round(cuda_bytes("NVIDIA H100 80GB HBM3", 80) / 2**30, 2), cuda_bytes(None, None)
    (79.19, None)
    """
    known = lookup(name)
    if known is None:
        return None if memory_gib is None else int(memory_gib * GIB)
    known_bytes = int(known.cuda_gib * GIB)
    if memory_gib is None:
        return known_bytes
    stated = int(memory_gib * GIB)
    return min(stated, known_bytes) if stated <= known.board_mib * MIB * 1.06 else stated
