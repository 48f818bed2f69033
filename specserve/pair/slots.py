"""How many tokens of a step drafting takes (``max_num_new_slots_for_drafting``, vLLM 0.32, read 2026-11-29)."""

from __future__ import annotations

from collections.abc import Iterator

from specserve.config.schema import Settings
from specserve.findings import Finding

_WHERE = "engine.max_num_batched_tokens"


def extra_slots(method: str, k: int, *, parallel: bool) -> int:
    """Slots per sequence beyond the one it has anyway.

    >>> extra_slots("draft_model", 5, parallel=False), extra_slots("dflash", 5, parallel=False)
    (1, 5)
    >>> extra_slots("dspark", 5, parallel=False), extra_slots("eagle3", 5, parallel=False)
    (4, 0)
    """
    if method == "dflash":
        return k
    if parallel or method == "dspark":
        return k if method == "draft_model" else k - 1
    return 1 if method == "draft_model" else 0


def check(settings: Settings) -> Iterator[Finding]:
    """Only where both numbers are set; their defaults depend on the GPU."""
    spec, engine = settings.speculative_decoding, settings.engine
    batched, seqs, method = engine.max_num_batched_tokens, engine.max_num_seqs, settings.method
    if batched is None or seqs is None or method is None:
        return
    k = spec.num_speculative_tokens
    extra = extra_slots(method, k, parallel=bool(spec.parallel_drafting))
    decode = seqs * (k + 1 + extra)
    if batched <= seqs * extra:
        message = (
            f"max_num_batched_tokens is {batched}; drafting for {seqs} sequences takes {seqs * extra} and leaves none"
        )
    elif batched - decode < batched / 4:
        message = f"a full step of {seqs} sequences takes {decode} of {batched} tokens; too little is left for prompts"
    else:
        return
    fix = f"set {_WHERE}: {-(-decode * 4 // 3)}, or lower engine.max_num_seqs"
    yield Finding("batch-slots", "error" if batched <= seqs * extra else "warning", _WHERE, message, fix)
