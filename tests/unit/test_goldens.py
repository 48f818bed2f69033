"""What the product prints and sends is what was recorded: the quick part of scripts/goldens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "goldens"
QUICK = ("launch", "config", "report", "bad", "errors", "alerts", "help")
"""The others take up to half a minute: scripts/goldens runs them all."""


def goldens(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, as it is typed."""
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def test_outputs_are_the_recorded_ones() -> None:
    """Commands, environments, configs, reports, rules, help and errors are byte for byte what was recorded."""
    done = goldens("--only", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same") == len(QUICK)


def test_a_difference_is_shown_and_fails(tmp_path: Path) -> None:
    """A recording that says something else makes the script fail, with the case and both lines."""
    recorded = (ROOT / "tests/data/golden/outputs/help.txt").read_text(encoding="utf-8")
    (tmp_path / "help.txt").write_text(
        recorded.replace("Start the server of CONFIG", "Begin"), encoding="utf-8"
    )
    done = goldens(str(tmp_path), "--only", "help")
    assert done.returncode == 1
    assert "--- recorded help: specserve launch" in done.stdout
    assert "-  Begin and stay with it" in done.stdout
    assert "+  Start the server of CONFIG and stay with it" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--only", "nothing"), ("--only", "help", "nothing", "/tmp")]
)
def test_a_group_that_does_not_exist_is_refused(arguments: tuple[str, ...]) -> None:
    """A name that is misspelt does not pass as nothing to compare."""
    assert goldens(*arguments).returncode == 2


def test_every_group_is_recorded() -> None:
    """No group compares with a file that is not there, and no file is left of a group that is gone."""
    groups = goldens("--list").stdout.split()
    assert sorted(groups) == sorted(
        path.stem for path in (ROOT / "tests/data/golden/outputs").glob("*.txt")
    )
