"""Statistics and verdicts of the benchmark, on simulated benches whose truth is known."""

from __future__ import annotations

import contextlib
import math
import random
from pathlib import Path

import pytest

from specserve.app import report as app_report
from specserve.app.arm import ArmSpec, foreign_tokens, require_side_by_side
from specserve.app.bench import fresh, gpus_of
from specserve.app.bench_setup import BenchOptions, _arms
from specserve.bench import advice, breakeven, judge, report, stats, workload
from specserve.bench.plan import BenchPlan, legs
from specserve.bench.result import (
    Answers,
    Arm,
    BenchCheck,
    Block,
    Result,
    Sample,
    Speculation,
    differences,
)
from specserve.bench.workload import Request, Workload
from specserve.config.load import load
from specserve.engine.http import metrics
from specserve.errors import ConfigError


def simulate(
    factor: float = 1.0,
    *,
    seed: int = 0,
    prompts: int = 16,
    repeat: int = 1,
    drift: float = 0.0,
    block_noise: float = 0.02,
    errors: int = 0,
    acceptance: float | None = 0.7,
) -> Result:
    """A bench whose speculative arm is ``factor`` times faster per token; ``drift`` slows the machine per block."""
    rng = random.Random(seed)
    base = {f"p{i}": 0.01 * rng.lognormvariate(0, 0.25) for i in range(prompts)}
    blocks = []
    for index, arm in enumerate(legs(["off", "on"], repeat)):
        slow = (1 + drift) ** index * rng.lognormvariate(0, block_noise)
        samples = []
        for prompt, tpot in base.items():
            seconds = tpot * slow * rng.lognormvariate(0, 0.05) / (factor if arm == "on" else 1.0)
            samples.append(
                Sample(
                    prompt_id=prompt,
                    ok=True,
                    ttft_seconds=0.05,
                    e2e_seconds=0.05 + 63 * seconds,
                    output_tokens=64,
                )
            )
        for i in range(errors if arm == "on" else 0):
            samples[i] = Sample(prompt_id=f"p{i}", ok=False, error="boom")
        blocks.append(block(index, arm, samples, acceptance if arm == "on" else None))
    return result(blocks)


def block(index: int, arm: str, samples: list[Sample], acceptance: float | None) -> Block:
    tokens = sum(s.output_tokens or 0 for s in samples)
    drafts = tokens / (1 + 3 * acceptance) if acceptance is not None else 0
    spec = None
    if acceptance is not None:
        spec = Speculation(
            drafts=drafts, draft_tokens=3 * drafts, accepted_tokens=3 * drafts * acceptance
        )
    return Block(
        index=index,
        arm=arm,
        workload="w",
        concurrency=4,
        started_seconds=float(index),
        duration_seconds=sum(s.e2e_seconds or 0 for s in samples) / 4,
        samples=samples,
        speculation=spec,
    )


def result(blocks: list[Block]) -> Result:
    return Result(
        specserve_version="0",
        created="2026-01-01T00:00:00+00:00",
        arms=[Arm(name="off"), Arm(name="on")],
        blocks=blocks,
    )


def verdict(outcome: Result) -> judge.BenchCell:
    (cell,) = judge.verdict(outcome).cells
    return cell


def drops(old: Result, new: Result, share: float) -> list[str]:
    return judge.drops(judge.verdicts(old), judge.verdicts(new), share)


@pytest.mark.parametrize("seed", range(5))
def test_a_faster_arm_is_faster(seed: int) -> None:
    """An arm that makes tokens 1.5 times faster is called so, and the interval holds the truth."""
    cell = verdict(simulate(1.5, seed=seed))
    assert cell.verdict == "faster"
    assert cell.speedup is not None
    assert cell.speedup.low < 1.5 < cell.speedup.high


@pytest.mark.parametrize("seed", range(5))
def test_a_slower_arm_is_slower(seed: int) -> None:
    """An arm at 0.8 of the speed is called slower once the blocks are repeated."""
    assert verdict(simulate(0.8, seed=seed, repeat=2)).verdict == "slower"


def test_the_advice_is_a_line_for_the_config() -> None:
    """Faster up to 4 requests is the largest batch that speculates, from 4 on the smallest; slower everywhere, off."""
    under_load = [b.model_copy(update={"concurrency": 16}) for b in simulate(0.7, repeat=2).blocks]
    both = result([*simulate(1.5, repeat=2).blocks, *under_load])
    (said,) = advice.conclusion(judge.verdict(both))
    assert said.startswith("Turn it on for w up to 4 concurrent requests (1.")
    assert said.endswith("In the config: speculative_decoding.max_batch_size: 4.")
    alone = [b.model_copy(update={"concurrency": 2}) for b in simulate(0.8, repeat=2).blocks]
    busy = result([*alone, *simulate(1.5, repeat=2).blocks])
    (said,) = advice.conclusion(judge.verdict(busy))
    assert said.startswith("Turn it on for w from 4 concurrent requests (1.")
    assert said.endswith("In the config: speculative_decoding.schedule: [[1, 3, 0], [4, 4096, 5]].")
    mixed = result(
        [
            *busy.blocks,
            *(b.model_copy(update={"concurrency": 1}) for b in simulate(1.5, repeat=2).blocks),
        ]
    )
    (said,) = advice.conclusion(judge.verdict(mixed))
    assert said.startswith("No single limit for w: faster at 1 and 4 concurrent requests (1.")
    assert "slower at 2 (0." in said
    never = result(under_load)
    assert advice.conclusion(judge.verdict(never))[0].endswith(
        "speculative_decoding.enabled: false."
    )


def test_factors_that_round_alike_are_said_once() -> None:
    """Two loads at nearly the same speedup are no range from 1.59x to 1.59x."""
    near = [b.model_copy(update={"concurrency": 16}) for b in simulate(1.5, repeat=2).blocks]
    (said,) = advice.conclusion(judge.verdict(result([*simulate(1.5, repeat=2).blocks, *near])))
    assert said.startswith("Turn it on for w up to 16 concurrent requests: 1.")
    assert " to 1." not in said


def test_wrong_answers_are_never_advised() -> None:
    """An arm that is faster and gives other answers, or breaks a schema, is not recommended by any sentence."""
    whole = simulate(1.5)
    wrong = Answers(workload="w", compared=9, identical=0, near_ties=0, divergent=9)
    failed = BenchCheck(
        arm="on", name="structured", status="FAIL", message="asked for JSON, got 'x'"
    )
    for update, said in (
        ({"answers": [wrong]}, "Do not turn it on for w: 9 of 9 answers are not the target's."),
        (
            {"checks": [failed]},
            "Do not turn it on: 'on' fails structured: asked for JSON, got 'x'.",
        ),
    ):
        assert advice.conclusion(judge.verdict(whole.model_copy(update=update))) == [said]
    both = whole.model_copy(update={"checks": [failed, failed.model_copy(update={"arm": "off"})]})
    assert judge.verdict(both).failed == ()  # the model cannot do it at all


def test_three_arms_are_two_comparisons() -> None:
    """The first arm is compared with each of the others, on its own pages of one report."""
    fast, slow = simulate(1.5), simulate(0.7, repeat=2)
    third = [b.model_copy(update={"arm": "eagle"}) for b in slow.blocks if b.arm == "on"]
    whole = result([*fast.blocks, *third]).model_copy(
        update={"arms": [Arm(name=n) for n in ("off", "on", "eagle")]}
    )
    first, second = judge.verdicts(whole)
    assert [a.name for a in second.result.arms] == ["off", "eagle"]
    assert (first.cells[0].verdict, second.cells[0].speculative.arm) == ("faster", "eagle")
    titles = [p.title for p in report.document([first, second])]
    assert titles[0] == "Side by side"
    assert {t for t in titles if t.endswith("In short")} == {
        ", on (2026-01-01): In short",
        ", eagle (2026-01-01): In short",
    }


def test_a_worse_result_is_told() -> None:
    """A newer result is worse where speedup or acceptance length fell by more than the share that is allowed."""
    old, new = simulate(1.5, acceptance=0.7), simulate(1.5, acceptance=0.5)
    assert drops(old, new, 0.1) == ["acceptance length of w at 4 fell from 3.10 to 2.50"]
    assert drops(old, new, 0.2) == drops(new, old, 0.1) == []
    assert drops(simulate(1.5), simulate(1.2), 0.1)[0].startswith("speedup of w at 4 fell from 1.")


def test_what_cannot_be_compared_is_no_pass() -> None:
    """No cell in common, no sound verdict any more, or a third arm that fell: none of them passes for CI."""
    old = simulate(1.5)
    other = result([b.model_copy(update={"concurrency": 8}) for b in old.blocks])
    assert drops(old, other, 0.1) == ["no workload and concurrency was measured in both results"]
    (unsound,) = drops(old, simulate(1.5, errors=4), 0.1)
    assert unsound.startswith("speedup of w at 4 was 1.")
    assert unsound.endswith("and is not known now")
    arms = [Arm(name=n) for n in ("off", "on", "eagle")]
    three = [
        result(
            [
                *old.blocks,
                *(
                    b.model_copy(update={"arm": "eagle"})
                    for b in simulate(f).blocks
                    if b.arm == "on"
                ),
            ]
        )
        for f in (1.5, 0.7)
    ]
    (fell,) = drops(*(r.model_copy(update={"arms": arms}) for r in three), 0.1)
    assert fell.startswith("speedup of w at 4 fell from 1.")


@pytest.mark.parametrize(
    ("share", "devices", "has_gpu", "fits"),
    [
        (0.9, "01", True, True),
        (0.45, "00", True, True),
        (0.45, "001", True, True),
        (0.9, "00", False, True),
        (0.9, "001", True, False),
    ],
)
def test_arms_side_by_side_share_the_gpu(
    tmp_path: Path, share: float, devices: str, has_gpu: bool, fits: bool
) -> None:
    """Two arms run together on one GPU only where their shares of its memory add up to at most one."""
    specs = []
    for device in devices:
        path = tmp_path / f"{device}.yaml"
        engine = f"{{gpu_memory_utilization: {share}, env: {{CUDA_VISIBLE_DEVICES: '{device}'}}}}"
        off = "speculative_decoding: {enabled: false}"
        path.write_text(f"models: {{target_model: {{path: /m}}}}\nengine: {engine}\n{off}\n")
        specs.append(ArmSpec(device, load(path, environ={})))
    refusal = pytest.raises(ConfigError, match=r"the arms want 1\.80 of the same GPU")
    with contextlib.nullcontext() if fits else refusal:
        require_side_by_side(specs, has_gpu=has_gpu)


def test_arms_side_by_side_have_a_port_each(tmp_path: Path) -> None:
    """The config is loaded again only for an arm that changes it: without speculation, or on another port."""
    path = tmp_path / "config.yaml"
    path.write_text("models: {target_model: {path: /m}}\nspeculative_decoding: {method: ngram}\n")
    other = tmp_path / "other.yaml"
    other.write_text("models: {target_model: {path: /o}}\nspeculative_decoding: {method: ngram}\n")
    loaded = load(path, environ={}, overrides=["server.port=9000"])
    names = f"baseline,speculative,{other}"
    apart = _arms(loaded, BenchOptions(arms=names), {})
    assert apart[1].loaded is loaded
    assert not apart[0].loaded.settings.speculative_decoding.enabled
    assert {a.loaded.settings.server.port for a in apart} == {9000}
    together = _arms(loaded, BenchOptions(arms=names, together=True), {})
    assert [a.loaded.settings.server.port for a in together] == [9000, 9001, 9002]
    assert [a.name for a in together] == ["baseline", "speculative", "other"]
    assert together[2].loaded.settings.models.target_model.path == "/o"


def test_gpu_figures_are_those_of_the_arm(tmp_path: Path) -> None:
    """The arm's own CUDA_VISIBLE_DEVICES comes first; nothing is said of a server on another machine."""
    path = tmp_path / "two.yaml"
    path.write_text(
        "models: {target_model: {path: /m, tensor_parallel_size: 2}}\nspeculative_decoding: {enabled: false}\n"
        "engine: {env: {CUDA_VISIBLE_DEVICES: '2,3'}}\n"
    )
    own = load(path, environ={})
    assert gpus_of(ArmSpec("a", own), {"CUDA_VISIBLE_DEVICES": "0,1"}) == ("2,3", 2)
    assert gpus_of(ArmSpec("a", own, url="http://localhost:8000"), {}) == ("2,3", 2)
    assert gpus_of(ArmSpec("a", own, url="http://gpu-server:8000"), {}) is None


def test_tokens_for_somebody_else_are_noticed() -> None:
    """More tokens than our requests got were made for others, and then acceptance is not ours."""

    def snapshot(tokens: int) -> metrics.EngineSnapshot:
        text = f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}\n'
        return metrics.parse(text, at_seconds=0.0)

    assert foreign_tokens(snapshot(100), snapshot(1100), 1000) == 0
    assert foreign_tokens(snapshot(100), snapshot(1400), 1000) == 300
    assert foreign_tokens(None, snapshot(1400), 1000) is None


@pytest.mark.parametrize(
    ("foreign", "said"),
    [
        ([0.0, 0.0, 0.0, 0.0], "nobody else used the server"),
        (
            [None, 0.0, 300.0, 0.0],
            "In 1 of 4 blocks somebody else used the server: there it is unknown. In 1 of 4",
        ),
        ([None] * 4, "In 4 of 4 blocks it is not known whether somebody else used the server."),
    ],
)
def test_who_used_the_server_is_said_as_far_as_it_is_known(
    foreign: list[float | None], said: str
) -> None:
    """Counters that could not be read are no proof that the server was ours alone."""
    blocks = [
        b.model_copy(update={"foreign_tokens": f})
        for b, f in zip(simulate(1.5).blocks, foreign, strict=True)
    ]
    (part,) = [
        p for p in report.document([judge.verdict(result(blocks))]) if p.title == "Acceptance"
    ]
    assert said in " ".join(part.text)


def test_a_later_first_token_is_said() -> None:
    """Faster tokens do not hide that the first one comes later."""
    whole = simulate(1.5)
    late = {"ttft_seconds": 0.07}
    blocks = [
        b.model_copy(update={"samples": [s.model_copy(update=late) for s in b.samples]})
        if b.arm == "on"
        else b
        for b in whole.blocks
    ]
    (said,) = advice.conclusion(judge.verdict(result(blocks)))
    assert said.endswith(
        "faster per token. Time to first token is 1.40x as long with 4 concurrent requests."
    )


def test_equal_arms_are_rarely_told_apart() -> None:
    """Over 200 benches of an arm against itself, fewer than 5 % claim a difference."""
    wrong = sum(verdict(simulate(1.0, seed=s)).verdict in ("faster", "slower") for s in range(200))
    assert wrong < 10


def test_no_difference_is_its_own_answer() -> None:
    """Equal arms on a quiet machine, repeated, are called equal, not undecided."""
    assert (
        verdict(simulate(1.0, repeat=3, prompts=64, block_noise=0.002)).verdict == "no difference"
    )


def test_a_noisy_machine_is_inconclusive() -> None:
    """An effect smaller than the noise between equal blocks is no verdict."""
    assert verdict(simulate(1.05, block_noise=0.08, seed=3)).verdict == "inconclusive"


def test_a_drifting_machine_is_unsound() -> None:
    """Equal blocks that differ by a quarter make the cell unsound: no speedup is given."""
    cell = verdict(simulate(1.5, drift=0.15))
    assert (cell.verdict, cell.speedup, cell.throughput_speedup) == ("unsound", None, None)
    assert "equal blocks of 'off' differ by" in cell.warnings[0]


def test_a_slow_steady_drift_cancels() -> None:
    """A B B A: a drift of some percent per block does not make one arm faster."""
    assert verdict(simulate(1.0, drift=0.03, block_noise=0.001)).verdict in (
        "inconclusive",
        "no difference",
    )


def test_failing_requests_are_unsound() -> None:
    """An arm whose requests fail has no speedup, however fast the others were."""
    cell = verdict(simulate(1.5, errors=3))
    assert cell.verdict == "unsound"
    assert "6 of 32 requests of 'on' failed" in cell.warnings[0]


def test_answers_in_one_burst_are_unsound() -> None:
    """Behind a proxy that buffers, the time between tokens is nothing; that is said, and no drift is made of it."""
    whole = simulate(1.5)
    late = [
        b.model_copy(
            update={
                "samples": [s.model_copy(update={"ttft_seconds": s.e2e_seconds}) for s in b.samples]
            }
        )
        for b in whole.blocks[2:3]
    ]
    (warning,) = verdict(result([*whole.blocks[:2], *late, whole.blocks[3]])).warnings
    assert warning.startswith(
        "16 of 32 answers of 'on' came in one burst, so TPOT is not known: look for a proxy"
    )


def test_a_short_answer_after_a_long_wait_is_no_burst() -> None:
    """Where requests queue, the tokens of an answer take a small part of its time although they are streamed."""
    queued = [
        b.model_copy(
            update={
                "samples": [
                    s.model_copy(
                        update={
                            n: (getattr(s, n) or 0) + 600 for n in ("ttft_seconds", "e2e_seconds")
                        }
                    )
                    for s in b.samples
                ]
            }
        )
        for b in simulate(1.5).blocks
    ]
    assert verdict(result(queued)).warnings == ()


def test_a_replay_that_falls_behind_is_unsound() -> None:
    """Requests that were sent long after their recorded times met another load; the fix is said."""
    whole = simulate(1.5)
    late = [s.model_copy(update={"late_seconds": 2.5}) for s in whole.blocks[0].samples]
    cell = verdict(
        result([whole.blocks[0].model_copy(update={"samples": late}), *whole.blocks[1:]])
    )
    (warning,) = cell.warnings
    assert warning.startswith(
        "16 of 16 replayed requests to 'off' were sent up to 2.5 s late: raise --concurrency"
    )


def test_a_replay_is_measured_once_a_leg() -> None:
    """A trace with times has its own load: the largest concurrency only bounds it."""
    timed = Workload(name="t", requests=(Request(id="a", prompt="x", at_seconds=0.0),))
    assert [s.concurrency for s in BenchPlan(("a", "b"), (timed,), (1, 8)).steps()] == [8] * 4


def test_few_prompts_are_unsound() -> None:
    """Four prompts say nothing about other prompts."""
    assert "4 prompts were answered by both arms" in verdict(simulate(2.0, prompts=4)).warnings[0]


def test_one_block_per_arm_is_inconclusive() -> None:
    """Without two equal blocks the noise is unknown, so nothing is claimed."""
    whole = simulate(1.5)
    cell = verdict(result(whole.blocks[:2]))
    assert (cell.verdict, cell.noise) == ("inconclusive", None)


def test_swapping_the_arms_inverts_the_speedup() -> None:
    """The ratio of B to A is one over the ratio of A to B."""
    whole = simulate(1.3)
    swapped = whole.model_copy(update={"arms": list(reversed(whole.arms))})
    a, b = verdict(whole).speedup, verdict(swapped).speedup
    assert a is not None
    assert b is not None
    assert math.isclose(a.value * b.value, 1.0)


def test_absent_is_not_zero() -> None:
    """An arm that drafts nothing has no acceptance, and a one-token answer no TPOT."""
    cell = verdict(simulate(1.0, acceptance=None))
    assert cell.speculative.acceptance_rate is None
    assert (
        Sample(
            prompt_id="p", ok=True, ttft_seconds=0.1, e2e_seconds=0.1, output_tokens=1
        ).tpot_seconds
        is None
    )
    assert stats.spread([]) is None


def test_break_even_is_where_a_token_costs_the_same() -> None:
    """A 1.5x arm at 70 % acceptance of 3 tokens breaks even where its step costs what the baseline's does."""
    profile = breakeven.profile(judge.verdict(simulate(1.5, block_noise=0.0001)))
    ((_, worth),) = profile.cells
    assert worth.cost == pytest.approx(3.1 / 1.5, rel=0.03)
    assert worth.break_even == pytest.approx((3.1 / 1.5 - 1) / 3, rel=0.05)


def test_unsound_cells_make_no_profile() -> None:
    """What may not be told to a person may not steer the sidecar either."""
    assert breakeven.profile(judge.verdict(simulate(1.5, drift=0.15))).steps == ()


def test_order_goes_there_and_back_again() -> None:
    """Each repetition measures A B B A over every workload and concurrency."""
    plan = BenchPlan(("a", "b"), (), (1, 2))
    assert plan.steps() == ()
    assert legs(["a", "b"], 2) == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_only_the_same_benchmark_is_resumed(tmp_path: Path) -> None:
    """Blocks are added to those of the same arms, engine options and prompts; a port or an alert changes nothing."""
    path = tmp_path / "config.yaml"
    path.write_text("models: {target_model: {path: /m}}\nspeculative_decoding: {method: ngram}\n")

    def again(*overrides: str, seed: int = 0, url: str | None = None) -> Result:
        arm = ArmSpec("on", load(path, environ={}, overrides=overrides), url=url)
        chat = workload.pick(workload.builtin("chat"), 8, seed=seed)
        return fresh([arm], BenchPlan(("on",), (chat,), (1,)))

    then = Result.model_validate_json(
        again("speculative_decoding.schedule=[[1, 8, 5]]").model_dump_json()
    )
    assert (
        differences(then, again("speculative_decoding.schedule=[[1, 8, 5]]", "server.port=9000"))
        == []
    )
    rows = differences(
        again(), again("speculative_decoding.num_speculative_tokens=7", url="http://b:1")
    )
    assert rows == [
        ("on: speculative_decoding.num_speculative_tokens", "then not set", "now 7"),
        ("on: url", "then None", "now http://b:1"),
    ]
    side_by_side = again().model_copy(update={"together": True})
    assert differences(again(), side_by_side) == [("--together", "then not given", "now given")]
    ((what, _, _),) = differences(again(), again(seed=1))
    assert what == "prompts of chat"


def test_more_repeats_extend_a_benchmark() -> None:
    """A complete benchmark of one repeat lacks the second; other loads or fewer repeats are another plan."""
    done = [b.model_copy(update={"concurrency": 1}) for b in simulate().blocks]
    words = Workload(name="w", requests=(Request(id="a", prompt="x"),))
    assert BenchPlan(("off", "on"), (words,), (1,)).left(done) == ()
    left = BenchPlan(("off", "on"), (words,), (1,), repeat=2).left(done)
    assert left is not None
    assert [(s.index, s.arm) for s in left] == [(4, "off"), (5, "on"), (6, "on"), (7, "off")]
    assert BenchPlan(("off", "on"), (words,), (1, 4), repeat=2).left(done) is None
    assert BenchPlan(("off", "on"), (words,), (1,)).left([*done, *done]) is None


def test_the_report_shows_the_gpu_where_there_was_one() -> None:
    """Means of each arm's blocks, a dash for what was not told, and no section without a GPU."""
    whole = simulate(1.5)
    told = {"utilization_ratio": 0.5, "memory_used_bytes": 2.0 * 1024**3}
    blocks = [b.model_copy(update={"gpu": told}) for b in whole.blocks]
    (part,) = [
        p
        for p in report.document([judge.verdict(whole.model_copy(update={"blocks": blocks}))])
        if p.title == "GPU"
    ]
    assert part.table is not None
    assert part.table.rows[0] == ("w", "4", "off", "50.0 %", "-", "2.0 GiB")
    assert "GPU" not in [p.title for p in report.document([judge.verdict(whole)])]


@pytest.mark.parametrize("factor", [0.985, 1.0, 1.012])
def test_a_difference_of_less_than_a_twentieth_is_none(factor: float) -> None:
    """However narrow the interval, and on which side of 1 it lies: nobody turns it on for 1.00x."""
    found = [
        verdict(simulate(factor, seed=seed, prompts=64, repeat=6, block_noise=0.002))
        for seed in range(6)
    ]
    assert {cell.verdict for cell in found} <= {"no difference", "inconclusive"}


@pytest.mark.parametrize(
    "name",
    ["$a^$", r"$\frac{1}{$b", "<script>x</script>", "a|b", "_hidden", "a\nb", "\\", "${x}$", "%s"],
)
def test_a_workload_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Names are no formulas and no HTML, in pictures, Markdown and the page."""
    blocks = [b.model_copy(update={"workload": name}) for b in simulate(1.5).blocks]
    app_report.write([result(blocks)], tmp_path)
    assert "<script>" not in (tmp_path / "report.md").read_text()
    assert "<script>x" not in (tmp_path / "report.html").read_text()
