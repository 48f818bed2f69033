"""Edits that a row of the table of known defects cannot write down, since they depend on the config
or on a checkpoint.

A function gives nothing where no such edit is known; then the row's sentence stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from specserve.checkpoint.context import native_length
from specserve.config.serving import Repair
from specserve.engine.installed.conditions import Situation, fits_tp
from specserve.errors import Change
from specserve.pair.consistency import undivided

_SPEC = "speculative_decoding"
_LONG_ENOUGH = 8
"""Tokens of a match that hardly stand in an earlier tool call by chance."""


def _tensor_instead_of_pipeline(of: Situation) -> Iterator[Change]:
    """One stage over all GPUs, where the target can be shared by so many."""
    model = of.settings.models.target_model
    gpus = model.tensor_parallel_size * model.pipeline_parallel_size
    models = [facts for facts in (of.target, of.draft) if facts is not None]
    if all(undivided(facts.text_config, gpus) is None for facts in models):
        yield Change("models.target_model.pipeline_parallel_size", 1)
        yield Change("models.target_model.tensor_parallel_size", gpus)


def _longer_lookups(of: Situation) -> Iterator[Change]:
    yield Change(f"{_SPEC}.prompt_lookup_min", _LONG_ENOUGH)
    longest = of.settings.speculative_decoding.prompt_lookup_max
    if longest is not None and longest < _LONG_ENOUGH:
        yield Change(f"{_SPEC}.prompt_lookup_max", _LONG_ENOUGH)


def _no_schedule(of: Situation) -> Iterator[Change]:
    spec = of.settings.speculative_decoding
    if spec.max_batch_size is not None:
        yield Change(f"{_SPEC}.max_batch_size")
    if spec.schedule is not None:
        yield Change(f"{_SPEC}.schedule")


def _context_of_draft(of: Situation) -> Iterator[Change]:
    if of.draft is not None and (length := native_length(of.draft)):
        yield Change("engine.max_model_len", length)


def _plain_draft_cache(of: Situation) -> Iterator[Change]:
    """A draft inside the target has no section of its own."""
    if of.settings.models.draft_model is not None:
        yield Change("models.draft_model.kv_cache_dtype", "bfloat16")
    else:
        yield Change(f"{_SPEC}.extra_config.kv_cache_dtype", "bfloat16")


def _tokens_that_fit_tp(of: Situation) -> Iterator[Change]:
    below = (n for n in range(of.tokens, 0, -1) if fits_tp(n, of.tensor_parallel_size))
    yield Change(f"{_SPEC}.num_speculative_tokens", next(below, of.tensor_parallel_size - 1))


def _missing_repairs(of: Situation) -> Iterator[Change]:
    yield Change("engine.repairs", list(get_args(Repair)))


@dataclass(frozen=True)
class Computed:
    """Edits that are worked out, and what they amount to."""

    says: str
    edits: Callable[[Situation], Iterator[Change]]


CHANGES: Mapping[str, Computed] = {
    "context-of-draft": Computed(
        "set engine.max_model_len to the draft's own context", _context_of_draft
    ),
    "longer-lookups": Computed(
        "set speculative_decoding.prompt_lookup_min: 8 and no shorter maximum", _longer_lookups
    ),
    "missing-repairs": Computed("list all repairs in engine.repairs", _missing_repairs),
    "no-schedule": Computed(
        "remove max_batch_size and schedule from speculative_decoding", _no_schedule
    ),
    "plain-draft-cache": Computed("set kv_cache_dtype: bfloat16 for the draft", _plain_draft_cache),
    "tensor-instead-of-pipeline": Computed(
        "set models.target_model.pipeline_parallel_size: 1 and a larger tensor_parallel_size",
        _tensor_instead_of_pipeline,
    ),
    "tokens-that-fit-tp": Computed(
        "choose num_speculative_tokens so that num_speculative_tokens + 1 is a multiple of the TP "
        "size",
        _tokens_that_fit_tp,
    ),
}
