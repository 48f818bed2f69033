"""vLLM's own config code against ours, over every fixture pair: what it refuses, we never call fine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specserve.app import preflight
from specserve.config.schema import Settings
from specserve.engine.command import args
from specserve.engine.installed import introspect, support
from specserve.engine.installed.introspect import EngineFacts, Installed
from specserve.errors import ConfigError
from tests import needed
from tests.pairs import PAIRS, Pair

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("config_worker.py")


@dataclass
class Vllm:
    """The installed vLLM in one process that lives as long as the tests."""

    installed: Installed
    facts: EngineFacts
    process: subprocess.Popen[str]
    answers: int

    def refuses(self, argv: list[str]) -> str | None:
        """Why its config code refuses these arguments; None when it takes them."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(argv) + "\n")
        self.process.stdin.flush()
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(self.answers, 65536)
            assert part, "the worker has ended"
            line += part
        error: str | None = json.loads(line)
        return error


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Start it once; importing vLLM is most of the cost."""
    installed = introspect.installed()
    if installed is None:
        needed.missing("no vLLM is installed")
    facts = introspect.describe(installed, environ=os.environ)
    assert isinstance(facts, EngineFacts)
    read_end, write_end = os.pipe()
    log = (tmp_path_factory.mktemp("worker") / "log").open("wb")
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(write_end)], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
        pass_fds=[write_end], env=env,
    )  # fmt: skip
    os.close(write_end)
    yield Vllm(installed, facts, process, read_end)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)
    os.close(read_end)
    log.close()


def ours(settings: Settings, vllm: Vllm) -> set[str]:
    """Codes of our errors: the pair, and what the installed vLLM supports."""
    target, found = preflight.read(settings, "target_model")
    draft, more = (
        preflight.read(settings, "draft_model") if settings.uses_draft_model else (None, [])
    )
    found += [
        *more,
        *preflight.pair_findings(
            settings, target, draft, known_types=lambda: vllm.facts.model_types
        ).findings,
    ]
    found += support.findings(settings, target, draft, vllm.installed, vllm.facts, environ={})
    return {f.code for f in found if f.severity == "error"}


@pytest.fixture(scope="module")
def verdicts(
    vllm: Vllm, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[set[str], str | None]]:
    """Pair -> our errors, and vLLM's refusal."""
    root = tmp_path_factory.mktemp("pairs")
    return {pair.name: verdict(pair, root / pair.name, vllm) for pair in PAIRS}


def verdict(pair: Pair, folder: Path, vllm: Vllm) -> tuple[set[str], str | None]:
    """Both answers for one pair."""
    settings = Settings.model_validate(pair.write(folder))
    try:
        command = args.build(settings, installed=vllm.installed)
    except ConfigError as e:
        return {"config"}, str(e)
    flags = list(command.argv)
    return ours(settings, vllm), vllm.refuses(flags[flags.index("--model") :])


def test_never_fine_for_what_vllm_refuses(verdicts: dict[str, tuple[set[str], str | None]]) -> None:
    """The rule of the whole preflight."""
    missed = {name: refusal for name, (codes, refusal) in verdicts.items() if refusal and not codes}
    assert missed == {}


def test_both_answers_occur(verdicts: dict[str, tuple[set[str], str | None]]) -> None:
    """The fixtures are real enough: vLLM takes many of those that we take, and refuses some on its own."""
    both_fine = [name for name, (codes, refusal) in verdicts.items() if not codes and not refusal]
    both_refuse = [name for name, (codes, refusal) in verdicts.items() if codes and refusal]
    assert len(both_fine) > 50
    assert len(both_refuse) > 15
