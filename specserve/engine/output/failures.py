"""The last lines of an engine that failed -> a named cause and a remedy.

One table, most telling first: a log of a failure holds the cause and then, from every process above
it, its consequences. Wording read in vLLM 0.32's sources, in its own output, and in public reports
of 0.9 to 0.29 (2026-11-29).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from specserve.engine.output import logs

SIGNS_FILE = Path(__file__).with_name("failure_signs.yaml")


@dataclass(frozen=True)
class Failure:
    """Why the engine failed."""

    cause: str
    """Stable kebab-case name."""
    message: str
    """One sentence with the log's own numbers."""
    fix: str
    evidence: str
    """The line of the log that says so."""


@dataclass(frozen=True)
class Sign:
    """One row of ``failure_signs.yaml``; the file explains the columns."""

    cause: str
    pattern: str
    message: str
    fix: str
    late: bool = False
    context: str | None = None
    source: str | None = None


_PREFIX = re.compile(
    r"^(\((?:[\w@.-]+ )?pid=\d+\) ?)?((?:DEBUG|INFO|WARNING|ERROR|"
    r"CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
)
"""``(EngineCore pid=7) ERROR 11-29 22:48:01 [core.py:1510]``: who said it and when."""


@functools.cache
def signs() -> tuple[Sign, ...]:
    """The table in ``failure_signs.yaml``."""
    rows = yaml.safe_load(SIGNS_FILE.read_text(encoding="utf-8"))
    return tuple(Sign(**row) for row in rows)


_OOM = re.compile(
    r"CUDA out of memory|OutOfMemoryError|HIP out of memory|can't allocate memory: you tried|"
    r"out of memory occurred when"
)
_OOM_PHASES = {
    "loading target weights": (
        "oom-load",
        "while the weights were loaded",
        "use more GPUs or a quantized model",
    ),
    "loading draft": (
        "oom-load",
        "while the draft was loaded",
        "lower the target's share: more GPUs, or quantize",
    ),
    "capturing graphs": (
        "oom-graphs",
        "while graphs were captured",
        "lower engine.gpu_memory_utilization by 0.03",
    ),
    "starting server": (
        "oom-serving",
        "{when}",
        "lower engine.gpu_memory_utilization by 0.05",
    ),
}
_OOM_ELSE = (
    "oom-profile",
    "in the trial run at full load",
    "lower engine.max_num_batched_tokens or engine.max_num_seqs",
)
_ERROR = re.compile(r"^(?:[\w.]+\.)?(?P<kind>[A-Z]\w*(?:Error|Exception|Refused)): (?P<why>.+)$")
_FOLLOWS = re.compile(
    r"See (?:root cause above|stack trace for)|EngineDeadError|Engine core initialization failed|"
    r"SystemExit"
)


_ANSWERED = re.compile(r'"(?:GET|POST) /\S* HTTP/[\d.]+" 200')
"""An answer in the access log."""
_COMPLETED = re.compile(r'"POST /\S* HTTP/[\d.]+" 200')
"""An answer that the engine had to work for: a dead one's server may still answer others."""


def plain(line: str) -> str:
    """A log line without the process and time in front of it.

    >>> plain("(EngineCore pid=7) ERROR 11-29 22:48:01 [core.py:1510] ValueError: no")
    'ValueError: no'
    """
    return _PREFIX.sub("", line.rstrip(), count=1)


def diagnose(
    lines: Sequence[str], *, exit_status: int | None = None, served: bool | None = None
) -> Failure | None:
    """The cause that the last lines of a log name; None when they name none.

    ``exit_status`` as Popen reports it: -9 for signal 9. It decides only when the log does not.
    ``served`` says whether the engine had been ready; without it the log is asked for an answer
    to a client.
    """
    clean = [plain(line) for line in lines]
    text = "\n".join(clean)
    if served is None:
        served = _ANSWERED.search(text) is not None
    when = "while it loaded"
    if served:
        when = "while it served"
    found = (
        _first(text, when, late=False)
        or _out_of_memory(clean, served=served, when=when)
        or _first(text, when, late=True)
    )
    last = _last_error(clean)
    if found is not None and found.cause == "engine-died" and last is not None:
        return replace(found, message=f"{found.message}: {last.message}", evidence=last.evidence)
    return found or _killed(exit_status) or last


def outlived(lines: Sequence[str], failure: Failure) -> bool:
    """Whether the engine completed a request after the line that names the failure.

    >>> lines = ["ValueError: no", 'INFO: "POST /v1/completions HTTP/1.1" 200 OK']
    >>> outlived(lines, Failure("engine-error", "", "", "ValueError: no"))
    True
    """
    named = False
    for line in map(plain, lines):
        if failure.evidence.splitlines()[0] in line:
            named = True
        elif named and _COMPLETED.search(line):
            return True
    return False


def _first(text: str, when: str, *, late: bool) -> Failure | None:
    for sign in signs():
        if sign.late is not late:
            continue
        match = re.search(sign.pattern, text, re.MULTILINE)
        if match is None:
            continue
        groups = match.groupdict()
        if sign.context is not None:
            around = re.search(sign.context, text)
            if around is None:
                continue
            groups |= around.groupdict()
        return _failure(sign, match, {**groups, "when": when})
    return None


def _failure(sign: Sign, match: re.Match[str], groups: Mapping[str, str | None]) -> Failure:
    values = {name: value or "" for name, value in groups.items()}
    values["path"] = values.get("path") or values.get("p2") or values.get("p3") or ""
    fix = sign.fix
    if sign.cause == "context-does-not-fit" and not values["fits"]:
        fix = "lower engine.max_model_len, or raise engine.gpu_memory_utilization"
    # The whole line of the match, or the last one where it has several.
    text, edge = match.string, match.start()
    if "\n" in match.group().strip():
        edge = match.end()
    start = text.rfind("\n", 0, edge) + 1
    evidence = text[start : match.end()] + text[match.end() :].partition("\n")[0]
    return Failure(
        sign.cause,
        sign.message.format_map(values).strip(),
        fix.format_map(values),
        evidence.strip()[:400],
    )


def _out_of_memory(lines: Sequence[str], *, served: bool, when: str) -> Failure | None:
    """GPU memory ran out; what helps depends on what the engine was doing."""
    doing: str | None = None
    if served and not any(logs.phase(line) for line in lines):
        doing = "starting server"  # it served so long that its start is no longer kept
    for line in lines:
        if _OOM.search(line):
            cause, during, fix = _OOM_PHASES.get(doing or "", _OOM_ELSE)
            message = f"memory ran out {during.format(when=when)}"
            return Failure(cause, message, fix, line.strip()[:400])
        doing = logs.advance(doing, line)
    return None


def _killed(exit_status: int | None) -> Failure | None:
    if exit_status != -9:
        return None
    killed = next(sign for sign in signs() if sign.cause == "killed")
    return Failure(killed.cause, killed.message, killed.fix, f"exit status {exit_status}")


def _last_error(lines: Sequence[str]) -> Failure | None:
    """The last exception that is not merely a consequence, in its own words."""
    for line in reversed(lines):
        match = _ERROR.match(line.strip())
        if match and not _FOLLOWS.search(line):
            return Failure(
                "engine-error",
                f"{match['kind']}: {match['why']}"[:300],
                "read the log above it",
                line[:400],
            )
    return None
