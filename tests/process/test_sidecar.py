"""`specserve sidecar` beside an engine that hangs, starves, lies, forgets and comes back: all real processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from programs import Program, start, wait_until

from tests.alert_stack import webhook
from tests.traffic import traffic

INTERVAL, CANARY = 0.2, 0.7
CONFIG = """
server: {{port: {engine}, served_model_name: stub{server}}}
models: {{target_model: {{path: /models/stub}}}}
speculative_decoding: {{method: ngram, num_speculative_tokens: 3}}
sidecar: {{port: {port}, scrape_interval_seconds: {interval}, canary_timeout_seconds: {canary},
           canary_interval_seconds: {idle}, state_dir: {state}{more}}}
"""
MISMATCH = 'specserve_alert_firing{alert="SpecOutputMismatch",severity="critical"}'
SPEC = ("--speculative-config", '{"num_speculative_tokens": 3}', "--served-model-name", "stub")


@dataclass
class Sidecar(Program):
    """A running sidecar."""

    def get(self, path: str, **headers: str) -> requests.Response:
        return requests.get(self.url + path, headers=headers, timeout=20)

    def status(self) -> dict[str, Any]:
        return self.get("/status").json()

    def condition(self) -> str:
        return self.status()["condition"]

    def probes(self) -> tuple[int, int, int]:
        """Status codes of /startupz, /livez and /readyz."""
        return tuple(self.get(path).status_code for path in ("/startupz", "/livez", "/readyz"))  # type: ignore[return-value]

    def becomes(self, condition: str, seconds: float = 40.0) -> None:
        wait_until(
            lambda: self.condition() == condition, seconds, f"condition {condition}: {self.output}"
        )

    def number(self, name: str) -> float | None:
        """One sample of /metrics by its name and labels, the model left out."""
        for line in self.get("/metrics").text.splitlines():
            found, _, value = line.rpartition(" ")
            if (
                re.sub(r'model_name="[^"]*",?', "", found).replace(",}", "}").replace("{}", "")
                == name
            ):
                return float(value)
        return None


@pytest.fixture
def sidecar(tmp_path) -> Iterator[Callable[..., Sidecar]]:
    """``sidecar(engine_port)`` watches that port; it is stopped with SIGTERM and must end with 0."""
    running: list[Sidecar] = []

    def launch(
        engine: int,
        *flags: str,
        canary: float = CANARY,
        idle: float = 60.0,
        server: str = "",
        more: str = "",
    ) -> Sidecar:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        config = tmp_path / f"sidecar-{port}.yaml"
        text = CONFIG.format(
            engine=engine,
            port=port,
            interval=INTERVAL,
            canary=canary,
            idle=idle,
            server=server,
            more=more,
            state=tmp_path / "state",
        )
        config.write_text(text, encoding="utf-8")
        argv = [sys.executable, "-m", "specserve", "sidecar", str(config), *flags]
        program = Sidecar(**vars(start(argv, tmp_path / f"sidecar-{port}.log", port)))
        running.append(program)
        program.says("sidecar at")
        return program

    yield launch
    for program in running:
        if program.process.poll() is None:
            program.signal(signal.SIGTERM)
        assert program.ends() == 0, program.output


def test_the_last_numbers_of_a_killed_engine_stay(stub, sidecar, free_port) -> None:
    """None of them counts as of now; /status and the page say of when they are."""
    engine = stub(*SPEC, port=free_port)
    watcher = sidecar(free_port)
    wait_until(lambda: watcher.probes() == (200, 200, 200))
    wait_until(lambda: "requests_running" in watcher.status()["now"])
    assert "last_numbers" not in watcher.status()
    engine.signal(signal.SIGKILL)
    wait_until(lambda: "last_numbers" in watcher.status())
    status = watcher.status()
    assert "requests_running" not in status["now"]
    assert status["windows"] == {}
    assert status["last_numbers"]["now"]["requests_running"] == 0
    assert "No numbers since " in watcher.get("/").text


def test_a_sidecar_without_a_config_waits_for_the_engine(stub, free_port, tmp_path) -> None:
    """Started first; model and speculation are the server's."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "specserve", "sidecar"]
    argv += ["--engine-url", f"http://127.0.0.1:{free_port}", "--set", f"sidecar.port={port}"]
    argv += ["--set", f"sidecar.state_dir={tmp_path}"]
    watcher = Sidecar(**vars(start(argv, tmp_path / "sidecar.log", port)))
    watcher.says("waiting for it")
    stub(*SPEC, port=free_port)
    watcher.says("sidecar at")
    status = watcher.status()
    assert status["model_name"] == "stub"
    assert (status["method"], status["num_speculative_tokens"]) == ("unknown", 3)
    watcher.signal(signal.SIGTERM)
    assert watcher.ends() == 0, watcher.output


def test_the_live_view_outlives_a_restart_of_the_sidecar(
    stub, sidecar, free_port, tmp_path
) -> None:
    """It says that nothing answers, tries again, and is back with the next sidecar."""
    stub(*SPEC, port=free_port)
    first = sidecar(free_port)
    argv = [sys.executable, "-u", "-m", "specserve", "status", "--watch", "--interval", "0.2"]
    view = start([*argv, "--url", first.url], tmp_path / "view.log", first.port)
    view.says("OK  stub")
    first.signal(signal.SIGTERM)
    assert first.ends() == 0
    view.says("trying again")
    assert view.process.poll() is None
    view.signal(signal.SIGINT)
    assert view.ends() == 130


def test_before_the_engine_listens_it_is_starting(stub, sidecar, free_port) -> None:
    """Nobody there yet: alive, not started, not ready; then ready after the first completion, and no sooner."""
    watcher = sidecar(free_port)
    wait_until(lambda: watcher.condition() == "starting")
    assert watcher.probes() == (503, 200, 503)
    stub(*SPEC, port=free_port)
    wait_until(lambda: watcher.probes() == (200, 200, 200))
    assert watcher.number('specserve_canaries_total{result="ok"}') == 1


def test_a_frozen_engine_is_stalled_and_comes_back(stub, sidecar) -> None:
    """/health says 200 and /metrics answers, no step happens: stalled, within three reads and a canary's time-out."""
    engine = stub(*SPEC, "--stub-step", 0.005)
    watcher = sidecar(engine.port)
    wait_until(lambda: watcher.probes()[2] == 200)
    with traffic(engine.url, "stub"):
        watcher.becomes("progressing")
        engine.control(freeze=True)
        assert requests.get(f"{engine.url}/health", timeout=5).status_code == 200
        watcher.becomes("stalled")
        assert watcher.probes() == (200, 503, 503)
        verdict = watcher.get("/livez").json()
        assert "requests running" in verdict["reason"]
        assert "canary failed" in verdict["reason"]
        assert (
            watcher.number('specserve_alert_firing{alert="EngineStalled",severity="critical"}') == 1
        )
        engine.control(freeze=False)
        wait_until(lambda: watcher.probes() == (200, 200, 200))


def test_an_engine_that_froze_while_idle_is_found(stub, sidecar) -> None:
    """Nothing runs, so no counter can tell; the canaries can."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port, idle=0.5)
    watcher.becomes("idle")
    engine.control(freeze=True, running=0, waiting=0)
    watcher.becomes("stalled")
    assert watcher.probes()[1] == 503
    engine.control(freeze=False)
    wait_until(lambda: watcher.probes() == (200, 200, 200))


def test_a_hang_behind_a_full_queue_is_found(stub, sidecar) -> None:
    """Every canary is refused with 503, because the queue never empties; requests in execution stand still."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    watcher.becomes("idle")
    engine.control(completion_status=503, running=4, waiting=8)
    watcher.becomes("stalled")
    assert "canary refused: answered 503" in watcher.get("/livez").json()["reason"]


def test_a_starved_engine_is_named_and_left_alive(stub, sidecar) -> None:
    """Requests wait, none runs: alive, not ready."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    watcher.becomes("idle")
    engine.control(starve=True)
    with traffic(engine.url, "stub"):
        watcher.becomes("starved")
        assert watcher.probes() == (200, 200, 503)
        assert "not a hang by itself" in watcher.get("/livez").json()["reason"]
        engine.control(starve=False)
        wait_until(lambda: watcher.probes() == (200, 200, 200))


def test_a_saturated_engine_is_alive(stub, sidecar) -> None:
    """Two slots, sixteen clients, slow steps, canaries that would time out in the queue: not stalled, always ready."""
    engine = stub(*SPEC, "--max-num-seqs", 2, "--stub-step", 0.1)
    watcher = sidecar(
        engine.port, canary=3
    )  # longer than a busy machine keeps a process from running
    # Idle comes before the start-up canary is over.
    wait_until(lambda: watcher.probes() == (200, 200, 200))
    with traffic(engine.url, "stub", clients=16):
        watcher.becomes("progressing")
        seen = set()
        end = time.monotonic() + 6
        while time.monotonic() < end:
            seen.add((watcher.condition(), *watcher.probes()))
            time.sleep(INTERVAL / 2)
    # On a busy machine a read of /metrics may miss its time: blind for a moment, which must not matter either.
    assert seen <= {(c, 200, 200, 200) for c in ("progressing", "suspect", "blind")}
    assert ("progressing", 200, 200, 200) in seen


@pytest.mark.parametrize(
    "fault",
    [
        {"metrics_status": 500},
        {"metrics_truncate": 3000},
        {"metrics_truncate": 0},
        {"metrics_pad": 50_000_000},
    ],
    ids=["500", "half", "empty", "50-MB"],
)
def test_blind_is_not_dead(stub, sidecar, fault: dict[str, int]) -> None:
    """Errors, half a body, no body: blind, said with the reason; alive and ready; old numbers are not shown as new."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    watcher.becomes("idle")
    assert watcher.number("specserve_requests_running") == 0
    engine.control(**fault)
    watcher.becomes("blind")
    assert watcher.probes() == (200, 200, 200)
    assert "not a hang by itself" in watcher.get("/livez").json()["reason"]
    assert watcher.number("specserve_requests_running") is None
    assert watcher.number('specserve_engine_condition{condition="blind"}') == 1
    engine.control(metrics_status=200, metrics_truncate=-1, metrics_pad=0)
    watcher.becomes("idle")


@pytest.mark.parametrize("way", ["close", "reset", "garbage"])
def test_an_engine_that_breaks_connections_to_its_metrics_only_stays_alive(
    stub, sidecar, way: str
) -> None:
    """/health and completions are fine: blind for as long as it lasts, and alive and ready."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    wait_until(lambda: watcher.probes() == (200, 200, 200))
    engine.control(metrics_break=way)
    watcher.becomes("blind")
    seen: set = set()
    for _ in range(20):
        seen.add((watcher.condition(), *watcher.probes()))
        time.sleep(INTERVAL)
    assert seen == {("blind", 200, 200, 200)}
    engine.control(metrics_break="")
    watcher.becomes("idle")


def test_an_engine_that_is_killed_is_down_and_a_new_one_starts_over(stub, sidecar) -> None:
    """Down, then not alive; the next process has to prove itself, and the totals go on."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    watcher.becomes("idle")
    engine.control(drafts=1000)
    wait_until(lambda: (watcher.number("specserve_drafts_total") or 0) >= 1000)
    engine.process.kill()
    engine.process.wait()
    watcher.becomes("down")
    wait_until(lambda: watcher.probes() == (200, 503, 503))
    stub(*SPEC, port=engine.port)
    wait_until(lambda: watcher.probes() == (200, 200, 200))
    assert (watcher.number("specserve_drafts_total") or 0) >= 1000
    assert watcher.number("specserve_engine_restarts_total") == 1


def test_acceptance_is_what_the_engine_did(stub, sidecar) -> None:
    """Programmed rates come out, by position, and a counter reset in between bends nothing."""
    engine = stub(*SPEC, "--stub-acceptance", "1,0.5,0")
    watcher = sidecar(engine.port)
    wait_until(lambda: watcher.probes()[2] == 200)  # the windows begin after the start-up canary
    engine.control(drafts=4000)
    wait_until(lambda: (watcher.number('specserve_window_drafts{window="1m"}') or 0) >= 4000)
    engine.control(reset_counters=True)
    engine.control(drafts=4000)
    wait_until(lambda: (watcher.number('specserve_window_drafts{window="1m"}') or 0) >= 8000)
    wait_until(lambda: watcher.number('specserve_acceptance_rate{window="1m"}') is not None)
    minute: dict = {}  # of one answer: a read that a busy machine makes late leaves the next one without numbers
    wait_until(
        lambda: (
            minute.update(watcher.status()["windows"].get("1m", {})) or "window_drafts" in minute
        )
    )
    assert minute["window_drafts"] == 8000
    assert minute["acceptance_rate"] == pytest.approx(0.5, abs=0.02)
    positions = minute["acceptance_rate_per_position"]
    assert [positions[str(i)] for i in range(3)] == [1.0, pytest.approx(0.5, abs=0.05), 0.0]


def test_corrupt_text_after_the_start_raises_an_alert(stub, sidecar) -> None:
    """The start-up canary's proof keeps readiness away, is an alert, and is said with its reason."""
    watcher = sidecar(stub(*SPEC, "--stub-corrupt", "sampled").port)
    wait_until(lambda: watcher.number(MISMATCH) == 1)
    assert watcher.number("specserve_output_mismatch") == 1
    assert watcher.probes() == (200, 200, 503)
    assert (
        "start-up canary: corrupt: acceptance at position 0 falls"
        in watcher.get("/readyz").json()["reason"]
    )


def test_text_that_becomes_corrupt_while_serving_raises_an_alert(stub, sidecar) -> None:
    """Right after the start, wrong later: found by the comparison, though every request ends with 200."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port, more=", comparison_interval_seconds: 0.5")
    wait_until(lambda: watcher.probes() == (200, 200, 200))
    assert watcher.number(MISMATCH) == 0
    engine.control(corrupt="sampled")
    wait_until(lambda: watcher.number(MISMATCH) == 1)
    wait_until(lambda: watcher.probes() == (200, 200, 503))
    assert "comparison while serving: corrupt" in watcher.get("/readyz").json()["reason"]
    assert watcher.status()["comparison"]["verdict"] == "corrupt"


def test_a_wrong_key_is_no_hang(stub, sidecar) -> None:
    """Canaries are refused: alive; not ready without proof of a completion; the reason is in the log."""
    engine = stub(*SPEC, "--api-key", "right")
    watcher = sidecar(engine.port, server=", api_key: wrong")
    watcher.says("answered 401")
    assert watcher.probes() == (503, 200, 503)
    assert "wrong" not in watcher.output


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;q=0.3,*/*;q=0.2",
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,*/*;q=0.1",
        "",
    ],
    ids=["prometheus-2", "prometheus-3", "protobuf", "none"],
)
def test_one_exposition_for_every_scraper(stub, sidecar, accept: str) -> None:
    """text/plain 0.0.4 and the names of the table, whatever Accept says."""
    watcher = sidecar(stub(*SPEC).port)
    watcher.becomes("idle")
    answer = watcher.get("/metrics", Accept=accept)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert re.search(r'^specserve_live\{model_name="stub"\} 1\.0$', answer.text, re.MULTILINE)
    assert "# EOF" not in answer.text


@pytest.mark.needs("promtool")
def test_promtool_has_nothing_to_complain_of(stub, sidecar) -> None:
    """Names, types and help texts pass Prometheus' own linter."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    watcher.becomes("idle")
    engine.control(drafts=500)
    wait_until(lambda: watcher.number('specserve_acceptance_rate{window="1m"}') is not None)
    argv = ["promtool", "check", "metrics"]
    linted = subprocess.run(
        argv, input=watcher.get("/metrics").text, capture_output=True, text=True, check=False
    )
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")


def test_the_page_and_the_paths(stub, sidecar) -> None:
    """A page for people, JSON for programs, 404 with the paths, HEAD without a body, nothing else allowed."""
    watcher = sidecar(stub(*SPEC).port)
    watcher.becomes("idle")
    page = watcher.get("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert page.text.startswith("<!doctype html>")
    assert "/readyz" in watcher.get("/nothing").text
    assert requests.head(watcher.url + "/metrics", timeout=5).content == b""
    assert requests.post(watcher.url + "/status", timeout=5).status_code == 501


@pytest.mark.needs("chromium")
def test_the_page_in_a_browser(stub, sidecar) -> None:
    """Chromium lays it out, draws four charts, and finds nothing to complain of: no script, no foreign address."""
    watcher = sidecar(stub(*SPEC).port)
    watcher.becomes("idle")
    argv = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--window-size=360,800",
    ]
    seen = subprocess.run(
        [*argv, "--dump-dom", watcher.url], capture_output=True, text=True, timeout=60, check=True
    )
    assert seen.stdout.count("<svg") == 4
    assert ">idle</span>" in seen.stdout
    assert "CONSOLE" not in seen.stderr


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specserve", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_probe_command(stub, sidecar, free_port) -> None:
    """Exit code 0 and 1 with the reason, also when nobody answers."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    wait_until(lambda: watcher.probes()[2] == 200)  # idle comes before the start-up canary is over
    assert run("probe", "ready", "--url", watcher.url).returncode == 0
    engine.process.kill()
    watcher.becomes("down")
    wait_until(lambda: watcher.probes()[1] == 503)
    asked = run("probe", "live", "--url", watcher.url)
    assert asked.returncode == 1
    assert asked.stdout.startswith("live: no: ")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    assert run("probe", "live", "--url", f"http://127.0.0.1:{port}").returncode == 1


def test_the_status_command(stub, sidecar) -> None:
    """The same on a terminal and as JSON; exit code 0 while ready, 1 while not, 5 without a sidecar."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    wait_until(lambda: watcher.probes()[2] == 200)
    shown = run("status", "--url", watcher.url)
    assert shown.returncode == 0
    assert re.search(
        r"^canary +unproven; the engine does not list its tokens", shown.stdout, re.MULTILINE
    )
    assert re.search(r"^condition +idle", shown.stdout, re.MULTILINE)
    assert (
        json.loads(run("status", "--url", watcher.url, "--format", "json").stdout)["model_name"]
        == "stub"
    )
    engine.process.kill()
    wait_until(lambda: watcher.probes()[2] == 503)
    assert run("status", "--url", watcher.url).returncode == 1
    missing = run("status", "--url", "http://127.0.0.1:9")
    assert missing.returncode == 5
    assert "no sidecar answers" in missing.stderr


def test_watching_as_json_is_a_line_a_look(stub, sidecar) -> None:
    """status --watch --format json goes on, one compact object a line."""
    watcher = sidecar(stub(*SPEC).port)
    argv = ["status", "--watch", "--interval", "0.1", "--format", "json", "--url", watcher.url]
    with subprocess.Popen(
        [sys.executable, "-m", "specserve", *argv], stdout=subprocess.PIPE, text=True
    ) as asking:
        assert asking.stdout is not None
        looks = [json.loads(asking.stdout.readline())["model_name"] for _ in range(3)]
        asking.terminate()
    assert looks == ["stub"] * 3


@pytest.mark.parametrize(
    "answer",
    [
        *(
            f"HTTP/1.1 200 OK\r\n\r\n{body}"
            for body in ("{}", "[]", "null", '{"ok": true}', "<html>", "[" * 10**5)
        ),
        'HTTP/1.1 503 No\r\n\r\n"x"',
        "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        "SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
def test_something_else_on_the_port_is_no_sidecar(answer: str) -> None:
    """Whatever speaks there, the probe is no and status is exit code 5, with the reason."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            for _ in range(2):
                connection, _ = other.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer.encode())

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        probed, shown = run("probe", "live", "--url", url), run("status", "--url", url)
    assert probed.returncode == 1
    assert probed.stdout.startswith("live: no: ")
    assert "not a sidecar" in probed.stdout
    assert shown.returncode == 5
    assert "not a sidecar" in shown.stderr


def test_a_taken_port_is_a_config_error(stub, sidecar) -> None:
    """The port is named, and what to type; exit code 2."""
    watcher = sidecar(stub(*SPEC).port)
    config = next(Path(watcher.path.parent).glob("sidecar-*.yaml"))
    refused = run("sidecar", str(config))
    assert refused.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {watcher.port}" in refused.stderr
    assert "Fix: --set sidecar.port=N" in refused.stderr


def test_it_ends_within_its_time_while_the_engine_hangs(stub, sidecar) -> None:
    """SIGTERM during a read that will never be answered: it still ends, with 0."""
    engine = stub(*SPEC)
    watcher = sidecar(engine.port)
    watcher.becomes("idle")
    engine.control(hang=True)
    time.sleep(3 * INTERVAL)
    watcher.signal(signal.SIGTERM)
    assert watcher.ends(20) == 0


def beside(tmp_path: Path, interval: float = INTERVAL) -> tuple[int, list[str]]:
    """The port of a sidecar beside a launched engine, and what launch must be told."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    values = {
        "enabled": "true",
        "port": port,
        "scrape_interval_seconds": interval,
        "state_dir": tmp_path / "state",
    }
    return port, [
        part for name, value in values.items() for part in ("--set", f"sidecar.{name}={value}")
    ]


def test_a_launch_that_refuses_corrupt_text_says_so_to_receivers(launch, tmp_path) -> None:
    """The canary ends the launch with exit code 4; the alert goes out first, however long the interval."""
    with webhook() as hook:
        _, settings = beside(tmp_path, interval=600)
        receiver = f"alerts.notify=[{{type: webhook, url: {hook.url}}}]"
        program = launch("--stub-corrupt", "sampled", *settings, "--set", receiver)
        assert program.ends() == 4
        heard = [alert for _, _, body in hook.got for alert in json.loads(body)["alerts"]]
    assert [alert["labels"]["alertname"] for alert in heard] == ["SpecOutputMismatch"], (
        program.output
    )


def test_beside_a_launched_engine(launch, tmp_path) -> None:
    """Launch starts it: ready with the supervisor's consent, and while draining alive, not ready, still there."""
    port, settings = beside(tmp_path)
    engine = launch(*settings, "--set", "engine.drain_timeout_seconds=30")
    watcher = Sidecar(engine.process, engine.path, port)
    wait_until(lambda: "Ready\n" in engine.output and watcher.probes() == (200, 200, 200))
    found = watcher.status()
    assert (found["state"], found["condition"]) == ("running", "idle")
    assert found["command"]
    engine.control(step=0.5, acceptance="0")  # ten seconds, until draining has been seen
    body = {"model": "tiny", "prompt": "a", "max_tokens": 20}
    answers: list[int] = []
    request = threading.Thread(
        target=lambda: answers.append(
            requests.post(f"{engine.url}/v1/completions", json=body, timeout=30).status_code
        )
    )
    request.start()
    watcher.becomes("progressing")
    engine.signal(signal.SIGTERM)
    watcher.becomes("draining")
    assert watcher.probes()[1:] == (200, 503)
    engine.control(step=0.01)
    request.join()
    assert answers == [200]
    assert engine.ends() == 0
