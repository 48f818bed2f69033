"""The plan against what vLLM printed on public runs: the figures of docs/vram-accuracy.md, as limits."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from specserve.memory.findings import of_plan
from tests import vram_cases
from tests.vram_cases import Case, Error

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def everything() -> list[Case]:
    """Every run that names its model, planned from config.json alone."""
    return vram_cases.cases()


@pytest.fixture(scope="module")
def cases(everything: list[Case]) -> list[Case]:
    """The runs that constants were fitted on."""
    return [c for c in everything if not c.held_out]


def _spread(errors: list[Error | None]) -> tuple[int, float, float]:
    values = sorted(e.relative for e in errors if e is not None)
    return len(values), statistics.median(values), values[-(-9 * len(values) // 10) - 1]


def test_kv_bytes_per_token_are_exact(cases: list[Case]) -> None:
    """Wherever a run states its KV bytes per token, ours are the same to half a percent."""
    errors = [e for c in cases if (e := c.token_bytes_error())]
    assert len(errors) == 83
    assert [e.case for e in errors if e.relative > 0.005] == []


def test_kv_tokens_follow_from_the_printed_pool(cases: list[Case]) -> None:
    """From the printed GiB, which have two decimals, come the printed tokens: groups, blocks, states and drafts."""
    errors = [e for c in cases if (e := c.tokens_error())]
    assert len(errors) == 70
    assert [e.case for e in errors if e.relative > 0.005] == []


def test_weights_within_a_percent(cases: list[Case]) -> None:
    """Weights of one GPU: median within 1 %, 90th percentile within 5 %."""
    count, median, high = _spread([c.weights_error() for c in cases])
    assert count == 82
    assert median <= 0.01
    assert high <= 0.05


def test_kv_cache_when_the_weights_are_as_loaded(cases: list[Case]) -> None:
    """KV cache of one GPU, 0.11 and later, with the loaded bytes known: median 1 %, 90th percentile 5 %."""
    count, median, high = _spread([c.pool_error(loaded=True) for c in cases])
    assert count == 56
    assert median <= 0.01
    assert high <= 0.05


def test_kv_cache_from_metadata_alone(cases: list[Case]) -> None:
    """KV cache of one GPU, 0.11 and later, from config.json: median 2 %, 90th percentile 8 %."""
    count, median, high = _spread([c.pool_error() for c in cases])
    assert count == 62
    assert median <= 0.02
    assert high <= 0.08


def test_kv_tokens_with_the_version_stated(everything: list[Case]) -> None:
    """From 0.11 on, KV tokens of a whole plan: half within 1 %, nine of ten within 4 %; no verdict is wrong."""
    stated = [c for c in everything if "version" in c.raw and c.version >= (0, 11)]
    count, median, high = _spread([c.printed_tokens_error() for c in stated])
    assert count == 73
    assert median <= 0.01
    assert high <= 0.04
    judged = [c for c in everything if "version" in c.raw and c.counts_for_fit]
    assert [c.id for c in judged if c.plan.fits == c.refused] == []


def test_what_ran_is_not_refused(cases: list[Case]) -> None:
    """No run that served is refused."""
    assert [c.id for c in cases if c.counts_for_fit and not c.refused and not c.plan.fits] == []


def test_what_ran_out_of_memory_is_refused(cases: list[Case]) -> None:
    """Runs that failed for want of memory are refused, those that ran out in the sampler's warm-up among them."""
    assert [c.id for c in cases if c.counts_for_fit and c.refused and c.plan.fits] == []
    assert sum(c.plan.refusal == "headroom" for c in cases) >= 2


def test_few_that_served_are_warned_about(cases: list[Case]) -> None:
    """A warning for want of room outside the budget is for the few that have little."""
    warned = [c.id for c in cases if "memory-tight" in [f.code for f in of_plan(c.plan)]]
    assert len(warned) <= 0.05 * len(cases)


def test_every_run_that_says_what_it_is_is_planned(cases: list[Case]) -> None:
    """132 runs, of which 13 do not say enough, each with what is missing; nothing crashes, nothing is a silent zero."""
    _, raw = vram_cases.load()
    assert sum("held_out" not in c for c in raw) == 132
    assert len(cases) == 119
    assert all(c["reference"] and ("model" in c) != ("unplanned" in c) for c in raw)
    assert all(c.plan.gpus[0].target_weights_bytes > 0 for c in cases)
    assert all(c.plan.kv_bytes_per_token > 0 for c in cases)


def test_runs_that_nothing_was_fitted_on(everything: list[Case]) -> None:
    """Other models, sizes and formats: weights within 1 %, KV cache within 1 %, tokens exact, every one fits."""
    held = [c for c in everything if c.held_out]
    assert len(held) == 18
    for errors, limit in (([c.weights_error() for c in held], 0.01), ([c.pool_error() for c in held], 0.01),
                          ([c.tokens_error() for c in held], 0.005)):  # fmt: skip
        assert [e.case for e in errors if e is None or e.relative > limit] == []
    assert all(c.plan.fits for c in held)


def test_the_page_is_what_the_program_writes(everything: list[Case]) -> None:
    """docs/vram-accuracy.md is generated from the same data."""
    import importlib.machinery
    import importlib.util

    loader = importlib.machinery.SourceFileLoader(
        "vram_accuracy", str(ROOT / "scripts" / "vram-accuracy")
    )
    spec = importlib.util.spec_from_loader("vram_accuracy", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert (ROOT / "docs" / "vram-accuracy.md").read_text(encoding="utf-8") == module.page(
        everything
    )
