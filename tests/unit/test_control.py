"""The live control: its law in a simulated engine, its hooks in stand-in schedulers."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.config import rules
from specserve.config.schema import Settings
from specserve.engine.command.args import build, speculative_config
from specserve.engine.command.environment import (
    CONTROL_VARIABLE,
    ControlOrder,
    control_order,
)
from specserve.engine.inside import control_vllm
from specserve.engine.inside.control import Law, SeenStep
from specserve.engine.inside.control_vllm import Control
from specserve.engine.installed.introspect import Installed
from tests.simulated_engine import Played, case, play


@dataclass
class Params:
    extra_args: Mapping[str, Any] | None = None


@dataclass
class Request:
    sampling_params: Params = field(default_factory=Params)


@dataclass
class Output:
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    num_spec_tokens_to_schedule: int


@dataclass
class Sampled:
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]


@dataclass
class Drafts:
    req_ids: list[str]
    draft_token_ids: list[list[int]]


class StandIn:
    """The part of vLLM's Scheduler that the control touches: two requests that decode."""

    def __init__(self, tokens: int = 4, extra: Mapping[str, Any] | None = None) -> None:
        self.dynamic_sd_lookup: list[int] | None = None
        self.num_spec_tokens = tokens
        self.requests = {"a": Request(), "b": Request(Params(extra))}
        self.running = ["a", "b"]
        self.waiting: list[str] = []
        self.drafts: dict[str, list[int]] = {}
        self.updates = 0

    def schedule(self, throttle_prefills: bool = False) -> Output:
        length = self.num_spec_tokens
        if self.dynamic_sd_lookup is not None:
            length = self.dynamic_sd_lookup[len(self.running)]
        scheduled = {name: 1 + len(self.drafts.get(name, [])) for name in self.running}
        return Output(scheduled, dict(self.drafts), length)

    def update_from_output(
        self, scheduler_output: Output, model_runner_output: Sampled
    ) -> dict[int, Any]:
        self.updates += 1
        return {}

    def update_draft_token_ids(self, draft_token_ids: Drafts) -> None:
        self.drafts = dict(
            zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        )


class WithoutLookup(StandIn):
    """A version that chooses the length elsewhere."""

    def schedule(self, throttle_prefills: bool = False) -> Output:
        return Output(dict.fromkeys(self.running, 1), {}, 0)


class OtherSignature(StandIn):
    """A version that tells of a step in another way."""

    def update_from_output(
        self, scheduler_output: Output, model_runner_output: Sampled, grammar: int
    ) -> dict[int, Any]:  # type: ignore[override]
        return {}


class WithoutAttribute(StandIn):
    """A version that keeps its requests elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        del self.requests


def steered(made: StandIn, method: str = "ngram", order: ControlOrder | None = None) -> StandIn:
    """A stand-in under control."""
    order = order or ControlOrder()
    Control(made, method, most_running=8, synchronous=True, order=order).take_over()  # type: ignore[arg-type]
    return made


def steps(made: StandIn, count: int, accepts: Sequence[int] = (4, 4)) -> Iterator[int]:
    """Steps as vLLM's core takes them; yields how many tokens each drafted per request."""
    for _ in range(count):
        output = made.schedule()
        given = [
            [1] * (1 + min(n, len(made.drafts.get(name, []))))
            for name, n in zip("ab", accepts, strict=True)
        ]
        made.update_from_output(output, Sampled({"a": 0, "b": 1}, given))
        length = output.num_spec_tokens_to_schedule
        made.update_draft_token_ids(Drafts(["a", "b"], [[7] * length, [7] * length]))
        yield len(made.drafts["a"])


SLICE = (0, 1, 2, 3, 4, 13, 19)
"""Seeds: each family of cost laws, lookups and drafts, and every kind of traffic."""


@cache
def played(seed: int) -> Played:
    return play(case(seed))


@pytest.mark.parametrize("seed", SLICE)
def test_near_the_best_fixed_length_in_a_simulated_engine(seed: int) -> None:
    """In each family of cost laws the control is never much slower than k = 0 or the best fixed length."""
    one = played(seed)
    assert one.against_zero >= 0.96, one.name
    assert one.against_best >= 0.9, one.name


def test_gains_over_a_fixed_length_of_four() -> None:
    """Over the families, live is well ahead of the one length that people choose."""
    assert geometric_mean(played(seed).live / played(seed).fixed[4] for seed in SLICE) > 1.05


def played_law(law: Law, *, good: bool, batch: int = 4, count: int = 400) -> int:
    """A law after steps of one kind of traffic; drafting costs a tenth of a step per token and request."""
    asked = 0
    for _ in range(count):
        drafted = [asked] * batch
        accepted = [asked if good else 0] * batch
        seconds = 0.02 * (1 + 0.1 * asked)
        following = law.choose(batch).tokens
        law.observe(SeenStep(asked, drafted, accepted, seconds))
        asked = following
    lengths = [law.choose(batch) for _ in range(9)]
    return int(median(each.tokens for each in lengths))


def test_comes_back_after_traffic_that_nothing_helps() -> None:
    """Drafts that are never accepted switch drafting off; drafts that are accepted switch it on again."""
    law = Law(4, lookup=True)
    assert played_law(law, good=False) == 0
    assert played_law(law, good=True) == 4
    assert played_law(law, good=False) == 0


def test_no_length_above_the_cap_or_the_start() -> None:
    """However good the traffic, k stays below what the engine was started with, and 0 where nothing may be drafted."""
    law = Law(3, lookup=True)
    played_law(law, good=True)
    assert max(law.choose(4).tokens for _ in range(50)) == 3
    assert {law.choose(4, 2).tokens for _ in range(50)} <= {0, 1, 2}
    assert law.choose(4, 0).tokens == 0


def test_changes_the_length_in_the_scheduler() -> None:
    """The scheduler's own table carries the length, and it varies while serving."""
    made = steered(StandIn())
    lengths = set(steps(made, 200))
    assert len(lengths) > 1
    assert made.updates == 200


def test_suffix_is_cut_and_never_told() -> None:
    """Suffix drafts its full length, as its proposer asserts, and what is too much is cut afterwards."""
    made = steered(StandIn(), "suffix", ControlOrder(((1, 8, 4),), largest_batch=1))
    lengths = list(steps(made, 20))
    assert made.dynamic_sd_lookup is None
    assert set(lengths[1:]) == {0}


@pytest.mark.parametrize(("asked", "most"), [(0, 0), (2, 2), (-3, 0), (99, 4), ("x", 4), (True, 4)])
def test_a_request_may_limit_its_own_drafts(asked: Any, most: int) -> None:
    """A request's own limit is clamped; what is no number is no limit."""
    made = steered(StandIn(extra={"num_speculative_tokens": asked}))
    made.update_draft_token_ids(Drafts(["a", "b"], [[7] * 4, [7] * 4]))
    assert (len(made.drafts["a"]), len(made.drafts["b"])) == (4, most)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (WithoutAttribute(), "has no requests"),
        (WithoutLookup(), "does not read dynamic_sd_lookup"),
        (OtherSignature(), "update_from_output"),
    ],
)
def test_an_unknown_scheduler_is_left_alone(made: StandIn, said: str) -> None:
    """A scheduler that lacks an attribute, or has another signature, is not controlled, with the reason."""
    reason = control_vllm.unfit(made, "ngram")  # type: ignore[arg-type]
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize("made", [WithoutAttribute, WithoutLookup, OtherSignature])
def test_starts_plain_with_a_warning(
    made: type[StandIn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The factory hands such a scheduler out untouched, and says so once."""
    module = SimpleNamespace(Scheduler=lambda **given: made())
    monkeypatch.setitem(__import__("sys").modules, "vllm.v1.core.sched.scheduler", module)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False, max_num_seqs=8),
        speculative_config=SimpleNamespace(method="ngram"),
    )
    with caplog.at_level(logging.WARNING, "vllm.specserve"):
        got = control_vllm.scheduler(vllm_config=config)
    assert "schedule" not in vars(got)
    assert [record.message for record in caplog.records if "runs as it is" in record.message]


@pytest.mark.parametrize("hook", ["schedule", "update_from_output", "update_draft_token_ids"])
def test_an_exception_leaves_plain_vllm(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever breaks inside, the scheduler's own methods go on, unwrapped, with one warning."""
    made = StandIn()
    made.dynamic_sd_lookup = [4] * 9
    steered(made)
    list(steps(made, 5))
    if hook == "schedule":
        made.running = None  # type: ignore[assignment]
    sampled = Sampled({"a": 0, "b": 1}, [[1], [1]])
    with caplog.at_level(logging.WARNING, "vllm.specserve"):
        if hook == "schedule":
            with pytest.raises(TypeError):  # the stand-in's own, which vLLM's would raise as well
                made.schedule()
            made.running = ["a", "b"]
        elif hook == "update_from_output":
            output = made.schedule()
            output.scheduled_spec_decode_tokens = None  # type: ignore[assignment]
            made.update_from_output(output, sampled)
        else:
            made.update_draft_token_ids(Drafts(["a", "b"], [[1], [1]]))
            broken = SimpleNamespace(req_ids=["a"], draft_token_ids=[])
            with pytest.raises(ValueError, match="zip"):
                made.update_draft_token_ids(broken)  # type: ignore[arg-type]
    assert "schedule" not in vars(made)
    assert made.dynamic_sd_lookup == [4] * 9
    assert len([r for r in caplog.records if "runs on as it is" in r.message]) == 1
    assert len(list(steps(made, 3))) == 3


def settings(method: str = "ngram", **spec: Any) -> Settings:
    """A config with the live control."""
    models: dict[str, Any] = {"target_model": {"path": "/m/t"}}
    if method not in ("ngram", "suffix", "ngram_gpu"):
        models["draft_model"] = {"path": "/m/d"}
    extra = spec.pop("extra_args", {})
    models["target_model"] |= spec.pop("target", {})
    speculation = {"method": method, "control": "live", **spec}
    return Settings.model_validate(
        {
            "models": models,
            "speculative_decoding": speculation,
            "engine": {"extra_args": extra, "max_num_seqs": 64},
        }
    )


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"extra_args": {"data-parallel-size": 2}}, "data parallel"),
        ({"extra_args": {"-dp": 2}}, "data parallel"),
        ({"target": {"pipeline_parallel_size": 2}}, "pipeline"),
        ({"extra_args": {"scheduler_cls": "my.Scheduler"}}, "scheduler-cls"),
        ({"extra_config": {"enable_adaptive_verification": True}}, "adaptive verification"),
        ({"method": "medusa"}, "one length only"),
        ({"method": "ngram_gpu"}, "one length only"),
        ({"control": "schedule"}, "none is set"),
        ({"control": "fixed", "max_batch_size": 8}, "'fixed'"),
    ],
)
def test_refused_with_a_sentence(given: dict[str, Any], word: str) -> None:
    """What the live control cannot run beside is an error that names it."""
    complaints = list(rules.check(settings(**given)))
    assert any(word in each.message and not each.is_warning for each in complaints)


def test_the_command_names_the_scheduler_for_live_alone() -> None:
    """--scheduler-cls is written for live, and for nothing else."""
    installed = Installed("vllm", "0.32.0", "python")
    live = build(settings(max_batch_size=8), installed=installed)
    assert live.argv[live.argv.index("--scheduler-cls") + 1] == f"{control_vllm.__name__}.scheduler"
    assert control_order(live.env) == ControlOrder(((1, 8, 5), (9, 64, 0)), 8)
    plain = build(settings(control=None), installed=installed)
    assert "--scheduler-cls" not in plain.argv
    assert CONTROL_VARIABLE not in plain.env


def test_suffix_with_live_gets_no_schedule_of_vllms() -> None:
    """A schedule would end vLLM's suffix proposer: the control has it, the engine does not."""
    written = speculative_config(settings("suffix", max_batch_size=8))
    assert written is not None
    assert "num_speculative_tokens_per_batch_size" not in written


def test_the_script_prints_its_figures() -> None:
    """scripts/simulate-control runs, with few cases, and names each figure."""
    script = Path(__file__).parents[2] / "scripts" / "simulate-control"
    command = [sys.executable, str(script), "--cases", "2", "--seed", "4"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "live / k=0, worst" in out
    assert "decision at 256 requests" in out
