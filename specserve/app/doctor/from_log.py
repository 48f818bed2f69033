"""Causes from the engine's log: why it failed, how long each phase took, what it says it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from specserve.app.doctor.report import Confidence, DoctorCause, Fact, Look, Step
from specserve.config.schema import Settings
from specserve.engine.output import failures, loading, logs, stated
from specserve.errors import ConfigError
from specserve.files import read_bytes
from specserve.units import MIB, duration, gib

MAX_LOG_BYTES = 64 * MIB
"""Of a longer log the end is read."""
SLOW_START_SECONDS = 300.0
"""Ours: a phase of the start that takes longer is worth a word."""
_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")

_FAILURE_STEPS: Mapping[Step, frozenset[str]] = {
    "memory": frozenset(
        {
            "oom-load",
            "oom-graphs",
            "oom-serving",
            "oom-profile",
            "no-kv-memory",
            "context-does-not-fit",
            "gpu-busy",
            "host-memory",
            "shared-memory",
            "killed",
        }
    ),
    "vocabulary": frozenset({"vocabulary-mismatch", "head-weights", "weights-shape", "m-rope"}),
    "parameters": frozenset(
        {
            "unknown-flag",
            "bad-flag-value",
            "context-too-long",
            "draft-context",
            "draft-tensor-parallel",
            "graph-sizes",
            "heads-not-divisible",
            "model-runner",
            "not-divisible-by-n-predict",
            "pipeline-parallel",
            "speculation-refused",
            "config-refused",
            "unknown-speculative-key",
            "fused-collectives",
        }
    ),
    "output": frozenset({"grammar"}),
}
"""Where a named failure belongs; the others are about loading."""
_UNNAMED: Mapping[str, Confidence] = {
    "engine-died": "possible",
    "engine-error": "possible",
    "killed": "likely",
}
"""Failures of which the log shows the end and not the reason."""
_SLOW: Mapping[str, str] = {
    "importing": "copy the Python environment to a local disk",
    "loading target weights": "copy the model to a local disk and set models.*.path to it",
    "loading draft": "copy the draft to a local disk and set models.draft_model.path to it",
    "compiling": "set engine.env.VLLM_CACHE_ROOT to a folder that outlives the container",
    "profiling memory": "set engine.env.VLLM_CACHE_ROOT to a folder that outlives the container",
    "capturing graphs": "lower engine.max_num_seqs: fewer sizes are captured",
    "warming up": "set engine.env.VLLM_CACHE_ROOT to a folder that outlives the container",
}


@dataclass(frozen=True)
class _Phase:
    """A phase of the start."""

    name: str
    seconds: float


def read(path: Path) -> tuple[str, ...]:
    """The lines of the last start in a log. Raises ConfigError."""
    try:
        size = path.stat().st_size
        data = read_bytes(path, MAX_LOG_BYTES, start=max(0, size - MAX_LOG_BYTES))
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}; must be the engine's log",
            where=f"--log {path}",
            fix="specserve doctor --log FILE   # the file that the engine's output went to",
        ) from None
    return last_start(data.decode("utf-8", "replace").splitlines())


def last_start(lines: Sequence[str]) -> tuple[str, ...]:
    """The lines of the newest of several starts.

    >>> last_start(["Using max model len 8", "Loading safetensors", "Using max model len 9"])
    ('Using max model len 9',)
    """
    begin, reached = 0, ""
    for number, line in enumerate(lines):
        phase = logs.phase(line)
        if phase is None:
            continue
        # The target is announced again beside the draft, before anything is loaded.
        if phase == logs.PHASES[0] and reached not in ("", phase):
            begin = number
            reached = phase
        elif not reached or logs.PHASES.index(phase) > logs.PHASES.index(reached):
            reached = phase
    return tuple(lines[begin:])


def look(path: Path, lines: Sequence[str], settings: Settings | None) -> Look:
    """What a log says; with the config, what the engine runs against what was asked for."""
    report = logs.read_report(lines)
    phases, reached = _phases(lines)
    ready = reached == logs.PHASES[-1]
    causes = [*_failure(lines, ready=ready)]
    if not causes and not ready and reached is not None:
        causes.append(_unfinished(lines, reached))
    causes += _slow(phases, lines, report)
    statement = stated.read(lines)
    held: tuple[stated.Held, ...] = ()
    if settings is not None and statement != stated.Statement():
        held = stated.hold(settings, statement, report.attention_backends)
        causes += _differing(held)
    steps: set[Step] = {"load"}
    if held:
        steps.add("parameters")
    if ready:
        steps.add("memory")
    facts = [*_facts(phases, report, statement)]
    if held and stated.summary(held):
        facts.append(Fact("parameters", f"as asked: {stated.summary(held)}"))
    return Look(f"log {path}, {len(lines):,} lines", frozenset(steps), tuple(causes), tuple(facts))


def _failure(lines: Sequence[str], *, ready: bool) -> Iterator[DoctorCause]:
    found = failures.diagnose(lines)
    if found is None or failures.outlived(lines, found):
        return
    if found.cause == "engine-error" and ready:
        # An exception of a request that the server survived; its death has a sign of its own.
        return
    step: Step = "load"
    for name, codes in _FAILURE_STEPS.items():
        if found.cause in codes:
            step = name
    confidence = _UNNAMED.get(found.cause, "proven")
    yield DoctorCause(
        step,
        found.cause,
        found.message,
        confidence,
        (f"the log says: {found.evidence}",),
        found.fix,
        stops=True,
    )


def _unfinished(lines: Sequence[str], reached: str) -> DoctorCause:
    times = [moment for line in lines for moment in _moments(line)]
    evidence = [f"last line: {failures.plain(lines[-1])[:200]}"]
    if times:
        evidence.append(f"{duration((times[-1] - times[0]).total_seconds())} since its first line")
    return DoctorCause(
        "load",
        "start-unfinished",
        f"the log ends while the engine was {reached}, and no line says why",
        "possible",
        tuple(evidence),
        "tail -f FILE   # still growing: it loads; else py-spy dump --pid PID",
        stops=True,
    )


def _moments(line: str) -> Iterator[datetime]:
    """When a line was written. The log has no year: a leap year stands for it."""
    match = _TIME.search(line[:80])
    if match is None:
        return
    try:
        yield datetime.strptime(f"2000-{match[1]}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return


def _phases(lines: Sequence[str]) -> tuple[list[_Phase], str | None]:
    """How long each phase took, up to where the server starts, and the last phase that was
    reached."""
    current: str | None = None
    since: datetime | None = None
    out: list[_Phase] = []
    for line in lines:
        after = logs.advance(current, line)
        moment = next(_moments(line), None)
        if after == current:
            continue
        if current is not None and since is not None and moment is not None:
            out.append(_Phase(current, max(0.0, (moment - since).total_seconds())))
        current = after
        since = moment or since
    return out, current


def _slow(
    phases: Sequence[_Phase], lines: Sequence[str], report: logs.EngineReport
) -> Iterator[DoctorCause]:
    took = [seconds for seconds in map(loading.seconds, lines) if seconds is not None]
    size = report.model_loading_bytes
    if took and size and took[0] >= loading.LONG_SECONDS:
        weights = loading.WeightsLoaded(size, took[0])
        if weights.rate < loading.SLOW_BYTES:
            yield DoctorCause(
                "load",
                "slow-weights",
                "the start is slow because the weights come slowly from storage",
                "likely",
                (weights.words,),
                _SLOW["loading target weights"],
            )
            return
    slowest = max(phases, key=lambda phase: phase.seconds, default=None)
    if slowest is not None and slowest.seconds >= SLOW_START_SECONDS:
        yield DoctorCause(
            "load",
            "slow-start",
            f"the start is slow: {slowest.name} took {duration(slowest.seconds)}",
            "likely",
            (_said(phases),),
            _SLOW.get(slowest.name),
        )


def _differing(held: Sequence[stated.Held]) -> Iterator[DoctorCause]:
    for one in held:
        warning = one.warning
        if warning is not None:
            yield DoctorCause(
                "parameters",
                "not-as-asked",
                f"the engine does not run what the config asks for: {warning}",
                "proven",
                fix="specserve launch CONFIG --dry-run   # the command line to start it with",
            )


def _said(phases: Sequence[_Phase]) -> str:
    return ", ".join(f"{phase.name} {duration(phase.seconds)}" for phase in phases)


def _facts(
    phases: Sequence[_Phase], report: logs.EngineReport, statement: stated.Statement
) -> Iterator[Fact]:
    if phases:
        total = sum(phase.seconds for phase in phases)
        yield Fact("load", f"start: {duration(total)} ({_said(phases)})")
    if report.kv_cache_tokens is not None:
        text = f"the engine's KV cache holds {report.kv_cache_tokens:,} tokens"
        if report.available_kv_bytes is not None:
            text += f" in {gib(report.available_kv_bytes)}"
        if report.max_concurrency is not None and report.max_concurrency_tokens is not None:
            text += (
                f": {report.max_concurrency:.1f} requests of {report.max_concurrency_tokens:,} "
                "tokens at once"
            )
        yield Fact("memory", text)
    if statement.speculates is False:
        yield Fact("parameters", "the engine was started without speculation")
    elif statement.method is not None:
        tokens = statement.num_speculative_tokens
        yield Fact("parameters", f"the engine runs method {statement.method}, {tokens} tokens")
