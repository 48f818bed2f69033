"""Everything that was given, looked at, in one report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.app.doctor import from_config, from_log, from_server, from_status
from specserve.app.doctor.report import DoctorReport, Look, report
from specserve.sidecar import speedup

if TYPE_CHECKING:
    from specserve.config.load import Loaded
    from specserve.engine.http.client import EngineClient
    from specserve.sidecar.presentation import StatusJson


@dataclass(frozen=True)
class AskedSidecar:
    """A sidecar that was asked."""

    url: str
    found: StatusJson | str
    """What /status said, or why nothing came."""

    def look(self) -> Look:
        """What that means."""
        if isinstance(self.found, str):
            return from_status.silent(self.url, self.found)
        return from_status.look(self.found, self.url)


@dataclass(frozen=True)
class Given:
    """What there is to look at; at least one of it."""

    loaded: Loaded | None = None
    client: EngineClient | None = None
    sidecar: AskedSidecar | None = None
    log: Path | None = None
    profile: Path | None = None
    with_canary: bool = False

    @property
    def names(self) -> frozenset[str]:
        """As the steps ask for them."""
        there = {
            "config": self.loaded,
            "url": self.client,
            "sidecar": self.sidecar,
            "log": self.log,
            "profile": self.profile,
        }
        names = {name for name, one in there.items() if one is not None}
        if self.with_canary:
            names.add("canary")
        return frozenset(names)


def run(
    given: Given,
    *,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> DoctorReport:
    """Look at everything, the server while the files are read.

    Raises ConfigError for a log or a profile that cannot be read.
    """
    settings = None
    if given.loaded is not None:
        settings = given.loaded.settings
    path = given.profile
    if path is None and settings is not None and settings.sidecar.benchmark_profile is not None:
        named = Path(settings.sidecar.benchmark_profile)
        # The check says what is wrong with one that the config names.
        if named.is_file() and given.client is not None:
            path = named
    profile = None
    if path is not None:
        profile = speedup.load(path)
    looks: list[Look] = []
    with ThreadPoolExecutor(1) as pool:
        reading = None
        client = given.client
        if client is not None:
            reading = pool.submit(from_server.read, client, clock=clock, sleep=sleep)
        if given.log is not None:
            looks.append(from_log.look(given.log, from_log.read(given.log), settings))
        if given.loaded is not None:
            looks.append(from_config.look(given.loaded, environ)[0])
        if given.sidecar is not None:
            looks.append(given.sidecar.look())
        if profile is not None:
            looks.append(from_server.of_profile(profile))
        if reading is not None and client is not None:
            reads = reading.result()
            looks.append(from_server.look(reads, settings, profile, wall=wall()))
            if given.with_canary and reads.snapshot is not None:
                against = settings or from_server.stand_in(reads.snapshot)
                looks.append(from_server.look_by_canary(client, against))
    return report(looks, given.names)
