"""Causes from the config and the checkpoints: what ``check`` finds, in the doctor's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from specserve.app import preflight
from specserve.app.doctor.report import Confidence, DoctorCause, Fact, Look, Step
from specserve.findings import Finding, subject_of

if TYPE_CHECKING:
    from specserve.app.preflight import PreflightReport
    from specserve.config.load import Loaded

_STEPS: Mapping[Step, frozenset[str]] = {
    "load": frozenset(
        {
            "checkpoint-missing",
            "checkpoint-corrupt",
            "checkpoint-unsafe-path",
            "checkpoint-unreadable",
            "checkpoint-lfs-pointer",
            "checkpoint-empty-file",
            "config-missing",
            "config-invalid",
            "weights-missing",
            "pickle-weights",
            "gguf-weights",
            "hub-access",
            "hub-revision",
            "hub-unreachable",
            "hub-modelscope",
            "model-type-unknown",
            "remote-code",
            "remote-code-unpinned",
            "revision-unpinned",
            "sha256-mismatch",
            "sha256-unusable",
            "lock-mismatch",
            "lock-unhashed",
            "dtype-unsupported",
        }
    ),
    "traffic": frozenset({"chat-template", "sampling-temperature", "head-sample"}),
    "parameters": frozenset(
        {
            "argument-conflict",
            "context-too-long",
            "draft-context",
            "draft-dtype",
            "draft-max-model-len",
            "draft-quantization",
            "flag-unsupported",
            "head-block-size",
            "key-unsupported",
            "method-mismatch",
            "method-unsupported",
            "model-runner",
            "mtp-module-reuse",
            "mtp-multiple",
            "sampling-rejected",
            "step-budget",
            "tp-divisible",
        }
    ),
    "speed": frozenset({"size-ratio", "own-draft", "gpu-quantization-emulated"}),
    "output": frozenset({"special-tokens", "synthetic-acceptance"}),
}
"""Where a code belongs that does not follow its subject."""


def step_of(code: str) -> Step:
    """The step of a finding.

    >>> step_of("vocab-size"), step_of("does-not-fit"), step_of("known-bad-m-rope-draft")
    ('vocabulary', 'memory', 'parameters')
    """
    for step, codes in _STEPS.items():
        if code in codes:
            return step
    if code.startswith("known-bad-"):
        return "parameters"
    match subject_of(code):
        case "pair":
            return "vocabulary"
        case "memory":
            return "memory"
        case "engine":
            return "load"


def look(loaded: Loaded, environ: Mapping[str, str]) -> tuple[Look, PreflightReport]:
    """Run the checks. Nothing is hashed."""
    found = preflight.run(loaded, environ=environ)
    causes = tuple(cause(f) for f in found.findings if f.severity != "info")
    steps: set[Step] = {"load", "parameters", "traffic", "output"}
    # A pair or a plan that could not be looked at has not passed.
    if found.verdicts.pair != "unknown":
        steps.add("vocabulary")
    if found.verdicts.memory != "unknown":
        steps.add("memory")
    if loaded.settings.method is None:
        steps.add("vocabulary")
    steps -= {"traffic", "output"}
    seen = Look(f"config {loaded.path}", frozenset(steps), causes, tuple(_facts(found)))
    return seen, found


def cause(finding: Finding) -> DoctorCause:
    """A finding as a cause: what refuses is proven from the files, a warning is possible."""
    confidence: Confidence = "possible"
    if finding.severity == "error":
        confidence = "proven"
    return DoctorCause(
        step_of(finding.code),
        finding.code,
        f"{finding.where}: {finding.message}",
        confidence,
        fix=finding.fix,
        stops=finding.severity == "error",
    )


_PROVEN: Mapping[str, Step] = {
    "target": "load",
    "draft": "load",
    "head": "vocabulary",
    "MTP": "vocabulary",
    "vocabulary": "vocabulary",
    "context": "parameters",
    "engine": "load",
    "memory": "memory",
}
"""First word of a line of `PreflightReport.proven` -> its step."""


def _facts(found: PreflightReport) -> Iterator[Fact]:
    for line in found.proven:
        yield Fact(_PROVEN.get(line.partition(":")[0], "load"), line)
    if found.price is not None:
        yield Fact("memory", found.price)
