"""Base units to text and back.

Inside the program: bytes, seconds, ratios; text only at the edge.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def gib(n_bytes: float) -> str:
    """Bytes as GiB with one decimal.

    >>> gib(16_428_000_000)
    '15.3 GiB'
    """
    return f"{n_bytes / GIB:.1f} GiB"


def size(n_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number above one.

    >>> size(262144), size(900), size(3 * GIB)
    ('256 KiB', '900 B', '3.0 GiB')
    """
    if n_bytes >= GIB:
        return gib(n_bytes)
    for unit, width in (("MiB", MIB), ("KiB", KIB)):
        if n_bytes >= width:
            return f"{n_bytes / width:.4g} {unit}"
    return f"{n_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as a person would say them.

    >>> duration(0.0123), duration(8.24), duration(45), duration(71), duration(120), duration(7260)
    ('12 ms', '8.2 s', '45 s', '1 min 11 s', '2 min', '2 h 1 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    minutes, rest = divmod(round(seconds), 60)
    large, small, units = minutes, rest, ("min", "s")
    if minutes >= 60:
        large, small = divmod(minutes, 60)
        units = ("h", "min")
    text = f"{large} {units[0]}"
    if small:
        text += f" {small} {units[1]}"
    return text


def percent(ratio: float | None) -> str:
    """A ratio as a percentage; a dash where there is none.

    >>> percent(0.7345), percent(None)
    ('73.5 %', '-')
    """
    if ratio is None:
        return "-"
    return f"{ratio * 100:.1f} %"
