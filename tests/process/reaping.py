"""Records of runs: whose engine still lives, and what must never be ended.

Run by test_reaping.py in a pid namespace of its own: a mistake here ends other people's processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from programs import unused_port, wait_until

from specserve.supervise import leftovers
from specserve.supervise.child import Child
from specserve.supervise.leftovers import MAX_PID, Record, find, require_clean
from specserve.supervise.processes import started_at


@pytest.fixture(autouse=True)
def alone() -> None:
    """Never outside a pid namespace of our own."""
    assert len(psutil.pids()) < 30, "run tests/process/test_reaping.py instead"


@pytest.fixture
def orphan(tmp_path):
    """An engine that lives, and the record of a specserve that does not."""
    child = Child([sys.executable, "-S", "-c", "import time; time.sleep(60)"], os.environ, print)
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    record = leftovers.record_of(child.session, port=8123, log=Path("/logs/engine.log"))
    assert record is not None
    yield record.model_copy(update={"supervisor": gone.pid})
    child.kill()


def changed(record: Record, **values: object) -> Record:
    """The record with other values, checked as one that is read."""
    return Record(**{**record.model_dump(), **values})


def test_an_engine_whose_specserve_is_gone_is_a_leftover(orphan, tmp_path):
    """Named with its living pids; reaping ends it and forgets the record."""
    path = orphan.write(tmp_path)
    (leftover,) = find(tmp_path)
    assert (leftover.record, leftover.pids) == (orphan, (orphan.session,))
    assert leftover.reap() == ()
    assert orphan.engine.members() == ()
    assert not path.exists()
    assert find(tmp_path) == []


def test_an_engine_whose_specserve_lives_is_none(orphan, tmp_path):
    """Pid and start time together tell that it lives."""
    alive = {"supervisor": os.getpid(), "supervisor_started": started_at(os.getpid())}
    changed(orphan, **alive).write(tmp_path)
    assert find(tmp_path) == []
    assert orphan.engine.members() == (orphan.session,)


def test_a_supervisor_pid_that_came_again_is_not_the_supervisor(orphan, tmp_path):
    """The pid lives, but it started at another time: the engine is an orphan."""
    changed(orphan, supervisor=os.getpid(), supervisor_started=1).write(tmp_path)
    assert len(find(tmp_path)) == 1


def test_an_engine_pid_that_came_again_is_left_alone(orphan, tmp_path):
    """Another program has the recorded pid now: it is not ended, and the record goes."""
    other = {"run": "0" * 32, "output": None, "session_started": orphan.session_started - 1000}
    path = changed(orphan, **other).write(tmp_path)
    assert require_clean(tmp_path, {}, reap=True) == []
    assert orphan.engine.members() == (orphan.session,)
    assert not path.exists()


@pytest.fixture
def strangers(tmp_path):
    """A job of somebody else in a session whose leader is gone, as a daemon is, or `nohup job &`."""
    code = (
        "import subprocess, sys\n"
        "job = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "print(job.pid)"
    )
    argv = [sys.executable, "-S", "-c", code]
    leader = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert leader.stdout is not None
    job = psutil.Process(int(leader.stdout.readline()))
    leader.wait()
    leader.stdout.close()
    yield leader.pid, job
    job.kill()
    wait_until(lambda: started_at(job.pid) is None)


@pytest.mark.parametrize("boot", ["of today", "of another day"])
def test_a_session_number_that_came_again_is_left_alone(orphan, strangers, tmp_path, boot):
    """Its leader is gone, so its number alone proves nothing: no process of it is ours."""
    session, job = strangers
    values = {"session": session, "run": "0" * 32, "output": None, "session_started": 1}
    if boot == "of another day":
        values["boot"] = boot
    path = changed(orphan, **values).write(tmp_path)
    assert require_clean(tmp_path, {}, reap=True) == []
    assert job.is_running()
    assert not path.exists()


@pytest.mark.parametrize(
    "hidden",
    [
        "libc.prctl(8, 0)",  # nothing: as it is
        "os.execve(sys.executable, [sys.executable, '-S', '-c', sleep], {})",  # its environment
        "os.dup2(null, 1), os.dup2(null, 2)",  # its output
        # Both.
        "os.dup2(null, 1), os.dup2(null, 2);os.execve(sys.executable, [sys.executable, '-S', '-c', sleep], {})",
        "os.setsid()",  # its session
    ],
)
def test_what_an_engine_leaves_is_found_however_it_looks(tmp_path, hidden):
    """Its leader is gone, and what is left may have hidden one mark or another; one sibling that
    still carries any proves the session."""
    code = f"""
import ctypes, os, subprocess, sys, time
libc, sleep, null = ctypes.CDLL(None), "import time; time.sleep(60)", os.open(os.devnull, os.O_RDWR)
if os.fork() == 0:
    {hidden}
    time.sleep(60)
if os.fork() == 0:
    time.sleep(60)
time.sleep(0.3)
"""
    lines: list[str] = []
    child = Child([sys.executable, "-S", "-c", code], os.environ, lines.append)
    wait_until(lambda: child.poll() is not None)
    record = leftovers.record_of(child.session, port=8123, log=Path("/x"))
    assert record is not None
    changed(record, supervisor=1, supervisor_started=1).write(tmp_path)
    (leftover,) = find(tmp_path)
    assert len(leftover.pids) == 2
    assert leftover.reap() == ()
    assert child.session.members() == ()


def test_a_record_that_fits_a_strangers_session_in_all_but_the_run_ends_nothing(orphan, tmp_path):
    """Pid, start and boot are those of a living process, and none of its processes is the run's."""
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    stranger = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
    values = {"session": stranger.pid, "session_started": started_at(stranger.pid)}
    changed(orphan, **values, run="0" * 32).write(tmp_path)
    assert require_clean(tmp_path, {}, reap=True) == []
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_records_of_another_machine_stay(orphan, tmp_path):
    """A shared home folder: pids mean nothing here."""
    path = changed(orphan, host="elsewhere", boot="another").write(tmp_path)
    assert find(tmp_path) == []
    assert path.exists()


def test_records_of_another_container_stay(orphan, tmp_path):
    """The same machine and folder, but other pids: an engine that cannot be seen is not gone."""
    path = changed(orphan, pid_namespace=1, session=MAX_PID).write(tmp_path)
    assert find(tmp_path) == []
    assert path.exists()


GOOD = {
    "run": "0" * 32,
    "boot": "b",
    "pid_namespace": 1,
    "host": "h",
    "session": 4,
    "session_started": 1,
    "output": 1,
    "supervisor": 3,
    "supervisor_started": 1,
    "port": 8000,
    "log": "x",
}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "\0", "[" * 100_000, '{"a":' * 100_000),
        json.dumps({"session": 1}),
        *(
            json.dumps({**GOOD, name: value})
            for name in ("session", "supervisor", "session_started")
            for value in ("4", -1, 1.5, None, True, [4], {}, 2**70, float("nan"))
        ),
        *(json.dumps({**GOOD, "session": value}) for value in (0, 1)),
        json.dumps({**GOOD, "more": 1}),
        json.dumps({**GOOD, "log": "x" * 100_000}),
        json.dumps({**GOOD, "run": "../../../etc"}),
        json.dumps({k: v for k, v in GOOD.items() if k != "boot"}),
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_record_is_named_and_stops_no_start(tmp_path, text):
    """Half-written, of another version, forged: nothing is ended because of it, and it is said."""
    path = tmp_path / "engine-x-1.json"
    path.write_text(text)
    assert find(tmp_path) == []
    (note,) = require_clean(tmp_path, {}, reap=True)
    assert note.startswith(f"Warning: {path}: is no record of an engine (")
    assert note.endswith(f"Fix: rm -r -- {path}")
    assert len(note) < 1000


def test_what_has_the_name_of_a_record_and_is_no_file_is_named(tmp_path):
    """A folder, a pipe, a device and a link to nowhere say nothing about an engine."""
    (tmp_path / "engine-folder.json").mkdir()
    os.mkfifo(tmp_path / "engine-pipe.json")
    (tmp_path / "engine-zero.json").symlink_to("/dev/zero")
    (tmp_path / "engine-away.json").symlink_to("/nonexistent")
    (tmp_path / "engine-huge.json").write_bytes(b" " * 2**20)
    (tmp_path / "engine-latin.json").write_bytes(b"\xff")
    assert find(tmp_path) == []
    notes = "\n".join(require_clean(tmp_path, {}, reap=True))
    for name, why in (
        ("folder", "Is a directory"),
        ("pipe", "not a regular file"),
        ("zero", "not a regular file"),
        ("huge", "has more than 65536 bytes"),
        ("latin", "it is not UTF-8 text"),
    ):
        assert f"engine-{name}.json: is no record of an engine ({why})" in notes
    assert len(list(tmp_path.iterdir())) == 6


def test_a_record_holds_neither_command_nor_environment(orphan, tmp_path):
    """Both may hold secrets."""
    path = orphan.write(tmp_path)
    assert set(json.loads(path.read_text())) == set(Record.model_fields)


def test_a_taken_port_names_its_holder_and_starts_nothing(launch, stub):
    """Pid and command of the foreign process, exit code 4, and the process is left alone, --reap or not."""
    other = stub()
    program = launch("--reap", port=other.port)
    assert program.ends() == 4
    assert f"Error: server.port {other.port}: is taken; it must be free" in program.output
    assert f"pid {other.process.pid}" in program.output
    assert "importing" not in program.output
    assert other.process.poll() is None


def test_after_kill_9_of_specserve_the_next_start_names_the_orphan_and_reap_ends_it(
    launch, records
):
    """The engine hangs, so that SIGTERM does not end it: refused with pid and log; `--reap` ends
    leader and grandchild, then starts."""
    first = launch("--stub-grandchild")
    first.says("engine log")
    facts = first.control()
    psutil.Process(facts["pid"]).suspend()
    first.process.kill()
    first.process.wait()
    second = launch()
    assert second.ends() == 4
    assert (
        f"Error: left behind: specserve pid {first.process.pid} is gone and its engine still runs"
        in second.output
    )
    assert f"pid {facts['pid']}" in second.output
    assert f"pid {facts['grandchild_pid']}" in second.output
    assert "Fix: the same command with --reap" in second.output
    third = launch("--reap")
    third.says("engine log")
    assert (
        f"ended what an earlier run left behind: pid {facts['pid']}, {facts['grandchild_pid']}"
        in third.output
    )
    assert len(records()) == 1
    third.signal(signal.SIGTERM)
    assert third.ends() == 0


def test_two_launches_side_by_side_do_not_mistake_each_other(launch):
    """An engine whose specserve lives is no leftover, also under --reap."""
    first = launch()
    first.says("engine log")
    second = launch("--reap", port=unused_port())
    second.says("engine log")
    assert first.process.poll() is None
    for program in (first, second):
        program.signal(signal.SIGTERM)
    assert (first.ends(), second.ends()) == (0, 0)
