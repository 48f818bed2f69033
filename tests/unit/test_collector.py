"""What leaves the sidecar: metrics, status, page; and what feeds them: own baseline, speedup, GPU telemetry."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import types
from collections.abc import Iterable
from dataclasses import replace

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from specserve.config.schema import Settings
from specserve.engine.http.metrics import parse
from specserve.engine.inside import step_profile
from specserve.engine.inside.step_profile import Acceptance, StepProfile, StepTime
from specserve.engine.output.logs import EngineReport
from specserve.errors import ConfigError
from specserve.gpu.telemetry import GpuMeans, Telemetry, ThreadedTelemetry
from specserve.memory.calibration import reconcile
from specserve.metric_families import FAMILIES, MetricKey, key
from specserve.sidecar import baseline, speedup, status
from specserve.sidecar.baseline import QUANTITIES, Baseline
from specserve.sidecar.chart import Chart, Line, runs
from specserve.sidecar.collector import exposition
from specserve.sidecar.launch_state import LaunchState
from specserve.sidecar.observer import Observation, Observer, Point, aged
from specserve.sidecar.page import render
from specserve.sidecar.probe import CanaryOutcome, Context, Scrape
from specserve.sidecar.server import MAX_CONNECTIONS, Pages, SidecarServer
from specserve.supervise.leftovers import folders
from tests import plans
from tests.virtual_engine import VirtualEngine

SETTINGS = Settings.model_validate(
    {
        "models": {
            "target_model": {"path": "/models/target-llm"},
            "draft_model": {"path": "/models/draft-llm"},
        },
        "speculative_decoding": {"num_speculative_tokens": 3},
    }
)
RATE = key("specserve_acceptance_rate", window="5m")
SAMPLE = key("specserve_window_draft_tokens", window="5m")


def observed(
    minutes: int = 10, *, observer: Observer | None = None, engine: VirtualEngine | None = None
) -> Observation:
    """What an observer knows after some minutes of steady traffic."""
    observer, engine = observer or Observer(speculation_configured=True), engine or VirtualEngine()
    engine.running = 4
    for i in range(minutes * 12):
        engine.work(drafts=50, rates=(0.9, 0.6, 0.3), requests=2)
        engine.observe("ttft", 0.03)
        engine.observe("tpot", 0.012)
        text = engine.text(http={"2xx": 2 * i, "5xx": i // 20})
        seen = observer.observe(
            5.0 * i, 1e9 + 5.0 * i, Scrape("ok", snapshot=parse(text, at_seconds=5.0 * i))
        )
    return seen


def families(readings: dict[MetricKey, float]) -> dict[str, list]:
    """The exposition of readings, parsed."""
    text = exposition(lambda: readings, model_name="target")().decode()
    return {f.name: f.samples for f in text_string_to_metric_families(text)}


def test_every_reading_of_a_busy_engine_is_in_the_table() -> None:
    """No reading has a name or a label that the table of families does not have."""
    readings = observed().readings
    assert len(readings) > 140
    for family, labels in readings:
        assert set(dict(labels)) == set(FAMILIES[family].labels), family


def test_the_exposition_is_valid_and_says_what_is_known() -> None:
    """Counters end in _total, each sample carries the model, unknown families are absent."""
    found = families(observed().readings)
    (sample,) = [s for s in found["specserve_acceptance_rate"] if s.labels["window"] == "5m"]
    assert sample.value == pytest.approx(0.6)
    assert sample.labels == {"window": "5m", "model_name": "target"}
    assert found["specserve_draft_tokens"][0].name == "specserve_draft_tokens_total"
    assert "specserve_estimated_speedup_ratio" not in found
    assert "specserve_gpu_temperature_celsius" not in found


def test_nothing_known_is_an_empty_exposition() -> None:
    """Before the first read there is no family at all, not a page of zeros."""
    assert exposition(dict, model_name="m")() == b""


def test_a_reading_outside_the_table_is_not_exported() -> None:
    """A wrong label set would break the family for every scraper."""
    assert families({key("specserve_acceptance_rate"): 0.5, key("specserve_nonsense"): 1.0}) == {}


def test_families_have_units_and_formulas() -> None:
    """Names are lower snake case, counters end in _total, every help is one sentence."""
    for family in FAMILIES.values():
        assert re.fullmatch(r"specserve_[a-z0-9_]+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert family.help.endswith(".")
        assert family.unit


def test_observer_counts_scrapes_and_canaries() -> None:
    """Own counters: reads by result, canaries by result; the last canary's time only when it succeeded."""
    observer = Observer()
    observer.observe(0, 0, Scrape("timeout", "slow"))
    observer.canary_done(1, CanaryOutcome("failed", 0, 1, "x"))
    seen = observer.observe(5, 5, Scrape("timeout", "slow")).readings
    assert seen[key("specserve_scrapes_total", result="timeout")] == 2
    assert seen[key("specserve_canaries_total", result="failed")] == 1
    assert seen[key("specserve_canary_success")] == 0
    assert key("specserve_canary_duration_seconds") not in seen


@pytest.mark.parametrize(
    ("result", "state", "condition"),
    [
        ("malformed", "running", "blind"),
        ("unreachable", "running", "blind"),
        ("broken", "running", "blind"),
        ("unreachable", "starting", "starting"),
        ("timeout", "stopping", "draining"),
    ],
)
def test_a_blind_sidecar_exports_no_old_numbers(result: str, state: str, condition: str) -> None:
    """One failed read keeps what is known; after two the windows and gauges are gone, counters stay."""
    observer = Observer()
    observed(observer=observer)
    failed = Scrape(result, "cut off")  # type: ignore[arg-type]
    once = observer.observe(600, 1e9 + 600, failed, Context(state=state)).readings
    twice = observer.observe(605, 1e9 + 605, failed, Context(state=state)).readings
    assert RATE in once
    assert key("specserve_requests_running") in once
    assert RATE not in twice
    assert key("specserve_requests_running") not in twice
    assert (
        twice[key("specserve_draft_tokens_total")]
        == once[key("specserve_draft_tokens_total")]
        == 18_000
    )
    assert twice[key("specserve_engine_condition", condition=condition)] == 1


@pytest.mark.parametrize(
    ("age", "verdicts", "condition"),
    [
        (45, (1, 1, 1), "progressing"),
        (46, (1, 1, 0), "blind"),
        (600, (1, 1, 0), "blind"),
        (601, (1, 0, 0), "blind"),
    ],
)
def test_verdicts_age(age: float, verdicts: tuple[int, int, int], condition: str) -> None:
    """A sidecar that stands still: not ready after three looks of 15 s, not alive after ten minutes; no old numbers."""
    seen = aged(observed(), age, 15)
    assert seen is not None
    assert (
        tuple(seen.readings[key(f"specserve_{name}")] for name in ("started", "live", "ready"))
        == verdicts
    )
    assert (
        seen.assessment.started.ok,
        seen.assessment.live.ok,
        seen.assessment.ready.ok,
    ) == verdicts
    assert seen.assessment.condition == condition
    assert (RATE in seen.readings) is (condition != "blind")
    before = aged(None, age, 15)
    assert before is None or (before.assessment.live.ok, before.assessment.ready.ok) == (
        age < 601,
        False,
    )


def test_a_read_that_fails_right_after_the_first_canary_keeps_what_is_known() -> None:
    """The canary's own token is counted from the next good read on."""
    observer = Observer()
    observed(observer=observer)
    observer.canary_done(600, CanaryOutcome("ok", 599, 1))
    seen = observer.observe(600, 1e9 + 600, Scrape("timeout", "slow")).readings
    assert seen[key("specserve_requests_per_second", window="1m")] == pytest.approx(0.4)


def test_what_the_start_up_canary_drafts_is_no_traffic() -> None:
    """When the supervisor calls the engine ready, the windows begin."""
    observer, engine = Observer(), VirtualEngine()

    def read(at: float, state: str) -> dict[MetricKey, float]:
        snapshot = parse(engine.text(), at_seconds=at)
        return observer.observe(
            at, at, Scrape("ok", snapshot=snapshot), Context(state=state)
        ).readings

    read(0, "starting")
    engine.work(drafts=100, rates=(1.0, 1.0, 1.0))
    read(5, "running")
    engine.work(drafts=100, rates=(0.3, 0.0, 0.0))
    assert read(10, "running")[key("specserve_acceptance_rate", window="1m")] == pytest.approx(0.1)


def test_one_rank_that_hangs_is_seen_among_many() -> None:
    """Its own time since progress grows; that of a rank that works is zero, of one without work absent."""
    observer, ranks = Observer(), [VirtualEngine(engine=str(i)) for i in range(3)]
    for rank, running in zip(ranks, (4, 4, 0), strict=True):
        rank.running = running
    for i in range(5):
        ranks[0].work(plain=10)
        text = "".join(rank.text(start=None) for rank in ranks)
        seen = observer.observe(
            5.0 * i, 5.0 * i, Scrape("ok", snapshot=parse(text, at_seconds=5.0 * i))
        ).readings
    since = [
        seen.get(key("specserve_engine_seconds_since_progress", engine=str(i))) for i in range(3)
    ]
    assert since == [0, 20, None]


def learn(baseline: Baseline, hours: Iterable[float], rate: float, samples: float = 5000) -> None:
    """A point every five minutes at these hours."""
    for hour in hours:
        baseline.observe(hour * 3600, {RATE: rate, SAMPLE: samples})


def hours(start: float, end: float) -> list[float]:
    """Every five minutes from one hour to another."""
    return [start + i / 12 for i in range(round((end - start) * 12))]


def test_a_baseline_is_learned_and_does_not_learn_a_drop() -> None:
    """Half a day at 0.7 makes 0.7; a drop to 0.4 shows as drift as long as the memory lasts, then is normal."""
    own = Baseline()
    learn(own, hours(0, 12), 0.7)
    assert own.reference(QUANTITIES[0], 12 * 3600) == 0.7
    learn(own, hours(12, 20), 0.4)
    seen = own.readings(20 * 3600, {RATE: 0.4}, ["5m"])
    assert seen[key("specserve_acceptance_rate_baseline")] == 0.7
    assert seen[key("specserve_acceptance_rate_drift", window="5m")] == pytest.approx(-0.3)
    learn(own, hours(20, 40), 0.4)
    assert own.reference(QUANTITIES[0], 40 * 3600) == 0.4


def test_a_baseline_needs_enough_settled_points_and_traffic() -> None:
    """Twenty minutes are no past; a window with few drafts is no point; idle nights are no points."""
    own = Baseline()
    learn(own, hours(0, 0.3), 0.7)
    assert own.readings(0.3 * 3600, {RATE: 0.7}, ["5m"]) == {}
    learn(own, hours(1, 5), 0.1, samples=50)
    assert own.reference(QUANTITIES[0], 5 * 3600) is None


def test_a_baseline_is_bounded() -> None:
    """A week of points keeps one day, and none of a clock that was a year ahead."""
    own = Baseline()
    learn(own, hours(24 * 365, 24 * 365 + 1), 0.9)
    learn(own, hours(0, 24 * 7), 0.7)
    assert 260 < len(own.points["specserve_acceptance_rate"]) <= 289
    assert own.reference(QUANTITIES[0], 24 * 7 * 3600) == 0.7


def test_the_baseline_has_a_folder_without_a_home(tmp_path) -> None:
    """A user without a home keeps it in the temp folder."""
    assert folders({"XDG_STATE_HOME": str(tmp_path)}).state == tmp_path / "specserve"
    assert folders({"TMPDIR": str(tmp_path)}).state == tmp_path / f"specserve-{os.getuid()}"


def store(folder) -> baseline.Store:
    """The files of a pair and of a target."""
    return baseline.Store(folder / "baseline.json", folder / "traffic.json")


def test_a_baseline_survives_a_restart_and_a_broken_file(tmp_path, caplog) -> None:
    """Written whole, read back; a file that is no baseline is said and ignored; another pair has another file."""
    kept = store(tmp_path / "deep")
    own = Baseline()
    learn(own, hours(0, 2), 0.7)
    kept.save(own)
    assert {name: p for name, p in kept.load().points.items() if p} == {
        name: p for name, p in own.points.items() if p
    }
    assert sorted(p.name for p in kept.pair.parent.iterdir()) == ["baseline.json", "traffic.json"]
    for text in ("{", "[]", '{"points": {"a": [1]}}'):
        kept.pair.write_text(text)
        assert "specserve_acceptance_rate" not in kept.load().points
    assert store(tmp_path / "none").load().points == {}
    store(tmp_path / "deep" / "baseline.json" / "x" / "y").save(own)
    (tmp_path / "taken" / "baseline.json").mkdir(parents=True)
    (tmp_path / "taken" / "baseline.json" / "a").touch()
    store(tmp_path / "taken").save(own)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "taken"]
    other = SETTINGS.model_copy(
        update={
            "speculative_decoding": SETTINGS.speculative_decoding.model_copy(
                update={"num_speculative_tokens": 5}
            )
        }
    )
    mine, theirs = (baseline.Store.of(s, tmp_path) for s in (SETTINGS, other))
    assert mine.pair != theirs.pair
    assert mine.target == theirs.target


def test_what_depends_on_the_requests_survives_another_method(tmp_path) -> None:
    """Prefix hits and lengths are the target's, acceptance is the pair's."""
    hits, rate = "specserve_prefix_cache_hit_ratio", "specserve_acceptance_rate"
    before = baseline.Store(tmp_path / "eagle.json", tmp_path / "traffic.json")
    before.save(Baseline({hits: [(0.0, 0.6)], rate: [(0.0, 0.7)]}))
    after = baseline.Store(tmp_path / "mtp.json", tmp_path / "traffic.json")
    assert after.load().points == {hits: [(0.0, 0.6)]}


def test_the_form_of_a_baseline_file_stays(tmp_path) -> None:
    """What an earlier version kept is read, and what is written now is the same: bare family names, no labels."""
    kept = store(tmp_path)
    text = (
        '{"version": 1, "points": {"specserve_acceptance_rate": [[1000.0, 0.7], [1300.0, 0.71]]}}'
    )
    kept.pair.write_text(text)
    own = kept.load()
    assert own.points == {"specserve_acceptance_rate": [(1000.0, 0.7), (1300.0, 0.71)]}
    kept.save(own)
    assert kept.pair.read_text() == text


def profile(*cells: tuple[float, float, float, int]) -> StepProfile:
    names = (
        "concurrency",
        "baseline_step_seconds",
        "speculative_step_seconds",
        "num_speculative_tokens",
    )
    rows = [dict(zip(names, c, strict=True)) for c in cells]
    return step_profile.parse(json.dumps({"version": 1, "cells": rows}))


@pytest.mark.parametrize(
    ("running", "speed", "break_even"),
    [
        (1, 2.8 / 1.2, 0.04),
        (4, 2.8 / 1.2, 0.04),
        (10, 2.8 / 1.6, 0.12),
        (16, 2.8 / 2.0, 0.2),
        (17, None, None),
        (0, None, None),
    ],
)
def test_speedup_and_break_even_at_the_batch_size(
    running: float, speed: float | None, break_even: float | None
) -> None:
    """Linear between measured batch sizes, constant below, unknown beyond and while nothing runs."""
    known = {
        key("specserve_requests_running"): running,
        key("specserve_tokens_per_step", window="5m"): 2.8,
        key("specserve_acceptance_rate", window="5m"): 0.36,
    }
    seen = speedup.readings(profile((4, 0.010, 0.012, 5), (16, 0.010, 0.020, 5)), known, ["5m"])
    assert seen.get(key("specserve_break_even_acceptance_rate")) == (
        break_even and pytest.approx(break_even)
    )
    assert seen.get(key("specserve_estimated_speedup_ratio", window="5m")) == (
        speed and pytest.approx(speed)
    )
    if break_even:
        assert seen[key("specserve_break_even_margin", window="5m")] == pytest.approx(
            0.36 - break_even
        )


def test_the_profile_of_the_benchmark_is_read() -> None:
    """Sidecar and benchmark mean the same break-even, also when not every step drafts, and version
    1 of the file says the same as version 2."""
    steps = (StepTime(4, 0, 1, 0.010), StepTime(4, 5, 3.0, 0.013))
    written = StepProfile(steps, (Acceptance("chat", (0.8, 0.5)),), "ngram", 5, "vllm 0.32.0")
    cell = {
        "concurrency": 4,
        "baseline_step_seconds": 0.010,
        "speculative_step_seconds": 0.013,
        "num_speculative_tokens": 5,
        "draft_tokens_per_step": 2.0,
        "break_even_acceptance": 0.15,
    }
    first = step_profile.parse(json.dumps({"version": 1, "created": "", "cells": [cell]}))
    second = step_profile.parse(json.dumps(written.as_dict()))
    assert second == written
    for read in (first, second):
        seen = speedup.readings(read, {key("specserve_requests_running"): 4}, [])
        assert seen == {key("specserve_break_even_acceptance_rate"): pytest.approx(0.15)}


def test_no_break_even_where_no_acceptance_pays() -> None:
    """A step that takes longer than all its drafts could bring has no break-even; the margin says
    how far it is from one."""
    known = {
        key("specserve_requests_running"): 4,
        key("specserve_tokens_per_step", window="5m"): 4.5,
        key("specserve_acceptance_rate", window="5m"): 0.7,
    }
    seen = speedup.readings(profile((4, 0.010, 0.080, 5)), known, ["5m"])
    assert key("specserve_break_even_acceptance_rate") not in seen
    assert seen[key("specserve_break_even_margin", window="5m")] == pytest.approx(0.7 - 1.4)


def test_the_margin_goes_by_the_measured_time_per_token_where_there_is_one() -> None:
    """0.5 accepted pays at the benchmark's step times; at twice the time of a plain token it does not."""
    known = {
        key("specserve_requests_running"): 4.0,
        key("specserve_tokens_per_step", window="5m"): 2.5,
        key("specserve_acceptance_rate", window="5m"): 0.5,
    }
    tpot = key("specserve_time_per_output_token_seconds", stat="mean", window="5m")
    margin = key("specserve_break_even_margin", window="5m")
    own = profile((4, 0.010, 0.012, 3))
    assert speedup.readings(own, known, ["5m"])[margin] > 0
    assert speedup.readings(own, {**known, tpot: 0.005}, ["5m"])[margin] > 0
    assert speedup.readings(own, {**known, tpot: 0.020}, ["5m"])[margin] < 0


def test_without_a_profile_nothing_is_estimated() -> None:
    """And a profile that is none is a config error that names the place."""
    assert speedup.readings(None, {key("specserve_requests_running"): 4}, ["5m"]) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"version": 3, "cells": []}', "version"),
        ('{"version": 1, "cells": []}', "cells"),
        ('{"version": 1, "cells": [{"concurrency": 1}]}', "cells.0.num_speculative_tokens"),
        ('{"version": 2, "cells": []}', "steps"),
        ('{"version": 2, "steps": [{"batch": -1}]}', "steps.0.batch"),
        ('{"version": 2, "steps": [{"batch": true}]}', "steps.0.batch"),
        ('{"version": 2, "steps": [{"batch": 1e999}]}', "steps.0.batch"),
    ],
)
def test_a_profile_that_is_none(tmp_path, text: str, says: str) -> None:
    """Each mistake is a config error with the file's name."""
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        speedup.load(path)
    with pytest.raises(ConfigError, match="cannot read"):
        speedup.load(tmp_path / "missing.json")


class Nvml:
    """NVML's functions over a recorded machine: two devices, the second without power and ECC."""

    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_VOLATILE_ECC = 0, 1, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver: bool = True) -> None:
        self.driver = driver

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}abc".encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA L4"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=18 * 2**30, total=24 * 2**30)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 71

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, threshold: int) -> int:
        return 92

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise self.NVMLError
        return 54_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 72_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x4 | 0x40

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        if handle:
            raise self.NVMLError
        return 3 if kind == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=4242)] if handle else []


def test_gpu_telemetry_of_the_devices_in_use() -> None:
    """Base units and ratios; throttling by reason; every sample belongs to the table."""
    seen = Telemetry(Nvml(), visible="0", count=1).readings()
    assert seen[key("specserve_gpu_utilization_ratio", gpu="0")] == 0.87
    assert seen[key("specserve_gpu_memory_used_ratio", gpu="0")] == 0.75
    assert seen[key("specserve_gpu_power_watts", gpu="0")] == 54
    assert seen[key("specserve_gpu_power_ratio", gpu="0")] == 0.75
    assert seen[key("specserve_gpu_ecc_errors_total", gpu="0", type="uncorrected")] == 3
    assert [
        seen[key("specserve_gpu_throttled", gpu="0", reason=r)]
        for r in ("power", "thermal", "hardware")
    ] == [
        1,
        1,
        0,
    ]
    assert not any(("gpu", "1") in labels for _, labels in seen)
    assert all(set(dict(labels)) == set(FAMILIES[family].labels) for family, labels in seen)


def test_gpu_in_use_is_where_the_engine_computes() -> None:
    """The engine's process decides; what its device cannot tell is left out."""
    seen = Telemetry(Nvml(), visible=None, count=1).readings({4242})
    assert {dict(labels)["gpu"] for _, labels in seen} == {"1"}
    assert key("specserve_gpu_power_watts", gpu="1") not in seen
    assert key("specserve_gpu_power_ratio", gpu="1") not in seen
    assert seen[key("specserve_gpu_processes", gpu="1")] == 1


def test_means_over_a_stretch_of_time() -> None:
    """Amounts are summed over devices, shares averaged; a figure that a device does not tell is left out."""
    telemetry = Telemetry(Nvml(), visible=None, count=2)
    now = telemetry.readings()
    with GpuMeans(telemetry, interval_seconds=0.01) as means:
        pass
    used = [v for k, v in now.items() if k.family == "specserve_gpu_memory_used_bytes"]
    assert means.result is not None
    assert means.result["memory_used_bytes"] == sum(used)
    assert means.result["power_watts"] == now[key("specserve_gpu_power_watts", gpu="0")]
    with GpuMeans(None) as nothing:
        pass
    assert nothing.result is None


def test_a_driver_that_hangs_holds_up_nobody() -> None:
    """The last readings stand for a while, then there are none; when it answers again, there are new ones."""
    stuck, answers, now = threading.Event(), threading.Event(), 0.0

    class Stuck(Nvml):
        def nvmlDeviceGetUtilizationRates(self, handle: int) -> types.SimpleNamespace:
            if stuck.is_set():
                answers.wait(60)
            return super().nvmlDeviceGetUtilizationRates(handle)

    telemetry = Telemetry(Stuck(), visible="0", count=1)
    gpu = ThreadedTelemetry(telemetry, kept_seconds=30, wait_seconds=60, clock=lambda: now)
    known = gpu.readings()
    assert known == telemetry.readings()
    stuck.set()
    gpu = ThreadedTelemetry(telemetry, kept_seconds=30, wait_seconds=0.01, clock=lambda: now)
    gpu._last = (0.0, known)
    assert gpu.readings() == known
    now = 31.0
    assert gpu.readings() == {}
    answers.set()
    while gpu.readings() != known:
        time.sleep(0.01)


def test_no_gpu_no_families() -> None:
    """Without a driver, and with a selection that names no device, nothing is said."""
    assert Telemetry(Nvml(driver=False), visible=None, count=1).readings() == {}
    assert Telemetry(Nvml(), visible="", count=1).readings() == {}


def test_slow_clients_shut_out_no_probe() -> None:
    """More connections than there are slots, each with a request that never ends: a probe is answered all the same."""
    server = SidecarServer("127.0.0.1", 0, Pages(bytes, dict, lambda _: {"ok": True}, str))
    server.start()
    slow = []
    try:
        for _ in range(MAX_CONNECTIONS + 8):
            slow.append(socket.create_connection(server.server_address[:2]))
            slow[-1].sendall(b"GET /livez HTTP/1.1\r\nX: ")
        for _ in range(5):
            assert requests.get(server.url + "/livez", timeout=60).json() == {"ok": True}
        assert len(server._open) <= MAX_CONNECTIONS
    finally:
        for connection in slow:
            connection.close()
        server.stop()


def answer(observation: Observation | None, state: LaunchState | None = None) -> dict:
    """What /status says, as JSON."""
    found = status.build(
        SETTINGS,
        "http://127.0.0.1:8000",
        observation,
        state or LaunchState(),
        method=SETTINGS.method,
        age_seconds=1.0,
    )
    return json.loads(json.dumps(found))


def test_status_tells_windows_verdicts_and_the_plan() -> None:
    """Windows by label, latencies by statistic, and where the engine's memory is not what was planned."""
    gpu = {
        "kv_cache_tokens": 1000,
        "kv_cache_bytes": 100,
        "target_weights_bytes": 60,
        "draft_weights_bytes": 40,
    }
    plan = plans.plan(requests=2.0, **gpu)
    said = EngineReport(kv_cache_tokens=800, available_kv_bytes=105)
    state = LaunchState(Context("running"), plan=plan.as_dict(), reported=said)
    state = replace(state, reconciliation=reconcile(plan, said).as_dict())
    seen = answer(observed(), state)
    assert seen["actual"] == {"available_kv_bytes": 105, "kv_cache_tokens": 800}
    assert (seen["state"], seen["plan"]["fits"]) == ("running", plan.fits)
    assert seen["windows"]["5m"]["acceptance_rate"] == pytest.approx(0.6)
    assert seen["windows"]["5m"]["time_to_first_token_seconds"]["p50"] == pytest.approx(0.03)
    assert seen["ready"]["ok"]
    assert seen["now"]["requests_running"] == 4
    tokens = seen["plan_against_actual"]["kv_cache_tokens"]
    assert tokens == {"planned": 1000, "measured": 800, "difference_ratio": 0.25}


def test_status_before_the_first_read() -> None:
    """Alive, not ready, and it says why."""
    seen = answer(None)
    assert (seen["condition"], seen["live"]["ok"], seen["ready"]["ok"]) == ("starting", True, False)


def test_the_page_is_self_contained_and_escapes() -> None:
    """No script, no foreign address, and a model's name cannot become markup."""
    observer = Observer()
    observation = observed(observer=observer)
    found = {**answer(observation), "model_name": "<script>alert(1)</script>"}
    found["alerts"] = [
        {
            "name": "A<b>",
            "severity": "critical",
            "state": "firing",
            "summary": "s&",
            "description": "d",
            "labels": {"gpu": "0"},
            "causes": ["<i>heat</i>"],
            "runbook_url": 'docs/"A.md',
            "started_at": 1e9 + 480,
            "inhibited_by": None,
        }
    ]
    text = render(found, tuple(observer.history), refresh_seconds=5, now=1e9 + 600)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "A&lt;b&gt;" in text
    assert "critical · firing · for 2 min · gpu 0" in text
    assert "Likely: &lt;i&gt;heat" in text
    assert not re.search(r"(src|href)=", text)
    assert not re.search(r"url\(|@import|https?://", text)
    assert text.count("<svg") == 4


def test_a_hole_in_what_is_known_is_a_hole_in_the_line() -> None:
    """Unknown is neither zero nor a straight line across."""
    points = [
        Point(at, {} if rate is None else {RATE: rate})
        for at, rate in ((0, 0.5), (15, 0.6), (30, None), (45, 0.7), (900, 0.8))
    ]
    assert runs(points, RATE) == [[(0, 0.5), (15, 0.6)], [(45, 0.7)], [(900, 0.8)]]
    assert "nothing known yet" in Chart("T", (Line("a", "a", SAMPLE),), str).html(points, 900)
