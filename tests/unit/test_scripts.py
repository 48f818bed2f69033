"""The scripts, as far as they need neither engine nor network."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def prepare_models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/prepare_models.py as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("prepare_models")


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/models/text.py as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("models.text")


def write_weights(folder: Path) -> None:
    """A build that works."""
    (folder / "model.safetensors").write_text("weights")
    (folder / "model.safetensors").chmod(0o600)


def test_a_build_that_breaks_off_leaves_no_model(
    prepare_models: ModuleType, tmp_path: Path
) -> None:
    """Neither a model that looks ready, nor, after the next run, a folder of the broken one."""

    def breaks(folder: Path) -> None:
        write_weights(folder)
        raise KeyboardInterrupt

    model = tmp_path / "m"
    with pytest.raises(KeyboardInterrupt):
        prepare_models.prepare(model, "r1", breaks)
    assert not model.exists()
    prepare_models.prepare(model, "r1", write_weights)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_ready_model_is_not_built_again(prepare_models: ModuleType, tmp_path: Path) -> None:
    """Only another recipe builds anew."""
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        write_weights(folder)

    for recipe in ("r1", "r1", "r2"):
        prepare_models.prepare(tmp_path / "m", recipe, build)
    assert len(built) == 2


def test_weights_can_be_read_by_others(prepare_models: ModuleType, tmp_path: Path) -> None:
    """A container that runs as another user serves them too."""
    prepare_models.prepare(tmp_path / "m", "r1", write_weights)
    assert (tmp_path / "m" / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_held_out_text_is_not_in_the_training_text(text: ModuleType) -> None:
    """No document that is asked about was trained on."""
    corpus = text.train(2000)
    assert not [s for s in text.held_out(60) if s.prompt + s.continuation in corpus]


def test_text_repeats_exactly_by_seed(text: ModuleType) -> None:
    """The same seed gives the same prompts, another seed other ones."""
    assert text.held_out(3, seed=5) == text.held_out(3, seed=5)
    assert text.held_out(3, seed=5) != text.held_out(3, seed=6)
    assert text.instructions(1)[0].endswith(":") or "{" in text.instructions(1)[0]


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["quickstart", "--twice"], 2, "usage: scripts/quickstart [--once]\n"),
        (["quickstart", "--help"], 0, ""),
        (["test", "unti"], 2, "usage: scripts/test [unit|chart|engine] [PYTEST ARGUMENT...]\n"),
        (["test", "--help"], 0, ""),
        (["../.ci/run", "--help"], 0, ""),
        pytest.param(
            ["debian-packages", "coreutils"],
            0,
            "",
            marks=pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="not a Debian"),
        ),
    ],
)
def test_shell_script(command: list[str], code: int, says: str) -> None:
    """A wrong option is refused before anything is installed; a package that is there is not installed again."""
    done = subprocess.run(
        [str(SCRIPTS / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, says)


@pytest.mark.parametrize("name", ["setup", "test", "quickstart", "debian-packages"])
def test_shell_script_parses(name: str) -> None:
    """bash accepts the whole file, also the branches that this machine does not take."""
    done = subprocess.run(
        ["bash", "-n", str(SCRIPTS / name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_tool_of_the_tests_is_pinned() -> None:
    """What the extras test and chart install has one version, unless the engine uses it as well."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["optional-dependencies"]["test"], *project["optional-dependencies"]["chart"]]
    names = {re.split(r"[^\w.-]", text)[0] for text in wanted}
    lines = (ROOT / "constraints-test.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    assert all(version for _, _, version in pins)
    assert names - {name for name, _, _ in pins} == {"safetensors", "specserve"}


def test_several_runs_have_one_closing_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Counts and seconds add up; what is zero is left out."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    suite = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="{}" time="{}"/></testsuites>'
    (tmp_path / "unit.xml").write_text(suite.format(10, 1, 2, 1.5))
    (tmp_path / "engine.xml").write_text(suite.format(5, 0, 0, 2.0))
    line = importlib.import_module("sum_results").closing_line(tmp_path)
    assert line.strip("= ") == "1 failed, 12 passed, 2 skipped in 3.50s"


def imports() -> list[tuple[str, str, str]]:
    """(file, module, name) of each import of ours in a script, also in code that it hands to another interpreter."""
    found = []
    for path in sorted(SCRIPTS.rglob("*")):
        if not path.is_file() or path.suffix not in ("", ".py"):
            continue
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(
            r"^\s*from (specserve[\w.]*) import ([\w, ]+)(?:\s*#.*)?$", text, re.M
        ):
            for name in names.split(","):
                found.append((path.name, module, name.split(" as ")[0].strip()))
    return found


def test_scripts_import_what_there_is() -> None:
    """A script whose code moved away would fail only when somebody runs it."""
    lost = []
    for file, module, name in imports():
        try:
            there = hasattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            there = False
        if not there:
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError:
                lost.append(f"{file}: from {module} import {name}")
    assert lost == []
    assert len(imports()) > 10
