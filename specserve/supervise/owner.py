"""A launch that ends with the program that started it, however that one ends.

A benchmark or a check that is killed cannot end the servers that it launched. So the launch looks:
a pid and its start time need no pipe that a fork could keep open.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Self

from specserve.supervise.processes import started_at

LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Owner:
    """A process, as an argument of the command line."""

    pid: int
    started: int
    """In ticks since the boot."""

    @classmethod
    def ourselves(cls) -> Self | None:
        """This process; None where /proc does not tell when it started."""
        started = started_at(os.getpid())
        if started is None:
            return None
        return cls(os.getpid(), started)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``PID:TICKS``. Raises ValueError."""
        pid, colon, started = text.partition(":")
        if not (colon and pid.isdecimal() and started.isdecimal()):
            raise ValueError(f"'{text}' is not PID:TICKS")
        return cls(int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    @property
    def lives(self) -> bool:
        """Whether it is there; a zombie is not."""
        return started_at(self.pid) == self.started

    def end_with_it(self) -> None:
        """From now on this process ends when the owner does."""
        threading.Thread(target=self._watch, name="owner", daemon=True).start()

    def _watch(self) -> None:
        while self.lives:
            time.sleep(LOOK_SECONDS)
        while True:
            # The supervisor takes the first for "at once", since nobody waits for an answer; before
            # it listens, nothing is started yet that the second could leave behind.
            number = signal.SIGTERM
            if callable(signal.getsignal(signal.SIGQUIT)):
                number = signal.SIGQUIT
            os.kill(os.getpid(), number)
            time.sleep(LOOK_SECONDS)
