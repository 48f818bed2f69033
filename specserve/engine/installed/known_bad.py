"""Known-bad combinations: a dated table, held against a configuration and the engine's version."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import yaml
from pydantic import JsonValue, TypeAdapter

from specserve.engine.installed.changes import CHANGES
from specserve.engine.installed.conditions import Situation, holding
from specserve.engine.installed.introspect import release
from specserve.errors import Change
from specserve.findings import Finding, Severity

FILE = Path(__file__).with_name("known_bad.yaml")
_THREAD = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")
_SOURCE = re.compile(r"([\w./-]+\.py) of (\d+\.\d+)")


@dataclass(frozen=True)
class Entry:
    """One row of ``known_bad.yaml``; the file explains the columns."""

    id: str
    severity: Severity
    says: str
    reference: str
    read: date
    fix: str = ""
    change: Mapping[str, JsonValue] | str = field(default_factory=dict)
    methods: frozenset[str] = frozenset()
    when: frozenset[str] = frozenset()
    unless: frozenset[str] = frozenset()
    first_bad: str = ""
    last_bad: str = ""

    @property
    def code(self) -> str:
        """The code of its finding."""
        return f"known-bad-{self.id}"

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the references can be read.

        >>> row = {"id": "x", "severity": "error", "says": "s", "read": date(2026, 11, 29)}
        >>> Entry(**row, reference="a/b#1; v1/x.py of 0.32").urls
        ('https://github.com/a/b/issues/1', \
'https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/x.py')
        """
        threads = (f"https://github.com/{r}/issues/{n}" for r, n in _THREAD.findall(self.reference))
        sources = (
            f"https://github.com/vllm-project/vllm/blob/v{version}.0/vllm/"
            f"{path.removeprefix('vllm/')}"
            for path, version in _SOURCE.findall(self.reference)
        )
        return (*threads, *sources)

    @property
    def versions(self) -> str:
        """The range in words."""
        if self.first_bad and self.last_bad:
            return f"{self.first_bad} to {self.last_bad}"
        if self.first_bad:
            return f"since {self.first_bad}"
        if self.last_bad:
            return f"up to {self.last_bad}"
        return "all"

    @property
    def remedy(self) -> str:
        """What to do, for a reader who has no config at hand."""
        if isinstance(self.change, str):
            edits = [CHANGES[self.change].says]
        else:
            edits = [str(Change(key, value)) for key, value in self.change.items()]
        return ", ".join([*edits, *([self.fix] if self.fix else [])])

    def in_range(self, version: str) -> bool:
        """Whether a version is affected. One without numbers is not."""
        number, last = release(version), release(self.last_bad)
        if not number or number < release(self.first_bad):
            return False
        return not last or number[: len(last)] <= last

    def applies(self, method: str, conditions: frozenset[str], version: str) -> bool:
        """Whether method, conditions and version are all as the row says."""
        return (
            self.in_range(version)
            and (not self.methods or method in self.methods)
            and self.when <= conditions
            and not self.unless & conditions
        )

    def changes(self, of: Situation) -> tuple[Change, ...]:
        """The edits of this config that mend it."""
        if isinstance(self.change, str):
            return tuple(CHANGES[self.change].edits(of))
        return tuple(Change(key, value) for key, value in self.change.items())

    def finding(self, of: Situation, version: str) -> Finding:
        """What is said where it applies."""
        changes = self.changes(of)
        where = f"method {of.settings.method}, vLLM {version}"
        fix = ", ".join([*map(str, changes), *([self.fix] if self.fix else [])])
        message = f"{self.says} ({self.reference})"
        return Finding(self.code, self.severity, where, message, fix or self.remedy, changes)


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All rows of the file."""
    table = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    rows = [{"read": table["read"], **row} for row in table["entries"]]
    return TypeAdapter(tuple[Entry, ...]).validate_python(rows)


def findings(of: Situation, version: str) -> list[Finding]:
    """A finding per row that applies."""
    method, conditions = of.settings.method, holding(of)
    if method is None:
        return []
    return [e.finding(of, version) for e in entries() if e.applies(method, conditions, version)]
