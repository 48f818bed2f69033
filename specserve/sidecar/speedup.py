"""What speculation is worth now: acceptance from the live engine, step times from a benchmark
profile.

Without a profile nothing is said: the ratio of step times depends on model, GPU and batch size. The
formulae are those of :mod:`specserve.engine.inside.economics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specserve.engine.inside import economics, step_profile
from specserve.engine.inside.step_profile import BadProfile, StepProfile
from specserve.errors import ConfigError
from specserve.files import read_small
from specserve.metric_families import MetricKey, Readings, key


def load(path: Path) -> StepProfile:
    """Read a profile. Raises ConfigError naming what is wrong with it."""
    try:
        return step_profile.parse(read_small(path))
    except OSError as error:
        raise ConfigError(
            f"cannot read the benchmark profile: {error.strerror}", where=str(path)
        ) from error
    except BadProfile as error:
        raise ConfigError(str(error), where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not JSON: {error}", where=str(path)) from error


def readings(
    profile: StepProfile | None, known: Readings, windows: Sequence[str]
) -> dict[MetricKey, float]:
    """Speedup and break-even at the current batch size; empty without a profile, traffic or
    drafts. No break-even where no acceptance pays; the margin is negative there."""
    running = known.get(key("specserve_requests_running"))
    if profile is None or not running:
        return {}
    found = profile.at(running)
    if found is None:
        return {}
    cost, drafted = found
    out = {}
    break_even = economics.break_even_rate(cost, drafted)
    if break_even is not None:
        out[key("specserve_break_even_acceptance_rate")] = break_even
    for window in windows:
        per_step = known.get(key("specserve_tokens_per_step", window=window))
        rate = known.get(key("specserve_acceptance_rate", window=window))
        if per_step is not None and rate is not None:
            speed = economics.gain(per_step, cost)
            out[key("specserve_estimated_speedup_ratio", window=window)] = speed
            tpot = known.get(
                key("specserve_time_per_output_token_seconds", stat="mean", window=window)
            )
            off = profile.off_seconds_at(running)
            measured = cost
            if tpot is not None and off is not None:
                # What a step really takes now, instead of what it took in the benchmark.
                measured = tpot * per_step / off
            margin = economics.margin(rate, measured, drafted)
            out[key("specserve_break_even_margin", window=window)] = margin
    return out
