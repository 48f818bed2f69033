"""Whose port is taken, and where records lie."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from programs import wait_until

from specserve.errors import ConfigError, EngineStartError
from specserve.supervise.child import Child
from specserve.supervise.leftovers import folders, make_private, port_problem, require_clean


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


def test_a_home_that_may_not_be_entered_is_none(tmp_path):
    """As after `sudo -E`, or with a HOME of mode 700 of somebody else."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    code = (
        "import os, sys; from specserve.supervise.leftovers import folders\n"
        "os.seteuid(65534)\n"
        "try: print(folders({'HOME': sys.argv[1], 'TMPDIR': '/tmp'}).run)\n"
        "finally: os.seteuid(0)"
    )
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    argv = [sys.executable, "-c", code, str(home)]
    out = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "/tmp/specserve-0"


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
