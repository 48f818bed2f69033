"""How versions of vLLM count memory: what changed, and since when.

From vLLM's pull requests and public logs (2026-11-29); the runs behind each are in
tests/data/vram_cases.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specserve.engine.installed import profiles
from specserve.engine.installed.introspect import release

_BEFORE_AMPERE = re.compile(r"\b(v100|t4|p100|titan|gtx|quadro rtx)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Accounting:
    """How one version of vLLM counts memory.

    >>> Accounting.of("0.19.0").subtracts_graphs, Accounting.of("0.24.0").subtracts_graphs
    (False, True)
    """

    version: tuple[int, ...]
    v0: bool
    """The first engine: whole prompts in one step; before 0.8, and until 0.10 where the new one
    could not.
    """
    async_scheduling: bool
    """On by default since 0.14."""
    wide_sampler: bool
    """Up to 0.16 the profiled sampler sorts all logits; since 0.17 it does not."""
    subtracts_graphs: bool
    """Since 0.21 the estimated CUDA graphs are taken out of the budget; before, they came on top of
    it.
    """
    tokens_from_concurrency: bool
    """Since 0.21 the logged KV tokens are requests x max_model_len; before, blocks / groups x block
    size.
    """
    counts_in_flight: bool
    """Since 0.26 a sliding window also holds the tokens of every batch in flight (async scheduling:
    two).
    """
    caches_states: bool
    """Prefix caching of hybrid models is on by default since 0.28; other models always had it."""
    second_runner: bool
    """Model Runner V2 is the default since 0.28, where the method allows."""

    @classmethod
    def of(
        cls, version: str | None, *, gpu_name: str = "", method: str | None = None
    ) -> Accounting:
        """From a version string; anything that has no number counts as the newest known."""
        match = re.search(r"\d+\.\d+(?:\.\d+)?", version or "")
        if match:
            v = tuple(int(p) for p in match.group().split("."))
        else:
            v = release(profiles.newest())
        first_engine_only = bool(_BEFORE_AMPERE.search(gpu_name)) or method == "draft_model"
        return cls(
            v,
            v0=v < ((0, 11) if first_engine_only else (0, 8)),
            async_scheduling=v >= (0, 14),
            wide_sampler=v < (0, 17),
            subtracts_graphs=v >= (0, 21),
            tokens_from_concurrency=v >= (0, 21),
            counts_in_flight=v >= (0, 26),
            caches_states=v >= (0, 28),
            second_runner=v >= (0, 28),
        )
