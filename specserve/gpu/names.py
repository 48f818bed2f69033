"""What a GPU's name says about its memory, as people, drivers and clouds write it.

"80 GB" is neither 80 GiB nor what CUDA hands out, and "A100" alone is two boards.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from specserve.units import GIB

Maker = Literal["nvidia", "amd"]


@dataclass(frozen=True, slots=True)
class GpuCapacity:
    """One board."""

    family: str
    """What a name contains, as a regular expression over whole words (see :func:`_words`)."""
    name: str
    """How it is written here."""
    vendor_gb: int
    """What the vendor prints on the box."""
    cuda_gib: float
    """Total that CUDA or HIP (and so vLLM's budget) sees."""
    hint: str | None = None
    """What tells it from others of its family beside the memory; without one it is the usual one.
    """
    nvlink: bool = False
    """Hopper or later with NVLink: vLLM then allocates buffers for its own all-reduce."""
    maker: Maker = "nvidia"


_HBM, _GDDR, _CONSUMER = 0.98, 0.91, 0.97
"""GiB that CUDA hands out for each GB on the box, where no log was found: the least share among
boards of the kind with one (HBM; GDDR with ECC; consumer boards)."""


def _vendor(family: str, name: str, gb: int, share: float, *, nvlink: bool = False) -> GpuCapacity:
    """A board known from its data sheet alone."""
    return GpuCapacity(family, name, gb, round(gb * share, 2), nvlink=nvlink)


KNOWN: tuple[GpuCapacity, ...] = (
    GpuCapacity("g?b300", "B300", 288, 276.5, nvlink=True),
    GpuCapacity("gb200", "GB200", 186, 184.31, nvlink=True),
    GpuCapacity("b200", "B200", 180, 178.35, nvlink=True),
    # vLLM issues name it "96GB H100"; drivers add the 480 GB of its processor.
    GpuCapacity("gh200", "GH200 96GB", 96, 94.5, nvlink=True),
    GpuCapacity("gh200", "GH200 144GB", 144, 144 * _HBM, "144|hbm3e", nvlink=True),
    GpuCapacity("h200", "H200", 141, 139.8, nvlink=True),
    # SXM and PCIe: 79.11 (vllm#27508) to 79.22 (vllm#10511).
    GpuCapacity("h[18]00", "H100 80GB", 80, 79.19, nvlink=True),
    GpuCapacity("h100", "H100 NVL", 94, 93.02, "nvl", nvlink=True),
    GpuCapacity("h20", "H20", 96, 95.1, nvlink=True),
    GpuCapacity("h20", "H20-3e", 141, 141 * _HBM, "3e", nvlink=True),
    GpuCapacity("a[18]00", "A100 80GB", 80, 79.15),  # SXM; PCIe 79.25
    GpuCapacity("a[18]00", "A100 40GB", 40, 39.38),  # 39.49 with older drivers
    _vendor("a30", "A30", 24, _GDDR),
    GpuCapacity("v100s?", "V100 32GB", 32, 31.73),
    GpuCapacity("v100s?", "V100 16GB", 16, 15.77),
    _vendor("p100", "P100", 16, _HBM),
    GpuCapacity("rtx pro 6000", "RTX PRO 6000", 96, 94.97),
    GpuCapacity("rtx pro 5000", "RTX PRO 5000", 48, 47.26),
    GpuCapacity("rtx pro 4500", "RTX PRO 4500", 32, 31.38),  # vllm#51590
    GpuCapacity("rtx pro 4000", "RTX PRO 4000", 24, 23.89),
    GpuCapacity("l40", "L40", 48, 44.39),
    GpuCapacity("l40s", "L40S", 48, 44.39),
    _vendor("l20", "L20", 48, _GDDR),
    GpuCapacity("(rtx )?6000 ada", "RTX 6000 Ada", 48, 47.37),  # 44.43 with ECC on
    _vendor("(rtx )?5000 ada", "RTX 5000 Ada", 32, _GDDR),
    _vendor("(rtx )?4500 ada", "RTX 4500 Ada", 24, _GDDR),
    _vendor("(rtx )?4000 ada", "RTX 4000 Ada", 20, _GDDR),
    GpuCapacity("(rtx )?a6000", "RTX A6000", 48, 47.43),  # 44.43 with ECC on
    GpuCapacity("(rtx )?a5000", "RTX A5000", 24, 23.67),
    _vendor("(rtx )?a4500", "RTX A4500", 20, _GDDR),
    _vendor("(rtx )?a4000", "RTX A4000", 16, _GDDR),
    GpuCapacity("a40", "A40", 48, 44.55),
    GpuCapacity("l4", "L4", 24, 22.03),
    GpuCapacity("a10g?", "A10", 24, 22.06),
    _vendor("a2", "A2", 16, _GDDR),
    GpuCapacity("t4", "T4", 16, 14.56),
    _vendor("p40", "P40", 24, _GDDR),
    GpuCapacity("quadro rtx 6000", "Quadro RTX 6000", 24, 23.46),
    _vendor("quadro rtx 8000", "Quadro RTX 8000", 48, _GDDR),
    _vendor("titan rtx", "TITAN RTX", 24, _CONSUMER),
    GpuCapacity("(rtx )?5090", "RTX 5090", 32, 31.36),
    GpuCapacity("(rtx )?5080", "RTX 5080", 16, 15.47),  # vllm#14452: 15.48
    GpuCapacity("(rtx )?5070 ti", "RTX 5070 Ti", 16, 15.47),
    _vendor("(rtx )?5070", "RTX 5070", 12, _CONSUMER),
    GpuCapacity("(rtx )?5060 ti", "RTX 5060 Ti 16GB", 16, 15.48),
    _vendor("(rtx )?5060 ti", "RTX 5060 Ti 8GB", 8, _CONSUMER),
    GpuCapacity("(rtx )?4090( d)?", "RTX 4090", 24, 23.51),
    _vendor("(rtx )?4080( super)?", "RTX 4080", 16, _CONSUMER),
    _vendor("(rtx )?4070 ti super", "RTX 4070 Ti Super", 16, _CONSUMER),
    _vendor("(rtx )?4070( ti| super)?", "RTX 4070", 12, _CONSUMER),
    _vendor("(rtx )?4060 ti", "RTX 4060 Ti 16GB", 16, _CONSUMER),
    _vendor("(rtx )?4060 ti", "RTX 4060 Ti 8GB", 8, _CONSUMER),
    _vendor("(rtx )?4060", "RTX 4060", 8, _CONSUMER),
    GpuCapacity("(rtx )?3090( ti)?", "RTX 3090", 24, 23.56),  # vllm#10517: 23.58
    _vendor("(rtx )?3080 ti", "RTX 3080 Ti", 12, _CONSUMER),
    _vendor("(rtx )?3080", "RTX 3080 10GB", 10, _CONSUMER),
    _vendor("(rtx )?3080", "RTX 3080 12GB", 12, _CONSUMER),
    _vendor("(rtx )?3070( ti)?", "RTX 3070", 8, _CONSUMER),
    _vendor("(rtx )?3060", "RTX 3060 12GB", 12, _CONSUMER),
    _vendor("(rtx )?3060", "RTX 3060 8GB", 8, _CONSUMER),
    _vendor("(rtx )?2080 ti", "RTX 2080 Ti", 11, _CONSUMER),
    GpuCapacity("mi35[05]x", "MI355X", 288, 287.98, maker="amd"),
    GpuCapacity("mi325x", "MI325X", 256, 255.69, maker="amd"),
    GpuCapacity("mi30[08]x", "MI300X", 192, 191.69, maker="amd"),
    GpuCapacity("mi300a", "MI300A", 128, 128 * _HBM, maker="amd"),
    GpuCapacity("mi2[15]0x?", "MI210, or one die of an MI250X", 64, 63.98, maker="amd"),
    GpuCapacity("(rx )?7900 xtx", "RX 7900 XTX", 24, 23.98, maker="amd"),
)
"""Totals as PyTorch printed them for the named GPU in public logs (out-of-memory messages, start
banners), the least where drivers differ; others by :data:`_HBM` and its like from the vendor's
data sheet. Looked up 2026-11-30, AMD and GB200 2026-12-01."""

_SEVERAL = {
    "rtx 6000": ("RTX PRO 6000", "RTX 6000 Ada", "RTX A6000", "Quadro RTX 6000"),
    "mi300": ("MI300X", "MI300A"),
}
"""Names that people shorten until several families are left."""
_UNIFIED = re.compile(r"\b(gb10|dgx spark|spark|thor|jetson|orin|m[1-5]|apple|strix|ai max)\b")
_OTHER = re.compile(
    r"\b(ascend|910[a-d]?|atlas|gaudi ?\d?|hpu|tpu|v[4-7][ep]|trainium\d?|inferentia\d?|inf2|trn\d|"
    r"mlu\d*|kunlun\w*|arc|b\d0 pro|max 1[15]\d0)\b"
)
_SOLD_IN_PARTS = re.compile(r"\b(laptop|mobile|max q|mig|grid|vgpu|\d+g \d+gb)\b")
_COUNTED = re.compile(r"(\d{1,2}) ?x ?(.+)|(.*\d[a-z]*)(?: x |x)(\d{1,2})")
_OWN_MEMORY = "set hardware.gpu_memory_gib to what nvidia-smi or rocm-smi shows, in GiB"
_LIST = "specserve gpus lists the known names"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What a name was understood as: a board, or why it is none."""

    capacity: GpuCapacity | None
    problem: str | None = None
    """Why the memory is not known, as a sentence without its end."""
    fix: str | None = None
    plannable: bool = True
    """False for accelerators that are not GPUs: a stated memory does not help."""


def read(name: str, memory_gib: float | None = None) -> GpuReading:
    """What a name says; a stated memory chooses among boards of that name.

    >>> read("nvidia-h100-sxm").capacity.cuda_gib, read("4090").capacity.name
    (79.19, 'RTX 4090')
    >>> read("A100").problem
    "'A100' comes with 80 or 40 GB"
    >>> read("A100", memory_gib=40).capacity.name, read("A100-80").capacity.name
    ('A100 40GB', 'A100 80GB')
    >>> read("H10O").fix
    "write 'H100 80GB'; specserve gpus lists the known names"
    """
    text = _words(name)
    counted = _COUNTED.fullmatch(text)
    if counted is not None:
        board = counted[2] or counted[3]
        count = counted[1] or counted[4]
        return GpuReading(
            None,
            f"'{name}' is a number of GPUs",
            f"set hardware.gpu_name: {board.upper()} and hardware.gpu_count: {count}",
        )
    # Less memory than the board of that name.
    if _SOLD_IN_PARTS.search(text) and "pro 6000" not in text:
        return GpuReading(None, f"'{name}' is a mobile GPU, or a part of one", _OWN_MEMORY)
    matched = [c for c in KNOWN if re.search(rf"\b(?:{c.family})\b", text)]
    if not matched:
        return _unknown(name, text)
    # The longest match: "4070 ti super" is no "4070".
    best = max(matched, key=lambda c: len(_matched(c, text)))
    family = [c for c in matched if c.family == best.family]
    family += [c for c in matched if c not in family and _matched(c, text) == _matched(best, text)]
    return _among(name, family, text.replace(_matched(best, text), " "), memory_gib)


def _among(name: str, family: list[GpuCapacity], rest: str, memory_gib: float | None) -> GpuReading:
    """The board of a family, by what else the name says and by a stated memory."""
    stated = re.search(r"\b(\d{1,3}) ?g(?:i?b)?\b|\b(\d{2,3})\b", rest)
    gb = memory_gib
    if gb is None and stated is not None and "480" not in stated[0]:
        gb = float(stated[1] or stated[2])
    hinted = [c for c in family if c.hint and re.search(rf"\b(?:{c.hint})", rest)]
    left = hinted or [c for c in family if c.hint is None] or family
    if gb is not None:
        near = [c for c in hinted or family if abs(c.vendor_gb - gb) <= 0.1 * c.vendor_gb]
        if not near and memory_gib is None:
            sizes = _or([f"{c.vendor_gb}" for c in family])
            problem = f"'{name}' says {gb:.0f} GB; such a board comes with {sizes} GB"
            return GpuReading(None, problem, _OWN_MEMORY)
        left = near or left[:1]
        left = sorted(left, key=lambda c: abs(c.vendor_gb - (gb or 0)))[:1]
    if len(left) == 1:
        return GpuReading(left[0])
    sizes = _or([str(c.vendor_gb) for c in left])
    return GpuReading(None, f"'{name}' comes with {sizes} GB", f"write {_quoted(left)}")


def _unknown(name: str, text: str) -> GpuReading:
    for short, names in _SEVERAL.items():
        if re.search(rf"\b{short}\b", text):
            several = [c for c in KNOWN if c.name in names]
            return GpuReading(None, f"'{name}' is several boards", f"write {_quoted(several)}")
    if _UNIFIED.search(text):
        return GpuReading(None, f"'{name}' shares its memory with the processor", _OWN_MEMORY)
    if _OTHER.search(text):
        problem = f"'{name}' is an accelerator whose memory use is not known here"
        fix = "measure it on the machine; only GPUs of NVIDIA and AMD are planned"
        return GpuReading(None, problem, fix, plannable=False)
    problem = f"'{name}' is not the name of a known GPU"
    # The letter o for a zero.
    typed = re.sub("o(?=[0o]|$)|(?<=[0-9])o", "0", text)
    if typed != text:
        meant = read(typed).capacity
        if meant is not None:
            return GpuReading(None, problem, f"write {_quoted([meant])}; {_LIST}")
    near = difflib.get_close_matches(typed, _NEAR, n=3, cutoff=0.6)
    boards = list(dict.fromkeys(_NEAR[n] for n in near))
    if boards:
        return GpuReading(None, problem, f"write {_quoted(boards)}; {_LIST}")
    return GpuReading(None, problem, f"{_OWN_MEMORY}; {_LIST}")


def _words(name: str) -> str:
    """A name without its maker and punctuation.

    >>> _words("NVIDIA-A100-SXM4-80GB"), _words("GeForce RTX4070TiSuper")
    ('a100 sxm4 80gb', 'rtx 4070 ti super')
    """
    text = re.sub(r"[_\-/,()*×]+", lambda m: " x " if m[0] in "*×" else " ", name.lower())
    text = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct|radeon|gpu)\b", " ", text)
    text = re.sub(r"\brtx ?(?=[a\d])", "rtx ", text)
    text = re.sub(r"\b(\d{4}) ?(ti|super|d)(super)?\b", r"\1 \2 \3", text)
    return " ".join(text.split())


def _matched(capacity: GpuCapacity, text: str) -> str:
    found = re.search(rf"\b(?:{capacity.family})\b", text)
    assert found is not None
    return found[0]


def _or(words: list[str]) -> str:
    """A choice in words: "a, b or c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _quoted(boards: list[GpuCapacity]) -> str:
    return _or([f"'{c.name}'" for c in boards])


_NEAR = {
    spelt: c
    for c in reversed(KNOWN)
    for spelt in (
        _words(c.name),
        _words(c.name).split(" ")[0],
        _words(c.name).removeprefix("rtx ").removeprefix("rx "),
    )
}
"""What a typo is compared with: whole names, their first words, and bare numbers."""


def lookup(name: str | None) -> GpuCapacity | None:
    """The board of a name; None for one that is not known, or several.

    >>> lookup("NVIDIA H100 80GB HBM3").cuda_gib, lookup("Graphics of the future")
    (79.19, None)
    """
    if not name:
        return None
    return read(name).capacity


def cuda_bytes(name: str | None, memory_gib: float | None) -> int | None:
    """What CUDA hands out on one GPU, from a name, a stated size, or both.

    A stated size above the known one is a marketing size, or the whole board's: the known one
    counts. One that is more than a tenth larger is another board.

    >>> round(cuda_bytes("NVIDIA H100 80GB HBM3", 80) / 2**30, 2), cuda_bytes(None, None)
    (79.19, None)
    """
    known = None
    if name:
        reading = read(name, memory_gib)
        if not reading.plannable:
            return None
        known = reading.capacity
    if known is None or (memory_gib or 0) > known.cuda_gib * 1.1:
        if memory_gib is None:
            return None
        return int(memory_gib * GIB)
    return int(min(memory_gib or known.cuda_gib, known.cuda_gib) * GIB)
