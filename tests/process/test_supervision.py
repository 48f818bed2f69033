"""`specserve launch` over the stub engine: real processes, real signals, exit codes as a shell sees them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import requests
from programs import unused_port, wait_until


def complete(url: str, into: list, max_tokens: int = 20) -> threading.Thread:
    """A streamed completion in a thread; (status, whether [DONE] came) goes into the list."""

    def ask() -> None:
        body = {"model": "tiny", "prompt": "a b", "max_tokens": max_tokens, "stream": True}
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=30)
        into.append((answer.status_code, answer.text.endswith("data: [DONE]\n\n")))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_a_start_shows_phases_and_one_block_and_term_ends_it_with_0(launch, records):
    """Phases in order, the block with what the engine reported, a record while it runs and none afterwards."""
    program = launch("--stub-ready-after", 0.2)
    program.says("engine log")
    words = [line.split("  ")[-1] for line in program.output.splitlines() if " s  " in line]
    assert words[:4] == ["checking", "starting", "importing", "loading target weights"]
    block = dict(
        line.strip().split(None, 1) for line in program.output.splitlines() if line.startswith("  ")
    )
    assert block["URL"] == f"{program.url}/v1"
    assert program.output.count("Ready\n") == 1
    for row in ("model                   tiny", "method                  ngram", "num_speculative_tokens  3",
                "KV cache tokens         43,680"):  # fmt: skip
        assert f"  {row}\n" in program.output
    assert len(records()) == 1
    program.signal(signal.SIGTERM)
    assert program.ends() == 0
    assert records() == []


def test_crash_before_ready_is_4_with_the_engines_last_lines(launch, tmp_path):
    """The cause, the phase, the log's own words and where the whole log is."""
    log = tmp_path / "vllm.log"
    log.write_text(
        "ERROR 11-29 10:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried\n"
    )
    program = launch("--stub-log-file", log, "--stub-crash-at-start", 1)
    assert program.ends() == 4
    assert (
        "Error: engine: exited with status 1, in phase 'importing'; memory ran out"
        in program.output
    )
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried" in program.output
    assert f"whole log: {tmp_path}" in program.output


def test_a_start_that_hangs_is_4_and_names_its_phase(launch):
    """The deadline is ours, not the engine's."""
    program = launch("--set", "engine.startup_timeout_seconds=5", "--stub-ready-after", "inf")
    assert program.ends() == 4
    assert (
        "Error: engine: not ready within 5 s, in phase 'loading target weights'" in program.output
    )


def test_healthy_but_silent_is_not_ready(launch):
    """/health is green and no completion ever returns: the deadline ends it."""
    program = launch(
        "--set",
        "engine.startup_timeout_seconds=1",
        "--set",
        "engine.drain_timeout_seconds=0.2",
        "--stub-freeze",
    )
    assert program.ends() == 4
    assert "Ready\n" not in program.output


def test_a_completion_that_fails_is_named(launch):
    """What the last readiness check met is part of the message."""
    # On a busy machine the first checks find an engine that does not listen yet.
    program = launch("--set", "engine.startup_timeout_seconds=15", "--stub-completion-status", 500)
    assert program.ends() == 4
    assert "answered 500" in program.output


def test_another_model_than_configured_is_refused(launch):
    """The names that the engine serves, and no restart."""
    program = launch("--set", "engine.max_restarts=3", "--served-model-name", "other")
    assert program.ends() == 4
    assert "it serves other instead of tiny" in program.output


def test_crash_after_ready_is_5(launch, records):
    """Lost, with the cause that the log names."""
    program = launch()
    program.says("engine log")
    program.crash()
    assert program.ends() == 5
    assert "Error: engine: exited with status 1, after it had been ready" in program.output
    assert records() == []


def test_a_dead_core_under_a_living_server_is_5(launch):
    """vLLM's API process lives on for seconds and answers /health with 503; that is enough."""
    program = launch()
    program.says("engine log")
    program.control(health_status=503)
    assert program.ends() == 5
    assert "its engine core is dead" in program.output


def test_restarts_back_off_and_then_give_up(launch):
    """Two restarts with doubled pauses, ready each time, then exit code 5."""
    program = launch("--set", "engine.max_restarts=2")
    for times in (1, 2, 3):
        wait_until(lambda times=times: program.output.count("engine log") == times)
        program.crash()
    assert program.ends() == 5
    assert "restart 1 of 2 in 0.1 s" in program.output
    assert "restart 2 of 2 in 0.2 s" in program.output
    assert program.output.count("Ready\n") == 3


def test_a_state_folder_that_cannot_be_written_stops_no_engine(launch, tmp_path):
    """It is lost under a running engine: said at the restart, which serves all the same."""
    program = launch("--set", "engine.max_restarts=1")
    program.says("engine log")
    (tmp_path / "specserve" / "run").rename(tmp_path / "aside")
    (tmp_path / "specserve" / "run").touch()
    program.crash()
    wait_until(lambda: program.output.count("Ready\n") == 2)
    assert "specserve/run: cannot be written (Not a directory)" in program.output
    program.signal(signal.SIGTERM)
    assert program.ends() == 0


def test_term_drains_running_requests_and_refuses_new_ones(launch):
    """Eight streams in flight end with [DONE]; a ninth gets 503; exit code 0."""
    program = launch("--set", "engine.drain_timeout_seconds=30")
    program.says("engine log")
    program.control(
        step=0.5, acceptance="0"
    )  # streams of ten seconds, until the ninth has been refused
    answers: list = []
    threads = [complete(program.url, answers) for _ in range(8)]
    wait_until(lambda: program.control()["in_flight"] == 8)
    program.signal(signal.SIGTERM)
    program.says("draining")
    # Of one token: one that comes before the engine has taken its signal is served, and must not outlast the eight.
    wait_until(
        lambda: not complete(program.url, late := [], 1).join() and late and late[0][0] == 503
    )
    program.control(step=0.01)
    for thread in threads:
        thread.join()
    assert answers == [(200, True)] * 8
    assert program.ends() == 0


def test_a_second_signal_ends_it_at_once_with_130(launch):
    """Nobody waits a minute for an engine that does not end."""
    program = launch("--set", "engine.drain_timeout_seconds=60", "--stub-ignore-term")
    program.says("engine log")
    program.signal(signal.SIGTERM)
    program.says("draining")
    program.signal(signal.SIGINT)
    assert program.ends() == 130
    assert "running requests were cut off" in program.output


def test_an_engine_that_ignores_term_is_killed_when_the_drain_is_over(launch):
    """Exit code 5, because requests may have been lost, and the key to change."""
    program = launch(
        "--set", "engine.drain_timeout_seconds=0.2", "--drain-margin", 0.3, "--stub-ignore-term"
    )
    program.says("engine log")
    program.signal(signal.SIGTERM)
    assert program.ends() == 5
    assert "Fix: raise engine.drain_timeout_seconds" in program.output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_an_engine_that_dies_in_the_drain_is_5_with_the_requests_cut_off(launch, number):
    """As by the OOM killer: two streams ran, and both are counted."""
    program = launch("--set", "engine.drain_timeout_seconds=60")
    program.says("engine log")
    program.control(step=0.5, acceptance="0")
    for _ in range(2):
        cut_off(program.url)
    wait_until(lambda: program.control()["in_flight"] == 2)
    engine = psutil.Process(program.control()["pid"])
    program.signal(signal.SIGTERM)
    program.says("draining")
    engine.send_signal(number)
    assert program.ends() == 5
    assert f"Error: engine: was killed by {number.name}" in program.output
    assert "while it drained; 2 running requests were cut off" in program.output


def test_an_engine_that_gives_up_in_the_drain_is_5(launch):
    """It ends by itself with status 0 when its own time is up, and a stream still ran."""
    program = launch("--set", "engine.drain_timeout_seconds=2")
    program.says("engine log")
    program.control(step=0.5, acceptance="0")
    cut_off(program.url)
    wait_until(lambda: program.control()["in_flight"] == 1)
    program.signal(signal.SIGTERM)
    assert program.ends() == 5
    assert "gave up after 2 s of draining; 1 running request was cut off" in program.output
    assert "Fix: raise engine.drain_timeout_seconds" in program.output


def test_a_core_that_dies_in_the_drain_is_5(launch):
    """The API process lives on, answers /health with an error, and then ends with status 0."""
    program = launch("--set", "engine.drain_timeout_seconds=60")
    program.says("engine log")
    program.control(step=0.5, acceptance="0")
    cut_off(program.url)
    wait_until(lambda: program.control()["in_flight"] == 1)
    program.signal(signal.SIGTERM)
    program.says("draining")
    program.control(health_status=503, running=1)
    time.sleep(1)
    program.control(step=0.01)
    assert program.ends() == 5
    assert "its engine core died while it drained" in program.output
    assert "1 running request was cut off" in program.output


def test_an_engine_that_is_killed_idle_in_the_drain_cut_nothing_off(launch):
    """No request ran: nothing was lost, and the exit code says so."""
    program = launch("--set", "engine.drain_timeout_seconds=60", "--stub-ignore-term")
    program.says("engine log")
    engine = psutil.Process(program.control()["pid"])
    program.signal(signal.SIGTERM)
    program.says("draining")
    time.sleep(1)
    engine.kill()
    assert program.ends() == 0


def cut_off(url: str) -> threading.Thread:
    """A stream in a thread that does not mind being cut off."""

    def ask() -> None:
        body = {"model": "tiny", "prompt": "a b", "max_tokens": 500, "stream": True}
        with contextlib.suppress(requests.RequestException):
            _ = requests.post(f"{url}/v1/completions", json=body, timeout=60).text

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


FULL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=300k none "$0" && exec "$@"')
"""A command in front of another, for which the first argument is a folder on a small disk."""


@pytest.mark.parametrize("full", ["state", "log", "device"])
def test_a_full_disk_changes_no_exit_code(launch, tmp_path, full):
    """The state folder or the log on a disk that fills up while it serves: a clean drain is 0."""
    small, path = tmp_path / "small", str(tmp_path / "specserve")
    log = []
    if full != "state":
        small.mkdir()
        path = str(small)
        log = ["--engine-log", str(small / "log")]
    if full == "device":
        program = launch("--engine-log", "/dev/full")
    elif subprocess.run([*FULL[:2], "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace may be made here")
    else:
        Path(path).mkdir(exist_ok=True)
        program = launch(*log, "--stub-stderr-flood", 2**20, before=[*FULL, path])
    program.says("engine log")
    assert requests.post(f"{program.url}/v1/completions", json={"max_tokens": 1}, timeout=20).ok
    program.signal(signal.SIGTERM)
    assert program.ends() == 0, program.output


def test_a_pipe_as_the_engines_log_is_refused(launch, tmp_path):
    """Opening it would wait for a reader for ever."""
    os.mkfifo(tmp_path / "pipe")
    program = launch("--engine-log", tmp_path / "pipe")
    assert program.ends() == 2
    assert f"Error: {tmp_path}/pipe: cannot be written (it is a pipe)" in program.output


def test_the_engines_output_is_shown_where_asked(launch, tmp_path):
    """With --engine-log -, every line of the engine's stands in our output once, and in the file."""
    program = launch("--engine-log", "-")
    program.says("engine log")
    program.signal(signal.SIGTERM)
    assert program.ends() == 0
    log = Path(re.search(r"engine log +(\S+)", program.output)[1]).read_text().splitlines()
    assert log
    assert all(line in program.output.splitlines() for line in log)
    assert "engine: " not in program.output


def test_a_command_that_is_too_long_is_named(launch):
    """The system refuses it; a reinstalled engine would not help, and no restart."""
    program = launch("--repeat", 100_000)
    assert program.ends() == 4
    assert "its command and environment are longer than the system takes" in program.output
    assert "Fix: shorten engine.extra_args" in program.output


def test_interrupt_while_starting_is_130(launch, records):
    """Ctrl-C during a long load ends the engine and says that it never was ready."""
    program = launch("--stub-ready-after", 60)
    program.says("loading target weights")
    program.signal(signal.SIGINT)
    assert program.ends() == 130
    assert "SIGINT before the engine was ready" in program.output
    assert records() == []


def test_hangup_of_the_terminal_drains(launch):
    """A closed terminal must not orphan the engine."""
    program = launch()
    program.says("engine log")
    program.signal(signal.SIGHUP)
    assert program.ends() == 0


def test_a_grandchild_that_ignores_term_does_not_survive(launch):
    """The engine drains and leaves; what it left behind is killed."""
    program = launch("--stub-grandchild")
    program.says("engine log")
    grandchild = psutil.Process(program.control()["grandchild_pid"])
    program.signal(signal.SIGTERM)
    assert program.ends() == 0
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_a_dead_leader_takes_its_grandchild_along(launch):
    """kill -9 of the API process: lost, and no orphan holds the memory."""
    program = launch("--stub-grandchild")
    program.says("engine log")
    facts = program.control()
    grandchild = psutil.Process(facts["grandchild_pid"])
    psutil.Process(facts["pid"]).kill()
    assert program.ends() == 5
    assert "was killed by SIGKILL" in program.output
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_both_ports_are_looked_at_before_anything_is_checked_or_started(launch, stub):
    """The sidecar's port counts as the server's does: the same exit code, and both are said at once."""
    first, second = stub(), stub(port=unused_port())
    program = launch(
        "--set", "sidecar.enabled=true", "--set", f"sidecar.port={second.port}", port=first.port
    )
    assert program.ends() == 4
    for key, other in (("server.port", first), ("sidecar.port", second)):
        assert f"{key} {other.port}: is taken; it must be free" in program.output
        assert f"pid {other.process.pid}" in program.output
    assert "importing" not in program.output


@pytest.mark.parametrize("after", [0, 60])
def test_an_engine_drains_and_ends_when_its_specserve_is_killed(launch, after):
    """SIGKILL of specserve is SIGTERM for the engine, ready or not: nothing has to be reaped."""
    program = launch("--stub-ready-after", after)
    program.says("loading target weights" if after else "engine log")
    (engine,) = psutil.Process(program.process.pid).children()
    program.process.kill()
    program.process.wait()
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    again = launch()
    again.says("engine log")
    assert "left behind" not in again.output
    again.signal(signal.SIGTERM)
    assert again.ends() == 0


def test_megabytes_on_stderr_do_not_block_the_engine(launch, tmp_path):
    """1 MB of lines and a line of 1 MB pass through the pipe of 64 KB; the log has the lines, the long one cut."""
    program = launch("--stub-stderr-flood", 2**20, "--stub-long-line", 2**20)
    program.says("engine log")
    program.signal(signal.SIGTERM)
    assert program.ends() == 0
    log = (tmp_path / "specserve" / "run" / "engine.log").read_text()
    assert log.count("e" * 99 + "\n") == 2**20 // 100
    assert "x" * 4000 + " ...\n" in log


def test_a_reader_that_goes_away_does_not_end_the_server(launch):
    """`specserve launch | grep -m 1 Ready`: the pipe breaks, requests are served on, and the drain works."""
    program = launch(through="grep -m 1 Ready")
    assert program.output == "Ready\n"
    assert requests.post(f"{program.url}/v1/completions", json={"max_tokens": 1}, timeout=5).ok
    program.signal(signal.SIGTERM)
    assert program.ends() == 0


def test_on_a_terminal_phases_move_on_one_line_and_the_block_stays(launch):
    """The cursor comes back, and the block is the same text as in a file."""
    program = launch("--stub-ready-after", 1, tty=True)
    program.says("engine log")
    assert "\x1b[2K" in program.output
    assert re.search(r" loading target weights \(\d+ s\)", program.output)
    assert "Ready\n  URL                     http" in program.output
    assert "\x1b[?25h" in program.output
    program.signal(signal.SIGINT)
    assert program.ends() == 0
    program.says("the engine has ended")


def test_tls_and_an_api_key_do_not_stand_in_the_way_of_readiness(launch, tmp_path):
    """A certificate for another name, and a key: our own checks pass, and nobody is warned about them."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ("-subj", "/CN=llm.example", "-days", "1", "-nodes")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", *subject, "-keyout", key, "-out", cert],
                   check=True, capture_output=True)  # fmt: skip
    settings = (
        f"server.tls.cert_file={cert}",
        f"server.tls.key_file={key}",
        "server.api_key=tops3cret",
    )
    program = launch(*(part for s in settings for part in ("--set", s)), "--api-key", "tops3cret")
    program.says("engine log")
    assert "https://127.0.0.1" in program.output
    assert "Warning" not in program.output
    program.signal(signal.SIGTERM)
    assert program.ends() == 0


def test_memory_figures_that_cannot_be_kept_end_no_server(launch, tmp_path):
    """A config in a read-only place, as in a container: it is said, and the server serves on."""
    (tmp_path / "file").touch()
    program = launch("--calibrate", tmp_path / "file" / "config.yaml")
    program.says("config.memory.json: cannot be written (Not a directory)")
    assert requests.post(f"{program.url}/v1/completions", json={"max_tokens": 1}, timeout=20).ok
    program.signal(signal.SIGTERM)
    assert program.ends() == 0


def test_readiness_of_the_sidecar_follows_without_waiting_for_its_interval(launch):
    """It reads every ten minutes, yet is ready as soon as launch is, and not ready as soon as it drains."""
    port = unused_port()
    watched = (
        "sidecar.enabled=true",
        f"sidecar.port={port}",
        "sidecar.scrape_interval_seconds=600",
    )
    watched += ("engine.drain_timeout_seconds=30",)
    program = launch(*(part for setting in watched for part in ("--set", setting)))

    def ready() -> int:
        return requests.get(f"http://127.0.0.1:{port}/readyz", timeout=20).status_code

    program.says("engine log")
    wait_until(lambda: ready() == 200)
    program.control(
        step=0.5, acceptance="0"
    )  # a stream of ten seconds, until readiness has been seen to fall
    answers: list = []
    thread = complete(program.url, answers)
    wait_until(lambda: program.control()["in_flight"] == 1)
    program.signal(signal.SIGTERM)
    wait_until(lambda: ready() == 503)
    program.control(step=0.01)
    thread.join()
    assert answers == [(200, True)]
    assert program.ends() == 0


def watched(**more: object) -> list[str]:
    """Settings of a launch whose sidecar looks every half second."""
    values = {
        "sidecar.enabled": "true",
        "sidecar.port": unused_port(),
        "sidecar.scrape_interval_seconds": 0.5,
        "sidecar.canary_timeout_seconds": 3,
        "sidecar.canary_interval_seconds": 3,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def test_an_engine_that_hangs_is_restarted_where_that_is_asked_for(launch):
    """Frozen with a request in it: proven by the sidecar, then restarted, ready again, and left
    alone; the next hang is one too many."""
    restart = {"engine__restart_when_stalled": "true", "engine__max_restarts": 1}
    program = launch(*watched(**restart))
    for times in (1, 2):
        wait_until(lambda times=times: program.output.count("Ready\n") == times, 90)
        time.sleep(2)  # what was found of the engine before does not count for this one
        assert program.process.poll() is None
        program.control(freeze=True)
        cut_off(program.url)
    assert program.ends(120) == 5
    assert "stopped because it hangs: " in program.output
    assert "restart 1 of 1" in program.output
    assert program.output.count("Ready\n") == 2


def test_an_engine_that_hangs_is_left_alone_by_default(launch):
    """Whoever runs specserve sees it in /livez and decides."""
    settings = watched(engine__max_restarts=1)
    program = launch(*settings)
    program.says("engine log")
    program.control(freeze=True)
    stream = cut_off(program.url)
    (port,) = [s.partition("=")[2] for s in settings if s.startswith("sidecar.port")]
    live = f"http://127.0.0.1:{port}/livez"
    wait_until(lambda: requests.get(live, timeout=20).status_code == 503, 90)
    time.sleep(3)
    assert "restart 1" not in program.output
    program.control(freeze=False)
    stream.join(90)  # a request that still runs could outlast the drain
    program.signal(signal.SIGTERM)
    assert program.ends() == 0


def test_a_long_prefill_that_makes_progress_is_no_hang(launch):
    """No token for longer than the canary waits, while canaries are answered and steps are made."""
    restart = {"engine__restart_when_stalled": "true", "engine__max_restarts": 1}
    program = launch(*watched(**restart))
    program.says("engine log")
    program.control(ttft=2)
    answers: list = []
    threads = [complete(program.url, answers, 1) for _ in range(4)]
    time.sleep(8)
    for thread in threads:
        thread.join()
    assert "hangs" not in program.output
    program.control(ttft=0)
    program.signal(signal.SIGTERM)
    assert program.ends() == 0
