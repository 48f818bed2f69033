"""States provoked by their cause get that cause first; healthy servers get nothing."""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from specserve import cli
from specserve.alert.builtin import definitions
from specserve.alert.causes import CauseName
from specserve.app.doctor import from_server, from_status
from specserve.app.doctor.report import STEPS, DoctorReport
from specserve.app.doctor.rules import PLACES
from specserve.app.doctor.run import AskedSidecar, Given, run
from specserve.config.load import load
from specserve.config.schema import Settings
from specserve.engine.canary.run import CanaryResult
from specserve.engine.http.client import EngineClient
from specserve.engine.http.metrics import parse
from specserve.engine.installed import introspect
from specserve.engine.output.failures import signs
from specserve.engine.output.stated import Held
from specserve.sidecar import status
from specserve.sidecar.launch_state import LaunchState
from specserve.sidecar.observer import Observer
from specserve.sidecar.presentation import StatusJson
from specserve.sidecar.probe import Context, Scrape
from tests import checkpoints as make
from tests import doctor_states as states
from tests.doctor_states import READY, LogState, texts, worked
from tests.metrics_server import played
from tests.pairs import PAIRS, Pair
from tests.virtual_engine import VirtualEngine

HOUR_LATER = 4600.0
"""Unix time of the tests: the virtual engines started at 1000."""
ASLEEP = worked()
ASLEEP.awake = 0
STARVED = worked(running=0, waiting=4)


def doctor(*arguments: str) -> int:
    """The exit code of ``specserve doctor``."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@contextmanager
def serving(texts: Sequence[str], *, status: int = 200, owner: str = "vllm") -> Iterator[str]:
    """The address of a server with these metrics, one after another."""
    with played() as server:
        server.says("/metrics", *texts, status=status)
        server.owned_by(owner)
        yield server.url


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in which the installed vLLM has answered nothing, so that no test waits for it to be asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    installed = introspect.installed()
    if installed is not None:
        file = introspect.cache_file(installed, os.environ)
        file.parent.mkdir(parents=True)
        file.write_text('{"unanswered": {}}')


def examined(given: Given) -> DoctorReport:
    """The report, without the pause between two reads."""
    return run(given, environ=os.environ, wall=lambda: HOUR_LATER, sleep=lambda _: None)


def first(report: DoctorReport) -> str | None:
    """The code of the first cause."""
    if report.first is None:
        return None
    return report.first.name


def log(folder: Path, lines: Sequence[str]) -> Path:
    """A log file."""
    path = folder / "engine.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def config(folder: Path, **spec: Any) -> Path:
    """A config with a pair that fits; ``spec`` changes speculative_decoding."""
    make.write(folder / "target", make.llama())
    make.write(folder / "draft", make.small_llama())
    body = {
        "models": {
            "target_model": {"path": str(folder / "target")},
            "draft_model": {"path": str(folder / "draft")},
        },
        "speculative_decoding": {"num_speculative_tokens": 3, **spec},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


ALL_LOGS = [*states.recorded(), *states.REPORTED, *states.OTHER_LOGS]


@pytest.mark.parametrize("state", ALL_LOGS, ids=lambda s: s.name)
def test_log_alone(state: LogState, tmp_path: Path) -> None:
    """A log by itself yields the cause, its step, and something to type."""
    report = examined(Given(log=log(tmp_path, state.lines)))
    assert report.first is not None
    assert (report.first.name, report.first.step) == (state.code, state.step)
    assert report.first.fix
    assert report.first.evidence


def test_enough_states_come_from_public_reports() -> None:
    """At least fifteen states are public reports, each with its thread."""
    threads = {state.source for state in states.REPORTED}
    assert len(threads) >= 15
    assert all("#" in source for source in threads)


ONE_CODE = [
    pair
    for pair in PAIRS
    if len(pair.expect) == 1 and pair.name in {
        "ids-swapped", "padding", "tool-token", "prefix-space", "eagle-other-width", "eagle-narrow-fc", "eagle-no-fc",
    }
]  # fmt: skip


@pytest.mark.parametrize("pair", ONE_CODE, ids=lambda p: p.name)
def test_config_alone(pair: Pair, tmp_path: Path) -> None:
    """A config by itself yields what the check finds in its pair."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(pair.write(tmp_path)), encoding="utf-8")
    report = examined(Given(loaded=load(path, environ={})))
    assert {first(report)} == pair.expect
    assert report.first is not None
    assert report.first.step == "vocabulary"


def test_a_pair_that_does_not_fit_the_gpu(tmp_path: Path) -> None:
    """Memory that is short is a cause of the step of memory, with the plan's way out."""
    loaded = load(
        config(tmp_path),
        environ={},
        overrides=("hardware.gpu_memory_gib=0.3", "hardware.gpu_count=1"),
    )
    report = examined(Given(loaded=loaded))
    assert report.first is not None
    assert (report.first.step, report.first.confidence) == ("memory", "proven")


@dataclass(frozen=True)
class ServerState:
    """What an engine reports, and the first cause."""

    name: str
    reads: list[str]
    code: str | None
    owner: str = "vllm"
    status: int = 200


def preempting() -> list[str]:
    """An engine whose cache is full while requests come."""
    engine = worked(kv_usage=0.99, running=40, waiting=10)
    out = []
    for _ in range(3):
        out.append(engine.text())
        engine.counters["num_preemptions"] += 3
        engine.counters["generation_tokens"] += 40
    return out


def spread() -> list[str]:
    """Two engines, of which one accepts little."""
    good, bad = worked((0.9, 0.8, 0.75)), worked((0.5, 0.3, 0.2))
    bad.engine = "1"
    return [read + bad.text(start=None) for read in texts(good)]


def fell() -> list[str]:
    """An engine whose drafts were good and are now for other texts."""
    engine = worked(drafts=100_000, requests=3000)
    out = []
    for _ in range(3):
        out.append(engine.text())
        engine.work(drafts=60, rates=(0.5, 0.2, 0.1))
    return out


CLIFF = (0.9, 0.7, 0.5, 0.2, 0.05, 0.0, 0.0)
SERVERS = [
    ServerState("low-acceptance", texts(worked((0.45, 0.2, 0.1))), "AcceptanceRateLow"),
    # vllm-project/vllm#55605: position 0 at 2.4 % or less
    ServerState("collapsed", texts(worked((0.024, 0.01, 0.0))), "AcceptanceCollapsed"),
    # vllm-project/vllm#42004: 0.600, 0.385, 0.215, 0.108, 0.062, 0, 0 ...
    ServerState("cliff", texts(worked((0.6, 0.385, 0.215, 0.108, 0.062, 0.0, 0.0))), "DraftPositionsWasted"),
    ServerState("too-long", texts(worked(CLIFF)), "DraftPositionsWasted"),
    ServerState("one-position-lost", texts(worked((0.95, 0.9, 0.85, 0.04))), "DraftPositionsWasted"),
    ServerState("spread", spread(), "AcceptanceSpread"),
    # vllm-project/vllm#39863: requests pile up, /health answers
    ServerState("frozen", texts(worked(running=5), moves=False), "EngineStalled"),
    ServerState("starved", texts(STARVED, moves=False), "EngineStarved"),
    ServerState("preempting", preempting(), "preemptions"),
    ServerState("full-cache", texts(worked(kv_usage=0.97)), "KVCachePressure"),
    ServerState("backlog", texts(worked(waiting=90)), "QueueBacklog"),
    ServerState("errors", texts(worked(), http={"200": 80, "500": 20}), "ErrorShareHigh"),
    ServerState("asleep", texts(ASLEEP), "asleep"),
    ServerState("no-metrics", [""], "MetricsBlind", status=404),
    ServerState("cut-off", ["vllm:num_requests_running{engine=\"0\"} 1.0"], "MetricsBlind"),
    ServerState("another-server", ["<html>hello</html>\n"], "not-vllm", owner="someone"),
    ServerState("acceptance-fell", fell(), "worse-than-usual"),
]  # fmt: skip


@pytest.mark.parametrize("state", SERVERS, ids=lambda s: s.name)
def test_url_alone(state: ServerState) -> None:
    """An engine's address by itself yields the cause, with numbers."""
    with serving(state.reads, status=state.status, owner=state.owner) as url:
        report = examined(Given(client=EngineClient(url)))
    assert first(report) == state.code
    assert report.first is not None
    assert report.first.fix


def test_nothing_listens() -> None:
    """An address where nobody listens is the finding, not an error of the doctor's."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    report = examined(Given(client=EngineClient(f"http://127.0.0.1:{port}")))
    assert first(report) == "not-listening"
    assert "nothing listens at" in report.conclusion


def test_speculation_that_the_engine_does_not_run(tmp_path: Path) -> None:
    """A config with a method and an engine without its counters: speculation is off (vllm-project/vllm#25250)."""
    with serving(texts(worked(()))) as url:
        given = Given(loaded=load(config(tmp_path), environ={}), client=EngineClient(url))
        report = examined(given)
    assert first(report) == "SpeculationInactive"
    assert report.first is not None
    assert report.first.confidence == "proven"


def test_drafts_that_never_come(tmp_path: Path) -> None:
    """Counters at zero while tokens are made: nothing is drafted."""
    engine = VirtualEngine(positions=3, running=1)
    engine.work(plain=5000, requests=20)
    with serving(texts(engine)) as url:
        given = Given(loaded=load(config(tmp_path), environ={}), client=EngineClient(url))
        report = examined(given)
    assert first(report) == "SpeculationInactive"


def profile(folder: Path, *costs: tuple[float, float], tokens: int = 3) -> Path:
    """A benchmark profile: running requests and what a step then costs."""
    cells = [
        {
            "concurrency": running,
            "baseline_step_seconds": 0.01,
            "speculative_step_seconds": 0.01 * cost,
            "num_speculative_tokens": tokens,
        }
        for running, cost in costs
    ]
    path = folder / "profile.json"
    path.write_text(json.dumps({"version": 1, "cells": cells}), encoding="utf-8")
    return path


def test_load_beyond_break_even(tmp_path: Path) -> None:
    """Many requests at once and middling acceptance: below break-even (vllm-project/vllm#19254)."""
    with serving(texts(worked((0.75, 0.5, 0.35), running=300))) as url:
        path = profile(tmp_path, (1, 1.1), (400, 3.5))
        report = examined(Given(client=EngineClient(url), profile=path))
    assert first(report) == "BelowBreakEven"
    assert report.first is not None
    assert report.first.step == "speed"


def test_a_draft_that_can_never_pay(tmp_path: Path) -> None:
    """A profile by itself shows a draft that costs more than full acceptance brings."""
    report = examined(Given(profile=profile(tmp_path, (1, 4.5), (8, 6.0))))
    assert first(report) == "draft-too-slow"
    good = examined(Given(profile=profile(tmp_path, (1, 1.2), (8, 6.0))))
    assert good.first is None


def asked(
    *, state: LaunchState | None = None, engine: VirtualEngine | None = None, **changes: Any
) -> StatusJson:
    """What a sidecar says of a server that works, with changes."""
    settings = Settings.model_validate(
        {"models": {"target_model": {"path": "m"}}, "speculative_decoding": {"method": "mtp"}}
    )
    observer = Observer(speculation_configured=True)
    made = engine or worked()
    for number in range(4):
        snapshot = parse(made.text(), at_seconds=100.0 * number)
        made.work(drafts=900, rates=(0.85, 0.75, 0.65), requests=30)
        seen = observer.observe(
            100.0 * number, 100.0 * number, Scrape("ok", snapshot=snapshot), Context("running")
        )
    found = status.build(
        settings, "http://e", seen, state or LaunchState(), method=settings.method, age_seconds=1
    )
    found.update(changes)  # type: ignore[typeddict-item]
    return found


def alert(name: str, state: str = "firing", inhibited_by: str | None = None) -> dict[str, Any]:
    """An alert as /status has it."""
    made = next(d for d in definitions() if d.name == name)
    return {
        "name": name, "severity": made.severity, "value": 0.1, "summary": made.summary, "description": "value 0.1",
        "runbook_url": None, "started_at": 1.0, "ended_at": None, "causes": list(made.causes), "state": state,
        "reason": "the condition is met", "labels": {}, "inhibited_by": inhibited_by,
    }  # fmt: skip


CORRUPT = CanaryResult("corrupt", ("greedy text leaves the target's choices",))
STATUSES: list[tuple[str, dict[str, Any], str]] = [
    ("drift", {"alerts": [alert("AcceptanceDrift")]}, "AcceptanceDrift"),
    # vllm-project/vllm#47087: endless loops to max_tokens
    ("cut-at-max-tokens", {"alerts": [alert("LengthFinishJump")]}, "LengthFinishJump"),
    ("collapse-and-what-follows", {"alerts": [alert("AcceptanceRateLow", inhibited_by="AcceptanceCollapsed"),
                                              alert("AcceptanceCollapsed")]}, "AcceptanceCollapsed"),
    ("hot", {"alerts": [alert("GPUThrottled")]}, "GPUThrottled"),
    ("mismatch-first", {"alerts": [alert("KVCachePressure"), alert("SpecOutputMismatch")]}, "SpecOutputMismatch"),
    ("prefix", {"alerts": [alert("PrefixHitDrop", "pending")]}, "PrefixHitDrop"),
    ("corrupt-while-serving", {"state": LaunchState(comparison=CORRUPT)}, "SpecOutputMismatch"),
    # vllm-project/vllm#11126: acceptance about 0.068
    ("ineffective", {"state": LaunchState(canary=CanaryResult("ineffective", ("6.8 % of drafts",)))}, "DraftHeadIneffective"),
    ("not-as-asked", {"state": LaunchState(held=(Held("engine.kv_cache_dtype", "fp8", "auto"),))}, "not-as-asked"),
    ("explained", {"alerts": [alert("AcceptanceRateLow")], "causes": [
        {"name": "traffic_mix", "symptom": "acceptance", "summary": "other requests", "supports": ["prompts 3 times as long"], "against": []}]},
     "traffic_mix"),
    ("not-ready", {"ready": {"ok": False, "reason": "starting"}}, "not-ready"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "code"), STATUSES, ids=[s[0] for s in STATUSES])
def test_sidecar_alone(name: str, changes: dict[str, Any], code: str) -> None:
    """A sidecar by itself yields what it has seen."""
    report = examined(Given(sidecar=AskedSidecar("http://s", asked(**changes))))
    assert first(report) == code, name


def test_a_log_that_differs_from_the_config(tmp_path: Path) -> None:
    """What the engine says it runs is held against the config."""
    line = (
        "INFO 11-29 23:01:02 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='m', "
        "speculative_config=None, max_seq_len=4096, kv_cache_dtype=auto, seed=0"
    )
    path = log(tmp_path, [READY[0], line, *READY[1:]])
    report = examined(Given(loaded=load(config(tmp_path), environ={}), log=path))
    assert first(report) == "not-as-asked"
    assert "speculative_decoding.method" in report.conclusion


def old() -> list[str]:
    """An engine of 0.11, with several names for one thing."""
    return texts(worked(), style="0.11")


def two_ranks() -> list[str]:
    """Two engines that accept alike."""
    one, other = worked(), worked((0.8, 0.7, 0.6))
    other.engine = "1"
    out = []
    for _ in range(3):
        out.append(one.text() + other.text(start=None))
        one.counters["generation_tokens"] += 5
        other.counters["generation_tokens"] += 5
    return out


HEALTHY = {
    "busy": texts(worked(running=30, waiting=3, kv_usage=0.7)),
    "idle": texts(worked(running=0), moves=False),
    "fresh": texts(VirtualEngine(), moves=False),
    "one-token": texts(worked((0.8,))),
    "without-speculation": texts(worked(())),
    "little-traffic": texts(worked((0.2, 0.1, 0.0), drafts=20, requests=2)),
    "old-version": old(),
    "two-ranks": two_ranks(),
    "some-client-errors": texts(worked(), http={"200": 95, "400": 5}),
    "few-preemptions": texts(worked(requests=1000)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_server(name: str) -> None:
    """A healthy server gets "nothing found" and no advice."""
    with serving(HEALTHY[name]) as url:
        report = examined(Given(client=EngineClient(url)))
    assert report.first is None
    assert report.conclusion.startswith("nothing found")
    assert all(not step.causes for step in report.steps)


def test_healthy_from_every_side(tmp_path: Path) -> None:
    """Config, log, sidecar, profile and engine of one server that works: nothing found."""
    path = log(tmp_path, [*READY[:-1], "ValueError: a client sent nonsense", READY[-1]])
    with serving(HEALTHY["busy"]) as url:
        report = examined(
            Given(
                load(config(tmp_path), environ={}),
                EngineClient(url),
                AskedSidecar("http://s", asked()),
                path,
                profile(tmp_path, (1, 1.1), (64, 1.5)),
            )
        )
    assert report.causes == ()


def test_a_sidecar_that_does_not_answer_is_no_cause() -> None:
    """It is said, and nothing is concluded from it."""
    report = examined(Given(sidecar=AskedSidecar("http://s", "Connection refused")))
    assert report.first is None
    assert report.steps[0].facts == ("no sidecar answers at http://s: Connection refused",)
    assert {step.state for step in report.steps} == {"not looked at"}


def test_every_alert_has_its_place() -> None:
    """A new alert must be given its step and its line to type."""
    assert PLACES.keys() == {definition.name for definition in definitions()}


def test_every_cause_by_evidence_has_its_place() -> None:
    """A new cause of the sidecar's must be given its step and its line to type."""
    assert from_status._BY_EVIDENCE.keys() == set(get_args(CauseName))


def test_every_named_failure_is_placed() -> None:
    """The doctor's table of failures names no cause that there is not."""
    from specserve.app.doctor import from_log

    known = {sign.cause for sign in signs()} | {
        "oom-load",
        "oom-graphs",
        "oom-serving",
        "oom-profile",
    }
    placed = {code for codes in from_log._FAILURE_STEPS.values() for code in codes}
    assert placed <= known


def test_the_reads_take_two_seconds_at_most() -> None:
    """The pauses between the reads add up to two seconds, and none is made where nothing answers."""
    pauses: list[float] = []
    with serving(HEALTHY["busy"]) as url:
        from_server.read(EngineClient(url), clock=lambda: 0.0, sleep=pauses.append)
    assert sum(pauses) <= 2.0
    none: list[float] = []
    with serving([""], status=404) as url:
        from_server.read(EngineClient(url), clock=lambda: 0.0, sleep=none.append)
    assert none == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text ends with the first cause and its fix; JSON has the steps in order; the exit code is 0."""
    path = log(tmp_path, [*states.LOADING, "RuntimeError: No CUDA GPUs are available"])
    assert doctor("--log", str(path)) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines()[-1] == "First cause: vLLM sees no GPU (proven)"
    assert doctor("--log", str(path), "--format", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [step["step"] for step in told["steps"]] == list(STEPS)
    assert told["first"]["code"] == "no-gpu"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to look at is given"),
        (("--canary", "--log", "x"), "--canary is given without --url"),
        (("--log", "/nowhere/engine.log"), "cannot be read: No such file or directory"),
        (("--profile", "/nowhere/p.json"), "cannot read the benchmark profile"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be looked at is an error of the command line: exit code 2."""
    assert doctor(*arguments) == 2
    assert said in capsys.readouterr().err


def packed(folder: Path, *arguments: str) -> dict[str, str]:
    """What a bundle holds, by the name of its files."""
    out = folder / "out.tar.gz"
    assert doctor("bundle", str(out), *arguments, "--yes") == 0
    assert out.stat().st_mode & 0o077 == 0
    with tarfile.open(out) as archive:
        return {
            Path(name).name: (archive.extractfile(name) or io.BytesIO()).read().decode()
            for name in archive.getnames()
        }


def test_bundle_holds_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys, tokens and prompts are nowhere in the archive; what it holds is shown first."""
    path = config(tmp_path)
    body = yaml.safe_load(path.read_text())
    body["engine"] = {"env": {"HF_TOKEN": "tops3cretvalue"}}
    path.write_text(yaml.safe_dump(body))
    lines = [
        *states.LOADING,
        "using token tops3cretvalue and hf_abcdefghijklmnop",
        "Received request 1: prompt: 'the merger', params: x",
        "RuntimeError: No CUDA GPUs are available",
    ]
    with serving(HEALTHY["busy"]) as url:
        held = packed(tmp_path, str(path), "--log", str(log(tmp_path, lines)), "--url", url)
    names = [
        "versions.txt",
        "doctor.json",
        "config.json",
        "check.json",
        "engine.log",
        "metrics.txt",
    ]
    assert list(held) == names
    everything = "".join(held.values())
    assert "tops3cret" not in everything
    assert "hf_abc" not in everything
    assert "merger" not in everything
    assert json.loads(held["doctor.json"])["first"]["code"] == "no-gpu"
    assert "vllm:num_requests_running" in held["metrics.txt"]
    said = capsys.readouterr().out
    assert said.index("engine.log") < said.index("wrote")


def test_bundle_asks_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal it wants --yes; a file that is there stays as it is."""
    path = str(log(tmp_path, READY))
    out = tmp_path / "b.tar.gz"
    assert doctor("bundle", str(out), "--log", path) == 2
    assert "there is no terminal to ask on" in capsys.readouterr().err
    assert not out.exists()
    out.write_text("mine")
    assert doctor("bundle", str(out), "--log", path, "--yes") == 2
    assert out.read_text() == "mine"
