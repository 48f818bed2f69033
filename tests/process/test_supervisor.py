"""The loop itself, with a plain child: what a composition may get wrong, and what must be put back."""

from __future__ import annotations

import errno
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specserve.bench.load import LoadClient
from specserve.supervise import state
from specserve.supervise.child import Child
from specserve.supervise.state import EngineState
from specserve.supervise.supervisor import (
    STOP_SIGNALS,
    Hooks,
    Supervisor,
    captured_signals,
    next_signal,
)


@contextmanager
def given_to_another_thread(number: signal.Signals) -> Iterator[None]:
    """A signal that the kernel does not give to the main thread, while that one waits."""
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()  # else it might come when nobody waits for it any more


LIMITS = state.Limits(start_timeout_seconds=10, drain_timeout_seconds=5)


def sleeper() -> Child:
    return Child([sys.executable, "-S", "-c", "import time; time.sleep(60)"], os.environ, print)


def supervisor(
    spawn=sleeper, check_ready=state.Ready, check_alive=lambda: None, changed=lambda m, r: None
):
    return Supervisor(Hooks(spawn, check_ready, check_alive, changed, lambda child: None), LIMITS)


def test_a_program_that_cannot_be_executed_is_final():
    """No retry, the file named, nothing left."""
    machine = supervisor(lambda: Child(["/nonexistent/vllm"], {}, print)).run()
    assert (machine.state, machine.retry) == (EngineState.FATAL, False)
    assert machine.cause == "/nonexistent/vllm cannot be executed (No such file or directory)"


def test_a_machine_that_has_no_process_left_is_not_a_broken_engine():
    """Tried again where restarts are allowed, and reinstalling is not the advice."""

    def spawn() -> Child:
        raise BlockingIOError(
            errno.EAGAIN, os.strerror(errno.EAGAIN)
        )  # as a failed fork: no file is named

    machine = supervisor(spawn).run()
    assert (machine.state, machine.retry) == (EngineState.FATAL, True)
    assert machine.cause == "the engine cannot be executed (Resource temporarily unavailable)"
    assert "limits on processes" in machine.fix


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_readiness_check_ends_the_start_at_once():
    """Otherwise it would look like a load that never ends."""

    def check() -> None:
        raise KeyError("x")

    machine = supervisor(check_ready=check).run()
    assert (machine.state, machine.fix) == (EngineState.FATAL, "report the traceback above")


def test_an_exception_in_a_hook_leaves_no_process():
    """It goes up to the caller, after the child has ended."""
    children: list[Child] = []

    def spawn() -> Child:
        children.append(sleeper())
        return children[0]

    def changed(machine: state.Machine, _: str) -> None:
        if machine.state is EngineState.RUNNING:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        supervisor(spawn, changed=changed).run()
    assert children[0].poll() == -signal.SIGKILL


class Heard(Exception):
    """The stop was dispatched."""


def test_a_signal_is_heard_although_a_check_hangs_and_the_old_handlers_come_back():
    """The check blocks for a minute and the tick is an hour: SIGTERM is dispatched all the same."""
    release = threading.Event()
    before = [signal.getsignal(number) for number in STOP_SIGNALS]

    def changed(machine: state.Machine, _: str) -> None:
        if machine.state is EngineState.STARTING:
            os.kill(
                os.getpid(), signal.SIGTERM
            )  # the handler is in place: the machine runs inside it
        if machine.state is EngineState.STOPPING:
            raise Heard(machine.stop_signal)

    hooks = Hooks(
        sleeper, lambda: release.wait(60) and None, lambda: None, changed, lambda child: None
    )
    with pytest.raises(Heard, match="SIGTERM"):
        Supervisor(hooks, LIMITS, tick_seconds=3600).run()
    release.set()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_that_another_thread_is_given_is_heard():
    """The kernel may give it to a thread that is just starting another; the main thread notices all the same."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    with captured_signals(signals.put), given_to_another_thread(signal.SIGTERM):
        assert next_signal(signals) == signal.SIGTERM


def test_an_interrupt_that_another_thread_is_given_ends_a_benchmark(tmp_path: Path, monkeypatch):
    """The same while the benchmark client works, which may be for an hour."""
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec cat\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    with (
        LoadClient(os.environ) as load,
        given_to_another_thread(signal.SIGINT),
        pytest.raises(KeyboardInterrupt),
    ):
        load.wait_ready()
