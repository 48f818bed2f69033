"""Defaults of generation_config.json that speculation does not allow, and what clients see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.config.speculation import WITHOUT_DRAFT
from specserve.errors import Change
from specserve.findings import Finding

HIGH_TEMPERATURE = 0.8
_WHERE = "models.target_model.path"
_IGNORE = Change("engine.extra_args.generation-config", "vllm")
_PROBABILISTIC = Change("speculative_decoding.draft_sample_method", "probabilistic")


def check(settings: Settings, target: ModelFacts) -> Iterator[Finding]:
    """vLLM 0.32 rejects ``min_p`` and ``logit_bias`` per request under speculation
    (``sampling_params.py``).
    """
    defaults = _defaults(settings, target)
    for name in ("min_p", "logit_bias"):
        value = defaults.get(name)
        if value and not (isinstance(value, int | float) and value <= 1e-5):
            message = (
                f"generation_config.json sets {name}: {value!r} for every request; with "
                f"speculation the engine "
                f"answers each one HTTP 400 ('... {name} ... not yet supported with speculative "
                f"decoding')"
            )
            fix = f"{_IGNORE} (ignores the checkpoint's defaults)"
            yield Finding("sampling-rejected", "error", _WHERE, message[:500], fix, (_IGNORE,))
    temperature = defaults.get("temperature")
    greedy = settings.speculative_decoding.draft_sample_method != "probabilistic"
    drafts = settings.method not in WITHOUT_DRAFT
    samples = defaults.get("do_sample") is not False
    if (
        drafts
        and greedy
        and samples
        and isinstance(temperature, int | float)
        and temperature >= HIGH_TEMPERATURE
    ):
        message = (
            f"the default temperature is {temperature} and drafting is greedy; "
            "fewer drafts are accepted than at 0"
        )
        fix = f"measure at this temperature, or {_PROBABILISTIC}"
        yield Finding("sampling-temperature", "warning", _WHERE, message, fix, (_PROBABILISTIC,))


def _defaults(settings: Settings, target: ModelFacts) -> dict[str, Any]:
    """What vLLM will use: the checkpoint's file unless told otherwise, under the overrides."""
    flags = settings.engine.flags
    override = flags.mapping("override-generation-config")
    if flags.text("generation-config") in (None, "auto"):
        return {**target.generation_config, **override}
    return override
