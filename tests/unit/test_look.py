"""One look at a server by its address: what it is, what it says, what that is held against."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from copy import deepcopy

import pytest

from specserve import cli
from specserve.app.look import discover
from specserve.engine.http.metrics import parse
from specserve.sidecar.look import EngineLook, look
from tests.metrics_server import PlayedServer, played
from tests.virtual_engine import VirtualEngine

HOURS = 3 * 3600.0


@pytest.fixture
def server() -> Iterator[PlayedServer]:
    """A server of our own."""
    with played() as one:
        yield one


def lived(**given: object) -> VirtualEngine:
    """An engine with a good past: 60 % accepted, TPOT 36 ms, steps of 90 ms."""
    engine = VirtualEngine(positions=3, **given)  # type: ignore[arg-type]
    engine.work(drafts=50_000, rates=(0.8, 0.6, 0.4), requests=1000)
    engine.observe("tpot", 0.036, 1000)
    engine.observe("ttft", 0.2, 1000)
    engine.observe("itl", 0.09, 50_000)
    return engine


def looked(before: VirtualEngine, after: VirtualEngine, age: float | None = HOURS) -> EngineLook:
    """Two reads five seconds apart."""
    return look(
        parse(before.text(), at_seconds=100.0),
        parse(after.text(), at_seconds=105.0),
        age_seconds=age,
    )


def worked(
    before: VirtualEngine,
    *,
    rates: tuple[float, ...] = (0.8, 0.6, 0.4),
    tpot: float = 0.036,
    itl: float = 0.09,
    running: float = 4,
    waiting: float = 0,
) -> VirtualEngine:
    """The same engine after five more seconds of work."""
    after = deepcopy(before)
    before.waiting = waiting
    after.running, after.waiting = running, waiting
    after.work(drafts=200, rates=rates, requests=5)
    after.observe("tpot", tpot, 5)
    after.observe("ttft", 0.2, 5)
    after.observe("itl", itl, 200)
    return after


def test_a_healthy_engine_is_ok_beside_its_usual() -> None:
    """Numbers as they have been: ok, and the usual says since when."""
    before = lived()
    seen = looked(before, worked(before))
    assert seen.diagnosis.word == "ok"
    assert seen.usual is not None
    assert seen.usual.since == "since the start 3 h ago"
    assert seen.usual.numbers["acceptance_rate"] == pytest.approx(0.6)
    assert seen.num_speculative_tokens == 3


def test_a_fallen_acceptance_with_steps_as_fast_as_usual_is_the_draft() -> None:
    """The verdict says both numbers, what did not change, and what that points to."""
    before = lived()
    found = looked(before, worked(before, rates=(0.05, 0.0, 0.0), tpot=0.089)).diagnosis
    assert found.word == "degraded"
    assert "TPOT 89 ms, 36 ms since the start 3 h ago" in found.sentence
    assert "acceptance 1.7 %, 60.0 % since the start 3 h ago" in found.sentence
    assert "a step is as fast as usual (90 ms)" in found.sentence
    assert found.likely is not None
    assert found.likely.startswith("the draft")


def test_slower_steps_with_the_usual_acceptance_are_not_the_draft() -> None:
    """The GPU or the load is named, never the draft."""
    before = lived()
    found = looked(before, worked(before, tpot=0.1, itl=0.25)).diagnosis
    assert found.word == "degraded"
    assert "a step takes 250 ms, 90 ms since the start" in found.sentence
    assert "draft" not in (found.likely or "")


def test_a_queue_behind_slow_steps_is_load() -> None:
    """Waiting at both reads: more than it can run."""
    before = lived()
    found = looked(before, worked(before, tpot=0.1, itl=0.25, waiting=58)).diagnosis
    assert "58 requests waiting behind 4 running" in found.sentence
    assert (found.likely or "").startswith("load")


def test_a_request_that_waits_for_a_moment_is_no_queue() -> None:
    """Waiting at the last read only."""
    before = lived()
    after = worked(before, waiting=2)
    before.waiting = 0
    assert looked(before, after).diagnosis.word == "ok"


@pytest.mark.parametrize(
    ("age", "why"),
    [
        (299.0, "the engine started 4 min 59 s ago"),
        (None, "the engine does not say when it started (several API servers)"),
    ],
)
def test_without_a_past_there_is_no_usual(age: float | None, why: str) -> None:
    """A young engine, or one of unknown age, is held against nothing, and that is said."""
    before = lived()
    seen = looked(before, worked(before, rates=(0.05, 0.0, 0.0), tpot=0.089), age)
    assert (seen.usual, seen.no_usual) == (None, why)
    assert seen.diagnosis.word == "ok"


def test_a_past_of_few_requests_is_no_usual() -> None:
    """Three requests in three hours say nothing about what is usual."""
    before = VirtualEngine(positions=3)
    before.work(drafts=100, rates=(0.8,), requests=3)
    seen = looked(before, worked(before))
    assert seen.no_usual == "it has finished 3 requests since its start"


def test_requests_without_a_token_between_two_reads_are_down() -> None:
    """Running and nothing moves; the sentence says for how long it was watched."""
    before = lived()
    after = deepcopy(before)
    after.running = 3
    found = looked(before, after).diagnosis
    assert found.word == "down"
    assert found.sentence == "3 requests running, and not one token or step in 5 s"


def test_requests_that_wait_while_none_runs_are_down() -> None:
    """The scheduler starts none."""
    before = lived()
    before.waiting = 7
    found = looked(before, deepcopy(before)).diagnosis
    assert found.word == "down"
    assert "7 requests waiting, none runs" in found.sentence


def test_an_idle_engine_is_not_said_to_work() -> None:
    """Nothing to do: idle, and that no completion was tried."""
    before = lived()
    found = looked(before, deepcopy(before)).diagnosis
    assert found.word == "idle"
    assert "was not tried" in found.sentence


def test_a_sleeping_engine_is_down() -> None:
    """It takes requests and keeps them."""
    before = lived(awake=0)
    assert "sleeps" in looked(before, deepcopy(before)).diagnosis.sentence


def test_a_restart_between_the_reads_is_said() -> None:
    """Counters of two processes are not compared."""
    before, after = lived(), worked(lived())
    seen = look(
        parse(before.text(start=1000.0), at_seconds=100.0),
        parse(after.text(start=2000.0), at_seconds=105.0),
        age_seconds=HOURS,
    )
    assert "restarted" in seen.diagnosis.sentence


def test_speculation_that_stopped_is_said() -> None:
    """Tokens come, none of them from a draft."""
    before = lived()
    after = deepcopy(before)
    after.running = 40
    after.work(plain=500, requests=3)
    found = looked(before, after).diagnosis
    assert "nothing is drafted" in found.sentence
    assert "schedule" in (found.likely or "")


def test_the_odd_engine_of_several_is_named() -> None:
    """One rank far below the others: its number is said."""
    texts = [[], []]
    for rank in range(4):
        engine = lived(engine=str(rank))
        rates = (0.8, 0.6, 0.4)
        if rank == 2:
            rates = (0.3, 0.1, 0.0)
        for text, one in zip(texts, (engine, worked(engine, rates=rates)), strict=True):
            text.append(one.text(start=None))
    first, last = ("".join(text) for text in texts)
    found = look(
        parse(first, at_seconds=0.0), parse(last, at_seconds=5.0), age_seconds=HOURS
    ).diagnosis
    assert "engine 2 accepts 13.3 %, the others 60.0 % or more" in found.sentence


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_status_of_an_address_ends_in_a_verdict_and_a_next_command(
    server: PlayedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers beside the usual, then the verdict, the cause and what to type."""
    before = lived()
    after = worked(before, rates=(0.05, 0.0, 0.0), tpot=0.089)
    start = time.time() - HOURS
    server.says("/metrics", before.text(start=start), after.text(start=start))
    server.says("/version", '{"version": "0.32.0"}')
    code, out, _ = typed(f"status --engine-url {server.url}/v1 --interval 0.1", capsys)
    lines = [line.rstrip() for line in out.splitlines()]
    assert code == 0
    assert "method    speculates, 3 tokens per draft" in lines
    assert "versions  vLLM 0.32.0" in lines
    assert "since the start 3 h ago" in out
    assert out.index("DEGRADED") < out.index("Likely: the draft")
    assert lines[-1] == f"Next: specserve verify --url {server.url}"


def test_status_of_an_address_as_json(
    server: PlayedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """One document: verdict, numbers, usual, next."""
    before = lived()
    start = time.time() - HOURS
    server.says("/metrics", before.text(start=start), worked(before).text(start=start))
    line = f"status --engine-url {server.url} --interval 0.1 --format json"
    code, out, _ = typed(line, capsys)
    said = json.loads(out)
    assert code == 0
    assert said["diagnosis"]["word"] == "ok"
    assert said["usual"]["since"] == "since the start 3 h ago"
    assert said["usual"]["numbers"]["acceptance_rate"] == 0.6
    assert said["next"] == f"specserve sidecar --engine-url {server.url}"


def test_a_hung_engine_is_not_ready(
    server: PlayedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, as for a sidecar's not ready."""
    engine = lived()
    engine.running = 2
    server.says("/metrics", engine.text())
    code, out, _ = typed(f"status --engine-url {server.url} --interval 0.1", capsys)
    assert code == 1
    assert "DOWN" in out


TGI = """# TYPE tgi_queue_size gauge
tgi_queue_size 3
tgi_batch_current_size 12
tgi_request_count 5123
"""
SGLANG = """sglang:num_running_reqs{model_name="m",dp_rank="0"} 2.0
sglang:num_running_reqs{model_name="m",dp_rank="1"} 3.0
sglang:num_queue_reqs{model_name="m"} 0.0
"""
LLAMA = """llamacpp:requests_processing 1
llamacpp:requests_deferred 0
llamacpp:predicted_tokens_seconds 38.7
"""


@pytest.mark.parametrize(
    ("text", "name", "load"),
    [
        (TGI, "TGI (text-generation-inference)", "12 running, 3 waiting"),
        (SGLANG, "SGLang", "5 running, 0 waiting"),
        (LLAMA, "llama.cpp", "1 running, 0 waiting"),
        ("specserve_ready 1\n", "a specserve sidecar", ""),
    ],
)
def test_another_server_is_named_with_what_still_works(
    server: PlayedServer, capsys: pytest.CaptureFixture[str], text: str, name: str, load: str
) -> None:
    """Not "malformed metrics": which server it is, its requests, and what to do."""
    server.says("/metrics", text)
    code, _, err = typed(f"status --engine-url {server.url}", capsys)
    assert code == 5
    assert f"this is {name}, not vLLM: " in err
    assert load in err
    assert "Fix: specserve " in err


@pytest.mark.parametrize(
    ("owner", "status", "said"),
    [
        ("sglang", 404, "this is SGLang, not vLLM: its metrics are off (--enable-metrics"),
        ("llamacpp", 501, "this is llama.cpp, not vLLM: its metrics are off (--metrics"),
        ("vllm", 404, "vLLM is here, but answered 404"),
        ("somebody", 404, "no server that is known here"),
    ],
)
def test_a_server_without_metrics_is_named_by_its_models(
    server: PlayedServer,
    capsys: pytest.CaptureFixture[str],
    owner: str,
    status: int,
    said: str,
) -> None:
    """SGLang and llama.cpp have metrics only when asked for them."""
    server.says("/metrics", "no metrics here", status=status)
    server.owned_by(owner)
    code, _, err = typed(f"status --engine-url {server.url}", capsys)
    assert code == 5
    assert said in err


def test_vllm_that_logs_no_statistics_is_told_from_no_vllm(
    server: PlayedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """--disable-log-stats leaves /metrics without a series of the engine."""
    server.says("/metrics", "process_start_time_seconds 1.0\n")
    server.owned_by("vllm")
    code, _, err = typed(f"status --engine-url {server.url}", capsys)
    assert code == 5
    assert "vLLM is here" in err
    assert "--disable-log-stats" in err


@pytest.mark.parametrize("body", ["<html>hello</html>", "", "{}", "up 1\n", "tgi\n"])
def test_an_unknown_server_is_said_to_be_unknown(
    server: PlayedServer, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    """A web page, an empty answer, metrics of something else."""
    server.says("/metrics", body)
    code, _, err = typed(f"status --engine-url {server.url}", capsys)
    assert code == 5
    assert "no server that is known here" in err


def test_nobody_there_ends_with_five(capsys: pytest.CaptureFixture[str]) -> None:
    """The address and what it must be."""
    code, _, err = typed("status --engine-url http://127.0.0.1:9", capsys)
    assert code == 5
    assert "must be the address of a running server" in err


@pytest.mark.parametrize(("positions", "method"), [(3, "unknown"), (0, None)])
def test_the_sidecar_needs_no_config(
    server: PlayedServer, positions: int, method: str | None
) -> None:
    """Model and speculation come from the server; how it speculates is not made up."""
    engine = VirtualEngine(positions=positions, model="Qwen/Q$3")
    server.says("/metrics", engine.text())
    found = discover(server.url, environ={}, overrides=("sidecar.port=1234",))
    settings = found.loaded.settings
    assert settings.served_model_name == "Qwen/Q$3"
    assert settings.sidecar.port == 1234
    assert found.method == method
    assert (settings.method is not None) == (positions > 0)
    if positions:
        assert settings.num_speculative_tokens == positions


def test_a_sidecar_without_config_and_address_says_what_to_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither CONFIG nor --engine-url."""
    code, _, err = typed("sidecar", capsys)
    assert code == 2
    assert "Fix: specserve sidecar --engine-url http://127.0.0.1:8000" in err
