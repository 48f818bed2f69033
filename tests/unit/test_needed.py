"""Tests that need another program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needed

ROOT = Path(__file__).parents[2]


def test_what_is_there_is_no_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens where the program is installed."""
    monkeypatch.setenv(needed.EVERYTHING, "all")
    needed.programs("sh")


def test_without_a_program_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip says what to install, each package once."""
    monkeypatch.delenv(needed.EVERYTHING, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception) as caught:
        needed.programs("promtool", "prometheus", "chromium")
    assert caught.value.msg == (
        "not installed: promtool prometheus chromium (apt-get install prometheus chromium)"
    )


@pytest.mark.parametrize(("required", "code"), [("all", 1), ("", 0)])
def test_scripts_test_refuses_to_skip(required: str, code: int) -> None:
    """A marked test without its program fails under scripts/test, and is skipped under plain pytest."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/process/test_promtool.py",
    ]
    environment = os.environ | {"PATH": "", needed.EVERYTHING: required}
    done = subprocess.run(
        [*argv, "--exitfirst"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert "not installed: promtool (apt-get install prometheus)" in done.stdout
