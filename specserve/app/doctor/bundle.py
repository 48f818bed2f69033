"""An archive for a bug report: what the doctor looked at, without secrets.

Secrets of the config are replaced wherever they stand, and so is what has a secret's shape or name.
Prompts that an engine logged are cut.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specserve import __version__
from specserve.app.doctor import from_log
from specserve.app.doctor.run import Given
from specserve.config.show import rows
from specserve.engine.http.client import EngineClient, EngineError
from specserve.engine.installed.introspect import installed
from specserve.errors import ConfigError
from specserve.log import Redactor, masked

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.app.doctor.report import DoctorReport

LOG_LINES = 2000
"""The last ones of the engine's log that are taken."""
_PROMPT = re.compile(r"\b(prompt(?:_token_ids)?['\"]?\s*[:=]).*", re.IGNORECASE)
_METRICS_SECONDS = 5.0


@dataclass(frozen=True)
class BundleFile:
    """One file of the archive."""

    name: str
    text: str

    @property
    def size_bytes(self) -> int:
        """Its size before it is compressed."""
        return len(self.text.encode())


def collect(
    given: Given, found: DoctorReport, *, environ: Mapping[str, str]
) -> tuple[BundleFile, ...]:
    """Everything that goes into the archive, redacted. Raises ConfigError for an unreadable log."""
    secrets: tuple[str, ...] = ()
    if given.loaded is not None:
        secrets = given.loaded.secrets()
    redactor = Redactor(secrets)
    return tuple(
        BundleFile(one.name, redactor.redact(one.text)) for one in _raw(given, found, environ)
    )


def _raw(given: Given, found: DoctorReport, environ: Mapping[str, str]) -> Iterator[BundleFile]:
    yield BundleFile("versions.txt", _versions())
    yield BundleFile("doctor.json", _json(found.as_dict()))
    if given.loaded is not None:
        from specserve.app import preflight

        shown = {row.key: {"value": row.value, "source": row.source} for row in rows(given.loaded)}
        yield BundleFile("config.json", _json(shown))
        checked = preflight.run(given.loaded, environ=environ)
        yield BundleFile("check.json", _json(checked.as_dict()))
    if given.log is not None:
        lines = from_log.read(given.log)[-LOG_LINES:]
        yield BundleFile("engine.log", "\n".join(map(_without_prompt, lines)) + "\n")
    if given.sidecar is not None and not isinstance(given.sidecar.found, str):
        yield BundleFile("status.json", json.dumps(masked(given.sidecar.found), indent=2) + "\n")
    if given.client is not None:
        yield BundleFile("metrics.txt", _metrics(given.client))


def _without_prompt(line: str) -> str:
    """The line up to a prompt.

    >>> _without_prompt("Received request 1: prompt: 'my secret plan', params: x")
    'Received request 1: prompt: ***'
    """
    return _PROMPT.sub(r"\1 ***", line)


def _json(body: Mapping[str, JsonValue]) -> str:
    return json.dumps(masked(body), indent=2) + "\n"


def _versions() -> str:
    lines = (
        f"specserve {__version__}",
        f"engine {installed() or 'none here'}",
        f"python {platform.python_version()}",
        f"system {platform.system()} {platform.release()} {platform.machine()}",
    )
    return "\n".join(lines) + "\n"


def _metrics(client: EngineClient) -> str:
    try:
        return client.metrics_text(timeout=_METRICS_SECONDS)
    except EngineError as error:
        return f"not read: {str(error).splitlines()[0]}\n"


def write(path: Path, files: tuple[BundleFile, ...]) -> None:
    """Write the archive, readable for its owner alone. Raises ConfigError where it cannot be."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for one in files:
            data = one.text.encode()
            entry = tarfile.TarInfo(f"specserve-doctor/{one.name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            "exists already; must be a new file", where=str(path), fix=f"rm {path}"
        ) from None
    with os.fdopen(descriptor, "wb") as out:
        out.write(packed.getvalue())
