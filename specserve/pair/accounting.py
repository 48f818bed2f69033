"""How versions of vLLM count memory: what changed, and since when.

From vLLM's pull requests and public logs (2026-11-29); the runs behind each are in tests/data/vram_cases.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NEWEST = (0, 32)
"""What an unknown version is taken for."""
_BEFORE_AMPERE = re.compile(r"\b(v100|t4|p100|titan|gtx|quadro rtx)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Accounting:
    """How one version of vLLM counts memory.

    >>> Accounting.of("0.19.0").subtracts_graphs, Accounting.of("0.24.0").subtracts_graphs
    (False, True)
    """

    version: tuple[int, ...]

    first_engine_only: bool = False
    """The GPU or the method ran on the first engine as long as there was one (up to 0.10)."""

    @classmethod
    def of(cls, version: str | None, *, gpu_name: str = "", method: str | None = None) -> Accounting:
        """From a version string; anything that has no number counts as the newest known."""
        match = re.search(r"\d+\.\d+(?:\.\d+)?", version or "")
        old = bool(_BEFORE_AMPERE.search(gpu_name)) or method == "draft_model"
        return cls(tuple(int(p) for p in match.group().split(".")) if match else NEWEST, old)

    @property
    def v0(self) -> bool:
        """The first engine: whole prompts in one step; before 0.8, and until 0.10 where the new one could not."""
        return self.version < ((0, 11) if self.first_engine_only else (0, 8))

    @property
    def wide_sampler(self) -> bool:
        """Up to 0.16 the profiled sampler sorts all logits; since 0.17 it does not."""
        return self.version < (0, 17)

    @property
    def subtracts_graphs(self) -> bool:
        """Since 0.21 the estimated CUDA graphs are taken out of the budget; before, they came on top of it."""
        return self.version >= (0, 21)

    @property
    def tokens_from_concurrency(self) -> bool:
        """Since 0.21 the logged KV tokens are requests x max_model_len; before, blocks / groups x block size."""
        return self.version >= (0, 21)

    @property
    def counts_in_flight(self) -> bool:
        """Since 0.26 a sliding window also holds the tokens of every batch in flight (async scheduling: two)."""
        return self.version >= (0, 26)

    @property
    def caches_states(self) -> bool:
        """Prefix caching of hybrid models is on by default since 0.28; other models always had it."""
        return self.version >= (0, 28)

    @property
    def async_scheduling(self) -> bool:
        """On by default since 0.14."""
        return self.version >= (0, 14)

    @property
    def second_runner(self) -> bool:
        """Model Runner V2 is the default since 0.28, where the method allows."""
        return self.version >= (0, 28)
