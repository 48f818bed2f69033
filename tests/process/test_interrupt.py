"""Ctrl-C at any moment of a command's first instants."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize("command", [("config", "schema"), ("--version",)], ids=lambda c: c[0])
def test_an_interrupt_at_any_moment_shows_no_traceback(command: tuple[str, ...]) -> None:
    """From the interpreter's own start, which no program sees, to the end of what it prints."""
    shown = []
    for step in range(1, 25):
        argv = [sys.executable, "-S", "-c", START, *command]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(1)  # the interpreter has started
            time.sleep(step * 0.01)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        assert process.returncode in (0, 130, -signal.SIGINT), said
        if b"Traceback" in said:
            shown.append((step, said.decode()))
    assert shown == []


START = f"""
import os, sys
sys.path[:] = {sys.path!r}
os.write(1, b".")
from specserve.__main__ import main
main()
"""
"""The interpreter without its site, which imports for as long as the program does."""
