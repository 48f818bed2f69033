"""What the doctor says: a tree of steps, each with its causes, its numbers or what it lacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pydantic import JsonValue

Step = Literal["load", "memory", "vocabulary", "traffic", "parameters", "speed", "output"]
Confidence = Literal["proven", "likely", "possible"]
"""``proven``: the files, the log or the engine itself says so. ``likely``: measured over enough
work to mean something. ``possible``: it may be, and one look cannot tell."""
StepState = Literal["cause", "nothing found", "not looked at"]

TITLES: dict[Step, str] = {
    "load": "does it load and answer",
    "memory": "is there memory, also under load",
    "vocabulary": "do target and draft belong together",
    "traffic": "does the traffic suit the draft",
    "parameters": "do the parameters fit",
    "speed": "is the draft fast enough",
    "output": "is the output right and whole",
}
"""In the order of the field guide; what is wrong early explains what follows."""
STEPS: tuple[Step, ...] = tuple(TITLES)
_CONFIDENCES: tuple[Confidence, ...] = ("proven", "likely", "possible")
NOTHING = "nothing found"


@dataclass(frozen=True)
class DoctorCause:
    """One explanation of what is wrong."""

    step: Step
    name: str
    """The code of the finding (docs/checks.md), the failure, or the alert that it is."""
    message: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    """Numbers, and lines of the log."""
    fix: str | None = None
    """What to type or to change."""
    usually: tuple[str, ...] = ()
    """What it mostly comes from, where the numbers alone cannot tell."""
    stops: bool = False
    """Whether the server does not serve because of it, or serves wrong text."""
    explains: frozenset[str] = frozenset()
    """Codes that follow from this one and come after it, however sure they are."""

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        return {
            "step": self.step,
            "code": self.name,
            "message": self.message,
            "confidence": self.confidence,
            "stops": self.stops,
            "evidence": list(self.evidence),
            "usually": list(self.usually),
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Fact:
    """A number that was looked at, whatever it says."""

    step: Step
    text: str


@dataclass(frozen=True)
class Look:
    """What one source gave."""

    source: str
    """What was looked at, in words."""
    steps: frozenset[Step]
    """The steps that it can say something about."""
    causes: tuple[DoctorCause, ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class StepReport:
    """One step of the tree."""

    step: Step
    state: StepState
    causes: tuple[DoctorCause, ...] = ()
    facts: tuple[str, ...] = ()
    needs: str | None = None
    """What to give, so that the step can be looked at, or better."""

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        return {
            "step": self.step,
            "question": TITLES[self.step],
            "state": self.state,
            "causes": [cause.as_dict() for cause in self.causes],
            "evidence": list(self.facts),
            "needs": self.needs,
        }


@dataclass(frozen=True)
class DoctorReport:
    """Everything that was found."""

    sources: tuple[str, ...]
    steps: tuple[StepReport, ...]

    @property
    def causes(self) -> tuple[DoctorCause, ...]:
        """All of them, the first one first."""
        found = [cause for step in self.steps for cause in step.causes]
        explained = {code for cause in found for code in cause.explains}
        found.sort(key=lambda cause: (cause.name in explained, *_rank(cause)))
        return tuple(found)

    @property
    def first(self) -> DoctorCause | None:
        """Where to begin."""
        return next(iter(self.causes), None)

    @property
    def conclusion(self) -> str:
        """The first cause in one sentence."""
        first = self.first
        if first is not None:
            return f"{first.message} ({first.confidence})"
        unseen = [TITLES[step.step] for step in self.steps if step.state == "not looked at"]
        if unseen:
            return f"{NOTHING}; not looked at: {'; '.join(unseen)}"
        return NOTHING

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        first = None
        if self.first is not None:
            first = self.first.as_dict()
        return {
            "ok": self.first is None,
            "conclusion": self.conclusion,
            "first": first,
            "looked_at": list(self.sources),
            "steps": [step.as_dict() for step in self.steps],
        }


def _rank(cause: DoctorCause) -> tuple[bool, int, int]:
    """What ends the server first, then what is surest, then what comes first in the guide."""
    return (not cause.stops, _CONFIDENCES.index(cause.confidence), STEPS.index(cause.step))


_NEEDS: dict[Step, tuple[tuple[str, str], ...]] = {
    "load": (
        ("log", "--log FILE, the engine's log"),
        ("config", "CONFIG"),
        ("url", "--url URL"),
    ),
    "memory": (
        ("config", "CONFIG"),
        ("log", "--log FILE, the engine's log"),
        ("url", "--url URL while it is under load"),
    ),
    "vocabulary": (
        ("config", "CONFIG"),
        ("url", "--url URL, better with --canary"),
    ),
    "traffic": (
        ("url", "--url URL of the engine"),
        ("sidecar", "--sidecar URL"),
    ),
    "parameters": (
        ("config", "CONFIG"),
        ("url", "--url URL"),
        ("log", "--log FILE, the engine's log"),
    ),
    "speed": (("profile", "--profile FILE that `specserve bench CONFIG` writes, with --url URL"),),
    "output": (
        ("canary", "--url URL --canary"),
        ("sidecar", "--sidecar URL"),
    ),
}
"""Step -> what it can be looked at with, best first."""


def report(looks: Iterable[Look], given: frozenset[str]) -> DoctorReport:
    """Put what the sources gave into the tree. ``given`` names the options that were used."""
    seen = tuple(looks)
    # Of a server that does not serve, nothing else can be said yet.
    ended = any(cause.stops for look in seen for cause in look.causes)
    steps = []
    for step in STEPS:
        causes = tuple(c for look in seen for c in look.causes if c.step == step)
        facts = tuple(f.text for look in seen for f in look.facts if f.step == step)
        state: StepState = "not looked at"
        if causes:
            state = "cause"
        elif any(step in look.steps for look in seen):
            state = "nothing found"
        needs = None
        if state != "cause" and not ended:
            missing = [words for name, words in _NEEDS[step] if name not in given]
            if state == "not looked at" or len(missing) == len(_NEEDS[step]):
                needs = " or ".join(missing)
        steps.append(StepReport(step, state, _ordered(causes), facts, needs))
    return DoctorReport(tuple(look.source for look in seen), tuple(steps))


def _ordered(causes: Iterable[DoctorCause]) -> tuple[DoctorCause, ...]:
    """Each cause once, the surest first: what the log and the engine both say is one cause."""
    found: dict[str, DoctorCause] = {}
    for cause in sorted(causes, key=_rank):
        found.setdefault(f"{cause.name} {cause.message}", cause)
    return tuple(found.values())
