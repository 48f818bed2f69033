"""The loop: wait for a signal or a tick, poll the child, advance the state machine, act.

Signal handlers only put the number on a queue; everything else happens in the loop. A blocked
``SimpleQueue.get`` returns at once when a handler puts something, which waiting on an Event does
not. Nothing waits without an end: a thread that is just starting another may be given the signal,
Python runs the handler in the main thread only, and does not wake it for that.
"""

from __future__ import annotations

import errno
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from specserve.supervise import state
from specserve.supervise.child import Child, exit_cause
from specserve.supervise.state import Action, Lifecycle

TICK_SECONDS = 0.2
STOP_SIGNALS = (
    signal.SIGTERM,  # Kubernetes, systemd, kill
    signal.SIGINT,  # Ctrl-C
    signal.SIGHUP,  # the terminal went away; ignored when it was ignored before, as under nohup
    signal.SIGQUIT,  # Ctrl-\: at once, without draining
)

Check = Callable[[], state.Event | None]
"""Asks the engine; blocks for some seconds at most. None means that there is nothing new yet."""


@dataclass(frozen=True)
class Hooks:
    """What the supervisor calls, from the program around it."""

    spawn: Callable[[], Child]
    """Starts the engine; may raise OSError."""
    check_ready: Check
    """Asked while starting: ``Ready`` or ``Failed`` end the asking."""
    check_alive: Check
    """Asked while running: ``Failed`` when the engine says that it is dead."""
    changed: Callable[[Lifecycle, str], None]
    """Called after every transition, with its reason."""
    gone: Callable[[Child], None]
    """Called when a child has ended with its whole group."""


@dataclass(frozen=True)
class _Checked:
    """What a check found, and about which child."""

    pid: int
    event: state.Event


class Supervisor:
    """Runs one engine until it has stopped or cannot be kept alive."""

    def __init__(
        self,
        hooks: Hooks,
        limits: state.Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        tick_seconds: float = TICK_SECONDS,
        ready_seconds: float = 0.25,
        alive_seconds: float = 1.0,
    ) -> None:
        self.machine = Lifecycle()
        self.child: Child | None = None
        self._hooks = hooks
        self._limits = limits
        self._clock = clock
        self._tick = tick_seconds
        self._ready_pause = ready_seconds
        self._alive_pause = alive_seconds
        self._queue: queue.SimpleQueue[int | _Checked] = queue.SimpleQueue()

    def run(self) -> Lifecycle:
        """Run from the start to the end; returns the machine in its last state.

        Whatever happens, no process stays behind.
        """
        with captured_signals(self._queue.put):
            try:
                self._apply(state.Start())
                while not self.machine.over:
                    self._wait()
                    self._poll()
                    self._apply(state.Tick())
            finally:
                self._end_child()
        return self.machine

    def _wait(self) -> None:
        """One tick, cut short by a signal or by what a check found."""
        try:
            item = self._queue.get(timeout=self._tick)
        except queue.Empty:
            return
        if isinstance(item, int):
            name = signal.Signals(item).name
            self._apply(state.Stop(name, at_once=item == signal.SIGQUIT))
        elif self.child is not None and item.pid == self.child.pid:
            self._apply(item.event)

    def _poll(self) -> None:
        """When the leader has gone, end its whole group, and then say so."""
        if self.child is None:
            return
        status = self.child.poll()
        if status is not None:
            self._end_child()
            self._apply(state.Exited(exit_cause(status)))

    def _end_child(self) -> None:
        child, self.child = self.child, None
        if child is None:
            return
        if child.poll() is None:
            child.kill()
        else:
            child.finish()
        self._hooks.gone(child)

    def _apply(self, event: state.Event) -> None:
        transition = state.advance(self.machine, event, self._clock(), self._limits)
        self.machine = transition.machine
        if transition.reason is not None:
            self._hooks.changed(self.machine, transition.reason)
        match transition.action:
            case Action.START:
                self._spawn()
            case Action.TERMINATE if self.child is not None:
                self.child.terminate()
            case Action.KILL if self.child is not None:
                self.child.kill()
            case _:
                pass

    def _spawn(self) -> None:
        try:
            self.child = self._hooks.spawn()
        except OSError as error:
            broken = error.filename is not None  # else the machine refused us a process or a pipe
            fix = "free memory, or raise the limits on processes and files"
            cause = f"{error.filename or 'the engine'} cannot be executed ({error.strerror})"
            if error.errno == errno.E2BIG:
                broken, cause = True, "its command and environment are longer than the system takes"
                fix = "shorten engine.extra_args, engine.env or server.served_model_name"
            elif broken:
                fix = "reinstall the engine"
            self._apply(state.Failed(cause, retry=not broken, fix=fix))
            self._apply(state.Exited("never started"))
            return
        threading.Thread(
            target=self._ask, args=(self.child,), name="engine-check", daemon=True
        ).start()

    def _ask(self, child: Child) -> None:
        """In a thread of its own: a check that hangs must not keep the loop from a signal."""
        event: state.Event | None = state.Failed(
            "specserve's own readiness check failed, a bug",
            retry=False,
            fix="report the traceback above",
        )
        try:
            event = self._until_decided(child, self._hooks.check_ready, self._ready_pause)
        finally:
            self._decided(child, event)
        if isinstance(event, state.Ready):
            event = self._until_decided(child, self._hooks.check_alive, self._alive_pause)
            self._decided(child, event)

    def _decided(self, child: Child, event: state.Event | None) -> None:
        if event is not None:
            self._queue.put(_Checked(child.pid, event))

    def _until_decided(self, child: Child, check: Check, pause: float) -> state.Event | None:
        """Ask until there is an event; None when the child has gone before."""
        while self.child is child and child.poll() is None:
            event = check()
            if event is not None:
                return event
            time.sleep(pause)
        return None


@contextmanager
def captured_signals(put: Callable[[int], None]) -> Iterator[None]:
    """Give the stop signals to ``put``, that of a queue; afterwards the previous handlers are back.

    A handler must not log, print or take a lock: it may run between any two instructions of the
    main thread.
    """

    def handler(number: int, _frame: FrameType | None) -> None:
        put(number)

    with ExitStack() as restoring:
        for number in STOP_SIGNALS:
            previous = signal.getsignal(number)
            if previous is not signal.SIG_IGN:
                signal.signal(number, handler)
                restoring.callback(signal.signal, number, previous)
        yield


def next_signal(captured: queue.SimpleQueue[int]) -> int:
    """Wait for the next of `captured_signals`. Looks up at every tick, for the reason above."""
    while True:
        with suppress(queue.Empty):
            return captured.get(timeout=TICK_SECONDS)
