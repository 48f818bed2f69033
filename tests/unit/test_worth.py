"""What speculation is worth: the model's laws, its nearness to public measurements, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from specserve import cli
from specserve.app import worth
from specserve.engine.inside.economics import (
    LARGEST_K,
    Chip,
    ForwardWork,
    Speculating,
    acceptance_rate,
    chance_of,
    expected_tokens,
    positions,
)
from specserve.engine.inside.step_profile import StepProfile, StepTime
from specserve.errors import ConfigError
from tests.speedup_cases import Accuracy, cases, read

DENSE = ForwardWork(15e9, 15e9, 32, kv_bytes_per_token=131072)
MOE = ForwardWork(2e9, 4e9, 32, expert_bytes=28e9, experts=128, experts_per_token=8)
DRAFT = ForwardWork(2e9, 2e9, 16)
H100 = Chip(3.35e12, 989e12, 450e9)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def test_the_model_is_near_the_public_measurements() -> None:
    """On cases that no constant was fitted to: the direction right in 90 %, the median error below 15 %."""
    held = Accuracy.of([case for case in cases() if case.half == "held"])
    assert held.right >= 0.9 * held.telling
    assert held.median < 0.15


def test_every_measurement_says_where_it_is_from() -> None:
    """Address, date, GPU, load and accepted length of each; no setting is in both halves."""
    rows = read()
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["source"].startswith("https://") for row in rows)
    assert all(row["date"] < "2026-12-01" for row in rows)
    assert all(1 <= row["accepted_length"] <= row["k"] + 1 for row in rows)
    settings = {
        half: {str((r["target"], r["gpu"])) for r in rows if r["half"] == half}
        for half in ("fit", "held")
    }
    assert not settings["fit"] & settings["held"]


@pytest.mark.parametrize("target", [DENSE, MOE])
@pytest.mark.parametrize("draft", [DRAFT, None])
def test_steps_take_longer_with_load_drafts_and_context(
    target: ForwardWork, draft: ForwardWork | None
) -> None:
    """No load, k or context makes a step shorter, and drafting none is never faster than off."""
    model = Speculating(target, H100, draft)
    loads = (1, 2, 4, 16, 64, 256)
    for k in range(1, LARGEST_K):
        times = [model.on(load, k, 1000) for load in loads]
        assert times == sorted(times)
        assert model.on(8, k, 1000) < model.on(8, k + 1, 1000)
        assert model.on(8, k, 1000) <= model.on(8, k, 9000)
    assert all(model.idle(load, 1000) >= model.off(load, 1000) for load in loads)


def test_a_lookup_costs_nothing_where_it_drafts_nothing() -> None:
    """The two yardsticks are one for ngram and suffix, and two for a draft with weights."""
    assert Speculating(DENSE, H100, None).idle(8, 500) == Speculating(DENSE, H100, None).off(8, 500)
    assert Speculating(DENSE, H100, DRAFT).idle(8, 500) > Speculating(DENSE, H100, DRAFT).off(
        8, 500
    )


def test_experts_make_verifying_dearer_at_a_middle_load() -> None:
    """A step over more tokens meets more experts: at 8 requests a MoE loses more to drafts than a dense model."""
    dense, moe = Speculating(DENSE, H100, None), Speculating(MOE, H100, None)
    assert moe.cost(8, 4, 500) > dense.cost(8, 4, 500)
    assert MOE.weight_bytes(10**6) == pytest.approx(30e9)


def test_recurrent_states_are_written_for_every_verified_token() -> None:
    """A model with states loses more to wide drafts under load than the same without them."""
    recurrent = Speculating(replace(DENSE, state_bytes=75e6), H100, None)
    assert recurrent.cost(32, 7, 500) > 1.2 * Speculating(DENSE, H100, None).cost(32, 7, 500)


def test_parallel_drafts_cost_one_forward() -> None:
    """Where one forward gives all drafts, more of them cost only their verification."""
    one_by_one, at_once = (
        Speculating(DENSE, H100, DRAFT, parallel=parallel) for parallel in (False, True)
    )
    assert at_once.drafting(1, 7, 500) < one_by_one.drafting(1, 7, 500) / 3


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.6, 1.0])
def test_the_chance_behind_a_rate_gives_the_rate_back(rate: float, k: int) -> None:
    """An acceptance rate, its chance per token and its tokens of a step agree."""
    tokens = expected_tokens(positions(chance_of(rate, k), k), k)
    assert acceptance_rate(tokens, k) == pytest.approx(rate, abs=1e-6)


def test_the_best_k_is_the_best_of_all() -> None:
    """No other k gives more tokens a second, and bad drafts are best left alone."""
    model = Speculating(DENSE, H100, DRAFT)
    for chance in (0.5, 0.7, 0.9):
        by_position = positions(chance, LARGEST_K)
        best = model.best_k(16, 1000, by_position)
        speeds = [
            model.speedup(16, k, 1000, expected_tokens(by_position, k))
            for k in range(1, LARGEST_K + 1)
        ]
        assert speeds[best - 1] >= max(speeds) * 0.999
    assert model.best_k(16, 1000, positions(0.05, LARGEST_K)) == 0


def test_a_profile_moves_the_rows_that_it_measured() -> None:
    """Within the measured loads its own ratio counts; beyond, the model's moved by the last factor."""
    model = Speculating(DENSE, H100, DRAFT)
    steps = (
        StepTime(1, 0, 1, 0.010), StepTime(1, 3, 4, 0.020), StepTime(16, 0, 1, 0.010), StepTime(16, 3, 4, 0.050),
    )  # fmt: skip
    found = {row.concurrency: row for row in worth.rows(model, 3, 1000, StepProfile(steps), None)}
    assert found[1].speedups[1] == pytest.approx((1 + 0.6 * 3) / 2)
    assert found[16].speedups[1] == pytest.approx((1 + 0.6 * 3) / 5)
    assert found[16].break_even is None
    assert [load for load, row in found.items() if row.is_measured] == [1, 2, 4, 8, 16]
    assert found[256].speedups[1] < (1 + 0.6 * 3) / model.cost(256, 3, 1000)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A pair from config.json alone, on one H100."""
    draft = LLAMA | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "head_dim": 64,
    }
    for name, body in (("target", LLAMA), ("draft", draft)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(body))
    body = {
        "models": {
            "target_model": {"path": str(tmp_path / "target")},
            "draft_model": {"path": str(tmp_path / "draft")},
        },
        "speculative_decoding": {"method": "draft_model", "num_speculative_tokens": 3},
        "engine": {"max_model_len": 8192, "version": "0.32.0"},
        "hardware": {"gpu_name": "H100"},
    }
    path = tmp_path / "pair.yaml"
    path.write_text(json.dumps(body))
    return path


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.program, ["plan", *words])
    return done.exit_code, done.output


def test_the_command_says_what_it_is_worth(config: Path) -> None:
    """A row for each load, both yardsticks, the price, the time to read the weights, and one line to act on."""
    code, text = run(str(config), "--worth")
    assert code == 0
    assert "modelled from bytes and operations, not measured" in text
    rows = [
        line.split()
        for line in text.splitlines()
        if line.split()[:1] and line.split()[0] in map(str, worth.LOADS)
    ]
    assert [int(row[0]) for row in rows] == list(worth.LOADS)
    assert "Time to read the weights (modelled, 1 GB/s)" in text
    assert "Worth it at 60.0 % acceptance" in text


def test_the_json_holds_the_same(config: Path) -> None:
    """Speedups fall with load, rise with acceptance; the break-even lies where the speedup is 1."""
    code, text = run(str(config), "--worth", "--format", "json")
    found = json.loads(text[text.index("{") :])["worth"]
    assert (code, found["source"]) == (0, "modelled")
    loads = found["loads"]
    assert [row["concurrency"] for row in loads] == list(worth.LOADS)
    for row in loads:
        speeds = list(row["speedup_by_acceptance"].values())
        assert speeds == sorted(speeds)
        low, high = zip(worth.RATES[:2], speeds[:2], strict=True)
        slope = (high[1] - low[1]) / (high[0] - low[0])
        limit = row["break_even_acceptance_rate"]
        assert low[1] + slope * (limit - low[0]) == pytest.approx(1, abs=0.01)
        assert row["speed_at_k_0"] < 1
    assert found["price"]["requests"] < found["price"]["requests_without"]


def test_a_context_that_fills_the_cache_is_taken_into_account(config: Path) -> None:
    """A long context makes reading the cache the step, which a draft without much of it shortens."""
    speeds = []
    for tokens in ("100", "8000"):
        _, text = run(str(config), "--worth", "--context", tokens, "--format", "json")
        last = json.loads(text[text.index("{") :])["worth"]["loads"][-1]
        speeds.append(last["speedup_by_acceptance"]["0.6"])
    assert speeds[1] > speeds[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--set", "hardware.gpu_name=null", "--set", "hardware.gpu_memory_gib=80"),
            "set hardware.gpu_name",
        ),
        (("--set", "hardware.gpu_name=RTX 2080 Ti"), "not on record"),
        (("--set", "speculative_decoding.enabled=false"), "speculation is off"),
    ],
)
def test_what_cannot_be_reckoned_is_said(config: Path, words: tuple[str, ...], says: str) -> None:
    """No number is invented where GPU or method are not known."""
    _, text = run(str(config), "--worth", *words)
    assert "Worth: cannot say" in text
    assert says in text


def test_options_of_worth_need_it(config: Path) -> None:
    """They would do nothing without it."""
    code, text = run(str(config), "--plot", "x.svg")
    assert code != 0
    assert "--worth" in text


def test_a_bad_profile_is_a_config_error(config: Path, tmp_path: Path) -> None:
    """And names the file."""
    (tmp_path / "p.json").write_text("[]")
    done = CliRunner().invoke(
        cli.program, ["plan", str(config), "--worth", "--profile", str(tmp_path / "p.json")]
    )
    assert isinstance(done.exception, ConfigError)
    assert "p.json" in str(done.exception)


def test_the_plot_is_a_picture(config: Path, tmp_path: Path) -> None:
    """SVG, the same for the same figures."""
    pytest.importorskip("matplotlib")
    drawn = []
    for name in ("a.svg", "b.svg"):
        code, _ = run(str(config), "--worth", "--plot", str(tmp_path / name))
        assert code == 0
        drawn.append((tmp_path / name).read_text())
    assert drawn[0].startswith("<svg")
    assert drawn[0] == drawn[1]


def test_more_gpus_pay_for_their_links() -> None:
    """Two GPUs without NVLink lose more to wide verification than two with it."""
    work = DENSE.exchanging(4096)
    slow, fast = (
        Speculating(work, Chip(3.35e12, 989e12, link), None, gpus=2) for link in (16e9, 450e9)
    )
    assert slow.cost(64, 4, 500) > fast.cost(64, 4, 500)
    assert not math.isnan(fast.cost(1, 1, 1))
