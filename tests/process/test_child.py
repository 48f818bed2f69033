"""One process group: its output is drained and bounded, and all of it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest
from programs import wait_until

from specserve.supervise.child import (
    KEPT_BYTES,
    KEPT_LINES,
    LINE_BYTES,
    Child,
    LastLines,
)


def python(code: str, lines: list[str] | None = None) -> Child:
    """A child that runs Python code; its lines go into the list."""
    return Child(
        [sys.executable, "-S", "-c", code], os.environ, (lines if lines is not None else []).append
    )


def ended(child: Child) -> int:
    """Wait for its end and its last line."""
    wait_until(lambda: child.poll() is not None)
    child.finish()
    return child.poll()


def test_stdout_and_stderr_arrive_in_order_and_progress_bars_as_lines():
    """One pipe, so the order is the program's; a carriage return ends a line, blank ones are dropped."""
    lines: list[str] = []
    child = python(
        "import os\nfor fd, t in ((1,b'a\\n'),(2,b'10%\\r20%\\r\\n'),(1,b'\\n\\xff'),): os.write(fd, t)",
        lines,
    )
    assert ended(child) == 0
    assert lines == ["a", "10%", "20%", "\ufffd"]
    assert child.lines() == lines


def test_a_long_line_is_cut_and_the_next_one_is_whole():
    """A megabyte without a line end neither grows memory nor swallows what follows."""
    child = python("print('x' * 2**20); print('after')")
    assert ended(child) == 0
    assert child.lines() == ["x" * LINE_BYTES + " ...", "after"]


def test_the_tail_keeps_the_newest_within_both_bounds():
    """2000 lines, and a megabyte."""
    tail = LastLines()
    for n in range(KEPT_LINES + 5):
        tail.add(str(n))
    assert (tail.lines()[0], len(tail.lines())) == ("5", KEPT_LINES)
    for _ in range(400):
        tail.add("y" * 4000)
    assert sum(map(len, tail.lines())) <= KEPT_BYTES
    assert len(tail.lines()) == KEPT_BYTES // 4000


def test_a_sink_that_fails_does_not_stop_the_draining():
    """The terminal went away: the child still writes a megabyte and ends."""

    def broken(_: str) -> None:
        raise BrokenPipeError

    child = Child(
        [sys.executable, "-S", "-c", "print(('z' * 99 + '\\n') * 10000)"], os.environ, broken
    )
    assert ended(child) == 0
    assert len(child.lines()) == KEPT_LINES


def test_what_cannot_be_executed_is_an_oserror():
    """The caller names it; nothing is left."""
    with pytest.raises(FileNotFoundError):
        Child(["/nonexistent/vllm"], {}, print)


def test_a_process_in_its_own_group_is_found_by_the_session():
    """vLLM's data-parallel supervisor calls setpgrp; killing the group alone would miss it."""
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], process_group=0)\n"
        "print('up', flush=True); time.sleep(60)"
    )
    lines: list[str] = []
    child = python(code, lines)
    wait_until(lambda: lines == ["up"])
    members = child.session.members()
    assert len(members) == 2
    assert {os.getpgid(pid) for pid in members} == set(members)
    assert child.kill() == ()
    assert child.session.members() == ()
    assert child.poll() == -9


def test_shared_memory_of_a_killed_program_is_deleted():
    """Python's resource tracker is spared for a moment, so that /dev/shm does not fill kill by kill."""
    code = (
        "import time\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "m = SharedMemory(create=True, size=1000)\nprint(m.name, flush=True); time.sleep(60)"
    )
    lines: list[str] = []
    child = python(code, lines)
    wait_until(lambda: lines)
    memory = Path("/dev/shm") / lines[0]
    assert memory.exists()
    assert child.kill() == ()
    assert not memory.exists()


def test_kill_answers_who_is_still_there():
    """With no time to wait, the members that were found are named."""
    child = python("import time; time.sleep(60)")
    assert child.session.kill(timeout=0) == (child.pid,)
    assert child.kill() == ()


def test_finish_leaves_descendants_a_moment_to_follow():
    """A grandchild that ends by itself within the second is not killed."""
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(0.3); print(1)'])"
    )
    lines: list[str] = []
    child = python(code, lines)
    wait_until(lambda: child.poll() is not None)
    assert child.finish() == ()
    assert lines == ["1"]
    assert (
        not psutil.pid_exists(child.pid)
        or psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    )
