"""What a benchmark will do, decided before anything runs: legs in A B B A order, blocks in each
leg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.bench.result import Block
from specserve.bench.workload import Workload


@dataclass(frozen=True)
class Step:
    """One block to measure."""

    index: int
    arm: str
    workload: str
    concurrency: int


@dataclass(frozen=True)
class BenchPlan:
    """Two or more arms, the load on each, and how often."""

    arms: tuple[str, ...]
    workloads: tuple[Workload, ...]
    concurrency: tuple[int, ...]
    repeat: int = 1
    warmups: int = 4
    """Requests sent before the first block of each start; their times are thrown away."""

    def steps(self) -> tuple[Step, ...]:
        """Every block in order.

        A replay brings its own load: the largest concurrency only bounds it.
        """
        out: list[Step] = []
        for arm in legs(self.arms, self.repeat):
            for workload in self.workloads:
                loads = self.concurrency
                if workload.is_timed:
                    loads = (max(loads),)
                for concurrency in loads:
                    out.append(Step(len(out), arm, workload.name, concurrency))
        return tuple(out)

    def left(self, blocks: Sequence[Block]) -> tuple[Step, ...] | None:
        """What is still to be measured after these blocks; None if they are not the first of this
        plan."""
        steps = self.steps()
        done = [(b.arm, b.workload, b.concurrency) for b in blocks]
        if done != [(s.arm, s.workload, s.concurrency) for s in steps[: len(done)]]:
            return None
        return steps[len(done) :]


def legs(arms: Sequence[str], repeat: int) -> list[str]:
    """The order of the arms: forth and back, so that a steady drift of the machine hits both alike.

    >>> legs(["off", "on"], 1)
    ['off', 'on', 'on', 'off']
    """
    return [*arms, *reversed(arms)] * repeat
