"""Who has a port, and whose engine it is that answers there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Program, unused_port, wait_until

from specserve.errors import EngineStartError
from specserve.supervise.child import Child
from specserve.supervise.ports import Answerer, answerer, claimed

LISTENS = """
import socket, sys, time
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(sys.argv[3]))
server.bind((sys.argv[1], int(sys.argv[2])))
server.listen()
{then}
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def listening(free_port):
    """``listening("127.0.0.1")`` is a process of its own that listens there."""
    started: list[Child] = []

    def listen(host: str, *, reuse: int = 0, then: str = "") -> Child:
        lines: list[str] = []
        code = LISTENS.format(then=then)
        argv = [sys.executable, "-S", "-c", code, host, str(free_port), str(reuse)]
        child = Child(argv, os.environ, lines.append)
        started.append(child)
        wait_until(lambda: "up" in lines)
        return child

    yield listen
    for child in started:
        child.kill()


def test_a_listener_of_the_engine_is_ours_and_another_is_not(listening, free_port):
    """Told by the process that has the socket, not by what it answers."""
    engine = listening("127.0.0.1")
    assert answerer(engine.session, free_port) == (Answerer.OURS, "")
    other = Child([sys.executable, "-S", "-c", "import time; time.sleep(60)"], os.environ, print)
    who, words = answerer(other.session, free_port)
    other.kill()
    assert who is Answerer.STRANGER
    assert f"port {free_port} is answered by pid {engine.pid} (" in words
    assert words.endswith("not by this engine")


@pytest.mark.parametrize(
    "then",
    [
        "import os; (os.fork() or os.fork()) and os._exit(0)",  # two forks have the socket
        "import os; os.fork() and os._exit(0); os.setsid()",  # one in a session of its own
    ],
)
def test_several_api_servers_may_have_the_socket(listening, free_port, then):
    """Each is a process of the engine, also when its first process has handed it on."""
    engine = listening("0.0.0.0", then=then)
    assert answerer(engine.session, free_port) == (Answerer.OURS, "")


def test_an_engine_that_shares_its_port_with_a_stranger_is_not_ready(listening, free_port):
    """SO_REUSEPORT gives each a part of the traffic, whatever model each has."""
    engine = listening("127.0.0.1", reuse=1)
    stranger = listening("127.0.0.1", reuse=1)
    who, words = answerer(engine.session, free_port)
    assert who is Answerer.STRANGER
    assert f"pid {stranger.pid} " in words
    assert f"pid {engine.pid} " not in words


def test_a_listener_on_another_address_takes_no_traffic(listening, free_port):
    """The same port of another address is somebody else's right."""
    engine = listening("127.0.0.1")
    listening("127.0.0.2")
    assert answerer(engine.session, free_port) == (Answerer.OURS, "")


def test_where_nobody_is_seen_it_is_said(listening, free_port):
    """As in a sandbox whose /proc shows no sockets: neither ours nor a stranger's."""
    engine = listening("127.0.0.1")
    who, words = answerer(engine.session, unused_port())
    assert who is Answerer.UNSEEN
    assert "cannot be seen" in words


def test_a_port_is_for_one_launch_until_it_ends(tmp_path, free_port):
    """The second is told who has it, for each key at once; then the port is free again."""
    keys = {"server.port": free_port, "sidecar.port": unused_port()}
    with claimed(tmp_path, keys) as notes:
        assert notes == []
        with pytest.raises(EngineStartError) as caught, claimed(tmp_path, keys):
            pass
    assert [p.where for p in caught.value.problems] == [f"{k} {n}" for k, n in keys.items()]
    assert f"is held by specserve pid {os.getpid()}, whose engine" in str(caught.value)
    with claimed(tmp_path, keys) as notes:
        assert notes == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_launch_gives_its_port_back(tmp_path, free_port):
    """The kernel has the lock, not the file that is left."""
    code = (
        "import sys, time; from pathlib import Path; from specserve.supervise.ports import claimed\n"
        "with claimed(Path(sys.argv[1]), {'server.port': int(sys.argv[2])}):\n"
        "    print('up', flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path), str(free_port)]
    holder = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    with pytest.raises(EngineStartError), claimed(tmp_path, {"server.port": free_port}):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with claimed(tmp_path, {"server.port": free_port}) as notes:
        assert notes == []


def test_a_lock_that_is_no_file_is_a_warning(tmp_path, free_port):
    """A link or a pipe in its place is not followed and does not hold us."""
    with claimed(tmp_path, {"server.port": free_port}):
        (lock,) = tmp_path.iterdir()
    outside = tmp_path / "outside"
    outside.write_text("kept")
    lock.symlink_to(outside)
    with claimed(tmp_path, {"server.port": free_port}) as notes:
        assert "cannot be locked" in notes[0]
    assert outside.read_text() == "kept"


def test_a_second_launch_on_a_port_that_only_loads_is_refused(
    launch: Callable[..., Program], tmp_path: Path
) -> None:
    """The first has bound the port and does not listen yet; the second starts nothing."""
    first = launch("--stub-ready-after", 60)
    first.says("loading target weights")
    second = launch("--ready-file", tmp_path / "b.json")
    assert second.ends() == 4
    assert (
        f"Error: server.port {first.port}: is held by specserve pid {first.process.pid}, whose "
        "engine runs or is starting there; it must be free" in second.output
    )
    assert "importing" not in second.output
    assert not (tmp_path / "b.json").exists()
    first.signal(signal.SIGTERM)
    assert first.ends() == 130


def test_of_launches_at_the_same_instant_one_serves_and_the_others_end_with_4(
    launch: Callable[..., Program],
) -> None:
    """Different server ports and the same port of the sidecar."""
    sidecar = ("--set", "sidecar.enabled=true", "--set", f"sidecar.port={unused_port()}")
    programs = [launch(*sidecar, port=unused_port()) for _ in range(4)]
    wait_until(lambda: sum(p.process.poll() is None for p in programs) == 1)
    (serving,) = [p for p in programs if p.process.poll() is None]
    refused = [p for p in programs if p is not serving]
    assert [p.process.returncode for p in refused] == [4, 4, 4]
    assert all("sidecar.port" in p.output for p in refused)
    serving.says("engine log")
    serving.signal(signal.SIGTERM)
    assert serving.ends() == 0


def test_ready_is_not_said_of_somebody_elses_engine(
    launch: Callable[..., Program], stub: Callable[..., Program], free_port: int, tmp_path: Path
) -> None:
    """Another program listens on the port while ours loads: no Ready, no ready file, and its pid."""
    limit = ("--set", "engine.startup_timeout_seconds=8")
    program = launch("--stub-ready-after", 60, "--ready-file", tmp_path / "b.json", *limit)
    program.says("loading target weights")
    other = stub("--served-model-name", "tiny", port=free_port)
    assert program.ends() == 4
    assert "Ready\n" not in program.output
    assert not (tmp_path / "b.json").exists()
    assert f"port {free_port} is answered by pid {other.process.pid} (" in program.output


def test_connections_are_refused_while_nobody_listens(free_port):
    """What the tests above rest on: a socket that is bound and does not listen takes none."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", free_port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", free_port), timeout=5)
