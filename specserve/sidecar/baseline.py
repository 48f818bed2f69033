"""What is normal here: a robust reference from the recent good past of this very deployment.

One point every few minutes, kept for a day. The reference is the median of the points that are old
enough not to be part of a drop that is happening now. A point that is much worse than the reference
is not taken in, so a drop does not teach itself; when it lasts longer than the memory, it has
become the new normal.

Kept on disk between restarts: what depends on the draft under the identity of the pair, what
depends on the requests alone (prefix hits, lengths) under that of the target, so that another
method starts with it. An upgrade of the engine is measured against what was before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from specserve.config.schema import Settings
from specserve.files import read_small, write_whole
from specserve.metric_families import MetricKey, Readings, key

LOG = logging.getLogger("specserve.sidecar")
POINT_SECONDS = 300.0
MEMORY_SECONDS = 86_400.0
SETTLE_SECONDS = 1_800.0
"""Age at which a point counts."""
MIN_POINTS = 6
MIN_DRAFT_TOKENS = 1_000
MIN_DRAFTS = 100
MIN_REQUESTS = 20
USUAL_POSITION0 = "specserve_usual_position0_acceptance_rate"
WINDOW = "5m"


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number that has a reference of its own."""

    reading: str
    reference: str
    sample: str
    min_samples: float
    tolerance: float
    """How much worse than the reference a point may be and still be taken in."""
    worse: int
    """-1 when smaller is worse, 1 when larger is."""
    drift: str | None = None
    position: str | None = None
    """The place in the draft, of a reading that has one for each."""
    stat: str | None = None
    """Which number of a distribution."""
    of_target: bool = False
    """Whether it depends on the requests alone, not on the draft."""

    def in_window(self, window: str) -> MetricKey:
        """The reading in one window."""
        if self.position is not None:
            return key(self.reading, position=self.position, window=window)
        if self.stat is not None:
            return key(self.reading, stat=self.stat, window=window)
        return key(self.reading, window=window)


QUANTITIES = (
    Quantity(
        "specserve_acceptance_rate",
        "specserve_acceptance_rate_baseline",
        "specserve_window_draft_tokens",
        MIN_DRAFT_TOKENS,
        0.1,
        -1,
        "specserve_acceptance_rate_drift",
    ),
    Quantity(
        "specserve_acceptance_rate_per_position",
        USUAL_POSITION0,
        "specserve_window_drafts",
        MIN_DRAFTS,
        0.15,
        -1,
        position="0",
    ),
    Quantity(
        "specserve_mean_acceptance_length",
        "specserve_mean_acceptance_length_baseline",
        "specserve_window_draft_tokens",
        MIN_DRAFT_TOKENS,
        0.4,
        -1,
    ),
    Quantity(
        "specserve_prefix_cache_hit_ratio",
        "specserve_prefix_cache_hit_baseline",
        "specserve_window_requests",
        MIN_REQUESTS,
        0.15,
        -1,
        "specserve_prefix_cache_hit_drift",
        of_target=True,
    ),
    Quantity(
        "specserve_length_finish_ratio",
        "specserve_length_finish_baseline",
        "specserve_window_requests",
        MIN_REQUESTS,
        0.15,
        1,
        "specserve_length_finish_drift",
        of_target=True,
    ),
    Quantity(
        "specserve_conditional_acceptance_rate_per_position",
        "specserve_usual_position1_conditional_acceptance_rate",
        "specserve_window_drafts",
        MIN_DRAFTS,
        0.15,
        -1,
        position="1",
    ),
    Quantity(
        "specserve_request_prompt_tokens",
        "specserve_request_prompt_tokens_baseline",
        "specserve_window_requests",
        MIN_REQUESTS,
        math.inf,
        1,
        stat="mean",
        of_target=True,
    ),
    Quantity(
        "specserve_request_generation_tokens",
        "specserve_request_generation_tokens_baseline",
        "specserve_window_requests",
        MIN_REQUESTS,
        math.inf,
        1,
        stat="mean",
        of_target=True,
    ),
    Quantity(
        "specserve_prompts_over_draft_context_ratio",
        "specserve_prompts_over_draft_context_baseline",
        "specserve_window_requests",
        MIN_REQUESTS,
        math.inf,
        1,
    ),
    Quantity(
        "specserve_inter_token_latency_seconds",
        "specserve_inter_token_latency_seconds_baseline",
        "specserve_window_requests",
        MIN_REQUESTS,
        math.inf,
        1,
        stat="mean",
    ),
    Quantity(
        "specserve_sequences_per_step",
        "specserve_sequences_per_step_baseline",
        "specserve_window_requests",
        MIN_REQUESTS,
        math.inf,
        1,
    ),
)


def identity(settings: Settings) -> str:
    """Sixteen digits for what must stay the same for a past to be comparable: both models, method,
    draft length.

    The engine's version is left out on purpose.
    """
    target, draft = settings.models.target_model, settings.models.draft_model
    draft_path = draft_revision = None
    if draft is not None:
        draft_path, draft_revision = draft.path, draft.revision
    return _digest(
        target.path,
        target.revision,
        draft_path,
        draft_revision,
        settings.method,
        settings.num_speculative_tokens,
    )


def target_identity(settings: Settings) -> str:
    """The same for what depends on the requests alone: the target and the name it is served by."""
    target = settings.models.target_model
    return _digest(target.path, target.revision, settings.served_model_name)


def setup(settings: Settings) -> str:
    """The same for all that an engine is started with: a change of it is a change of the engine."""
    parts = (settings.models, settings.speculative_decoding, settings.engine)
    return _digest(*(part.model_dump_json() for part in parts))


def _digest(*parts: str | int | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Baseline:
    """Points by reading: (Unix time, value), oldest first. At most a day of them."""

    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    setup: SetupRecord | None = None
    """What the server ran with at the last change that is known."""

    def observe(self, wall: float, readings: Readings) -> bool:
        """Take a point of each quantity that has one now. True when something was taken in."""
        taken = False
        for quantity in QUANTITIES:
            points = self.points.setdefault(quantity.reading, [])
            # Of the future: the clock was ahead.
            points[:] = [(at, value) for at, value in points if wall - MEMORY_SECONDS < at <= wall]
            if points and wall - points[-1][0] < POINT_SECONDS:
                continue
            value = readings.get(quantity.in_window(WINDOW))
            samples = readings.get(key(quantity.sample, window=WINDOW), 0.0)
            if value is None or samples < quantity.min_samples:
                continue
            if self._is_bad(quantity, wall, value):
                continue
            points.append((wall, value))
            taken = True
        return taken

    def reference(self, quantity: Quantity, wall: float) -> float | None:
        """The median of the settled points; None when there are too few."""
        points = self.points.get(quantity.reading, ())
        settled = [value for at, value in points if at <= wall - SETTLE_SECONDS]
        if len(settled) < MIN_POINTS:
            return None
        return statistics.median(settled)

    def readings(
        self, wall: float, readings: Readings, windows: Sequence[str]
    ) -> dict[MetricKey, float]:
        """The references, and how far each window is from them."""
        out: dict[MetricKey, float] = {}
        for quantity in QUANTITIES:
            reference = self.reference(quantity, wall)
            if reference is None:
                continue
            out[key(quantity.reference)] = reference
            if quantity.drift is None:
                continue
            for window in windows:
                value = readings.get(quantity.in_window(window))
                if value is not None:
                    out[key(quantity.drift, window=window)] = value - reference
        if windows and key(USUAL_POSITION0) not in out:
            # Younger than its memory: the longest window holds more good time than bad.
            longest = readings.get(
                key("specserve_acceptance_rate_per_position", position="0", window=windows[-1])
            )
            drafts = readings.get(key("specserve_window_drafts", window=windows[-1]), 0.0)
            if longest is not None and drafts >= MIN_DRAFTS:
                out[key(USUAL_POSITION0)] = longest
        return out

    def _is_bad(self, quantity: Quantity, wall: float, value: float) -> bool:
        reference = self.reference(quantity, wall)
        return reference is not None and (value - reference) * quantity.worse > quantity.tolerance


class SetupRecord(BaseModel):
    """What the server ran with, for the next start to compare."""

    setup: str
    engine_version: str | None = None


class _File(BaseModel):
    """What is read of a file; one without this is not a baseline."""

    points: dict[str, list[tuple[float, float]]]
    setup: SetupRecord | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """Where baselines are kept: one file for the pair, one for the target."""

    pair: Path
    target: Path

    @classmethod
    def of(cls, settings: Settings, folder: Path) -> Store:
        """The files of these settings."""
        port = settings.server.port
        return cls(
            folder / f"baseline-{port}-{identity(settings)}.json",
            folder / f"traffic-{port}-{target_identity(settings)}.json",
        )

    def load(self) -> Baseline:
        """What an earlier run has kept; empty when there is nothing, or nothing that can be
        read."""
        of_target = {quantity.reading for quantity in QUANTITIES if quantity.of_target}
        target, found = _read(self.target), _read(self.pair)
        points: dict[str, list[tuple[float, float]]] = {}
        if found is not None:
            points |= found.points
        record = None
        if target is not None:
            record = target.setup
            known = {name: p for name, p in target.points.items() if name in of_target and p}
            points |= known
        return Baseline(points, record)

    def save(self, baseline: Baseline) -> None:
        """Write them whole or not at all. A folder that cannot be written is said and survived."""
        of_target = {quantity.reading for quantity in QUANTITIES if quantity.of_target}
        traffic = {name: p for name, p in baseline.points.items() if name in of_target}
        others = {name: p for name, p in baseline.points.items() if name not in of_target}
        _write(self.pair, _File(points=others))
        _write(self.target, _File(points=traffic, setup=baseline.setup))


def _read(path: Path) -> _File | None:
    try:
        return _File.model_validate_json(read_small(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        extra = {"path": str(path), "why": str(error)}
        LOG.warning("cannot read the acceptance baseline; starting without", extra=extra)
        return None


def _write(path: Path, kept: _File) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"version": 1} | kept.model_dump(exclude_none=True)))
    except OSError as error:
        extra = {"path": str(path), "why": str(error)}
        LOG.warning("cannot keep the acceptance baseline", extra=extra)
