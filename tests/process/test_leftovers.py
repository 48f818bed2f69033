"""Records of runs: whose engine still lives, whose port is taken, and what must never be ended."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from programs import wait_until

from specserve.errors import ConfigError, EngineStartError
from specserve.supervise import leftovers
from specserve.supervise.child import Child, session_members
from specserve.supervise.leftovers import (
    Record,
    find,
    folders,
    make_private,
    port_problem,
    require_clean,
)


@pytest.fixture
def orphan(tmp_path):
    """An engine that lives, and the record of a specserve that does not."""
    child = Child([sys.executable, "-S", "-c", "import time; time.sleep(60)"], os.environ, print)
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    record = leftovers.record_of(child.pid, port=8123, log="/logs/engine.log")
    yield dataclasses.replace(record, supervisor=gone.pid)
    child.kill()


def test_an_engine_whose_specserve_is_gone_is_a_leftover(orphan, tmp_path):
    """Named with its living pids; reaping ends it and forgets the record."""
    path = orphan.write(tmp_path)
    (leftover,) = find(tmp_path)
    assert (leftover.record, leftover.pids) == (orphan, (orphan.session,))
    assert leftover.reap() == ()
    assert session_members(orphan.session) == ()
    assert not path.exists()
    assert find(tmp_path) == []


def test_an_engine_whose_specserve_lives_is_none(orphan, tmp_path):
    """Pid and start time together tell that it lives."""
    dataclasses.replace(orphan, supervisor=os.getpid()).write(tmp_path)
    assert find(tmp_path) == []
    assert session_members(orphan.session) == (orphan.session,)


def test_a_supervisor_pid_that_came_again_is_not_the_supervisor(orphan, tmp_path):
    """The pid lives, but it started at another time: the engine is an orphan."""
    dataclasses.replace(orphan, supervisor=os.getpid(), supervisor_started=1.0).write(tmp_path)
    assert len(find(tmp_path)) == 1


def test_an_engine_pid_that_came_again_is_left_alone(orphan, tmp_path):
    """Another program has the recorded pid now: it is not ended, and the record goes."""
    path = dataclasses.replace(orphan, session_started=orphan.session_started - 1000).write(
        tmp_path
    )
    assert require_clean(tmp_path, {}, reap=True) == []
    assert session_members(orphan.session) == (orphan.session,)
    assert not path.exists()


def test_records_of_another_machine_stay(orphan, tmp_path):
    """A shared home folder: pids mean nothing here."""
    path = dataclasses.replace(orphan, host="elsewhere").write(tmp_path)
    assert find(tmp_path) == []
    assert path.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"session": 1}', "null"])
def test_a_record_that_cannot_be_read_is_dropped(tmp_path, text):
    """Half-written or of another version: nothing follows from it."""
    path = tmp_path / "engine-x-1.json"
    path.write_text(text)
    assert find(tmp_path) == []
    assert not path.exists()


def test_a_folder_with_the_name_of_a_record_stays(tmp_path):
    """It says nothing about an engine, and stops no start."""
    folder = tmp_path / "engine-x-1.json"
    folder.mkdir()
    assert find(tmp_path) == []
    assert folder.exists()


def test_a_record_holds_neither_command_nor_environment(orphan, tmp_path):
    """Both may hold secrets."""
    path = orphan.write(tmp_path)
    assert set(json.loads(path.read_text())) == {f.name for f in dataclasses.fields(Record)}


def test_a_taken_port_names_pid_and_command(tmp_path):
    """Also when it is bound to another address of the machine."""
    code = (
        "import socket, time; s = socket.create_server(('0.0.0.0', 0))\n"
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    lines: list[str] = []
    child = Child([sys.executable, "-S", "-c", code], os.environ, lines.append)
    wait_until(lambda: lines)
    try:
        problem = port_problem(tmp_path, "server.port", "127.0.0.1", int(lines[0]))
    finally:
        child.kill()
    assert problem is not None
    assert problem.message == "is taken; it must be free"
    assert problem.facts[0][0] == f"pid {child.pid}"
    assert "import socket, time" in problem.facts[0][1]


def test_an_address_of_another_machine_is_refused(tmp_path, free_port):
    """192.0.2.1 is for documentation and belongs to nobody."""
    with pytest.raises(EngineStartError, match=r"server.port \d+: cannot listen on 192.0.2.1"):
        require_clean(tmp_path, {"server.port": ("192.0.2.1", free_port)}, reap=False)


def test_a_port_that_was_used_a_moment_ago_is_free(tmp_path):
    """Connections in TIME_WAIT do not count."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = server.accept()
            connection.close()
            client.recv(1)
    assert port_problem(tmp_path, "server.port", "127.0.0.1", port) is None


def test_the_folder_prefers_the_state_home_and_falls_back_to_the_temp_folder(tmp_path):
    """HOME that cannot be written is the usual case in a hardened container."""
    assert folders({"XDG_STATE_HOME": str(tmp_path)}).run == tmp_path / "specserve" / "run"
    assert (
        folders({"HOME": str(tmp_path)}).run == tmp_path / ".local" / "state" / "specserve" / "run"
    )
    fallback = tmp_path / f"specserve-{os.getuid()}"
    (tmp_path / "file").write_text("")
    assert (
        folders({"HOME": str(tmp_path / "file" / "home"), "TMPDIR": str(tmp_path)}).run == fallback
    )
    assert folders({"TMPDIR": str(tmp_path)}).run == fallback


def test_the_folder_is_private_and_ones_own(tmp_path):
    """What lies in it decides which processes --reap ends."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o777)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(ConfigError, match="must be a folder of your own"):
        make_private(link)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        make_private(Path(file) / "below")
