"""What grows on the host while the engine serves: memory and threads of its processes. Pure.

The least of the last half hour against the least of the half hour that began two hours ago: a
sawtooth of garbage collection grows in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

STEP_SECONDS = 60.0
HALF_HOUR = 1_800.0
BETWEEN_SECONDS = 5_400.0
"""From the one half hour to the other."""
MEMORY_SECONDS = BETWEEN_SECONDS + HALF_HOUR


@dataclass(slots=True)
class Growth:
    """The values of one quantity over the last two hours."""

    _points: list[tuple[float, float]] = field(default_factory=list)
    _owner: tuple[int, ...] = ()

    def observe(self, now: float, value: float, owner: Sequence[int]) -> float | None:
        """Take a value in; the growth per hour as part of what it was. None before two hours of the
        same processes.

        >>> growth, found = Growth(), None
        >>> for minute in range(121):
        ...     found = growth.observe(60.0 * minute, 100.0 + minute, [7])
        >>> round(found, 2)
        0.6
        """
        main = tuple(owner[:1])
        if main != self._owner:
            self._points, self._owner = [], main
        if not self._points or now - self._points[-1][0] >= STEP_SECONDS:
            self._points.append((now, value))
        self._points = [point for point in self._points if point[0] >= now - MEMORY_SECONDS]
        if self._points[0][0] > now - MEMORY_SECONDS + STEP_SECONDS:
            return None
        before = [value for at, value in self._points if at <= now - BETWEEN_SECONDS]
        lately = [value for at, value in self._points if at >= now - HALF_HOUR]
        if not before or not lately or min(before) <= 0:
            return None
        return (min(lately) / min(before) - 1) * 3600 / BETWEEN_SECONDS
