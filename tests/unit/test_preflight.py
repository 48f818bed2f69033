"""The whole preflight: everything at once, skipping, exit codes, the two forms of output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.app import preflight
from specserve.app.preflight import PreflightReport
from specserve.config.load import Loaded, load
from specserve.engine.installed import introspect
from specserve.errors import ConfigError, PreflightRefused
from specserve.findings import Finding
from specserve.memory import calibration
from tests import checkpoints as make

ROOT = Path(__file__).parents[2]


def config(folder: Path, body: str = "") -> Path:
    """A config file beside ``target`` and ``draft``."""
    path = folder / "pair.yaml"
    models = f"models:\n  target_model: {{path: {folder}/target}}\n  draft_model: {{path: {folder}/draft}}\n"
    path.write_text(models + body)
    return path


def loaded(folder: Path, body: str = "") -> Loaded:
    """The same, loaded."""
    return load(config(folder, body), environ={})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in which the installed vLLM has answered nothing, so that no test waits for it to be asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    installed = introspect.installed()
    if installed is not None:
        file = introspect.cache_file(installed, os.environ)
        file.parent.mkdir(parents=True)
        file.write_text('{"unanswered": {}}')


def run(of: Loaded, *skip: str) -> PreflightReport:
    """The whole preflight."""
    return preflight.run(of, skip=skip, environ=os.environ)


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``specserve check`` in a process of its own; its last line tells whether torch was imported."""
    program = (
        "import sys\nfrom specserve import cli\nfrom specserve.commands import check\n"
        "cli.program.add_command(check.check)\n"
        "try: cli.main()\n"
        "finally: print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules], file=sys.stderr)"
    )
    env = {k: os.environ[k] for k in ("PATH", "HOME", "XDG_CACHE_HOME") if k in os.environ}
    command = [sys.executable, "-c", program, "check", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**env, "COLUMNS": "200"}, check=False
    )


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A pair that fits."""
    make.write(tmp_path / "target", make.llama())
    make.write(tmp_path / "draft", make.small_llama())
    return tmp_path


def test_a_good_pair(pair: Path) -> None:
    """Nothing to say but one line; the JSON says the same with numbers."""
    # A machine with neither engine nor GPU says so, and nothing else.
    done = check(str(config(pair)), "--skip", "vram-not-checked")
    assert (done.returncode, done.stderr) == (0, "[]\n")
    *work, last = done.stdout.splitlines()
    assert last.startswith(f"OK {pair}/target + {pair}/draft (draft_model)")
    assert {line.split("  ")[0] for line in work} <= {"proven", "not checked", "price", "next"}
    assert any("vocabulary: 320 of 320 tokens equal" in line for line in work)
    report = json.loads(check(str(config(pair)), "--format", "json").stdout)
    assert report["ok"] is True
    assert [f for f in report["findings"] if f["severity"] != "info"] == []
    assert report["pair"]["vocabulary"]["relation"] == "identical"
    assert report["pair"]["draft"]["kind"] == "draft_model"
    assert {"ok", "findings", "pair", "vram", "verdicts", "engine", "memory"} <= set(report)
    assert report["verdicts"]["pair"] == "fits"
    assert report["vram"]["kv_bytes_per_token"] > 0


def test_a_mutated_tokenizer_is_refused(pair: Path) -> None:
    """Two ids swapped, same size: exit code 3, both strings, a fix, no traceback."""
    draft = make.small_llama()
    draft.tokenizer = make.tokenizer(swap=(280, 300))
    make.write(pair / "draft", draft)
    done = check(str(config(pair)))
    assert (done.returncode, done.stderr) == (3, "[]\n")
    assert "280: 'Ġk' / 'ew', 300: 'ew' / 'Ġk'" in " ".join(done.stdout.split())
    assert "Fix: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("REFUSED")


def test_everything_at_once_errors_first(pair: Path) -> None:
    """A missing target hides nothing of the draft; errors come before warnings."""
    make.write(pair / "draft", make.small_llama(num_hidden_layers=5))
    for file in (pair / "target").iterdir():
        file.unlink()
    report = run(loaded(pair))
    assert {f.code for f in report.errors} == {"checkpoint-missing", "layers-missing"}
    severities = [f.severity for f in report.findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)


def test_skip_leaves_a_code_out(pair: Path) -> None:
    """A skipped code does not refuse; an unknown one is a configuration error with the nearest name."""
    make.write(pair / "draft", make.small_llama(num_hidden_layers=5))
    assert not run(loaded(pair)).ok
    assert run(loaded(pair), "layers-missing").ok
    assert run(loaded(pair), "layers-missing", "known-bad-lora").ok
    with pytest.raises(
        ConfigError, match=r"unknown code 'layer-missing'; did you mean 'layers-missing'\?"
    ):
        run(loaded(pair), "layer-missing")
    assert check(str(config(pair)), "--skip", "nonsense").returncode == 2


def test_require_raises_every_error() -> None:
    """What launch raises carries all errors, and only errors."""
    findings = [
        Finding("a", "error", "x", "one", "f"),
        Finding("b", "warning", "x", "two"),
        Finding("c", "error", "y", "three"),
    ]
    with pytest.raises(PreflightRefused) as caught:
        preflight.require(PreflightReport(tuple(findings)))
    assert [p.message for p in caught.value.problems] == ["one", "three"]
    preflight.require(PreflightReport((findings[1],)))


@pytest.mark.skipif(introspect.installed() is None, reason="needs a vLLM to compare with")
@pytest.mark.parametrize(
    ("engine", "told"), [("vllm 0.1.0", 2), (str(introspect.installed()), 0), (None, 0)]
)
def test_figures_of_another_engine_are_warned_about(
    pair: Path, engine: str | None, told: int
) -> None:
    """A profile and memory figures that another version gave are named with both versions; unknown ones are not."""
    profile = pair / "profile.json"
    for path in (profile, calibration.path_for(config(pair))):
        path.write_text(json.dumps({"engine": engine}))
    found = run(loaded(pair, f"sidecar: {{benchmark_profile: {profile}}}")).findings
    changed = [f for f in found if f.code == "engine-changed"]
    assert [f.message for f in changed] == [
        f"was measured with {engine}; installed is {introspect.installed()}"
    ] * told


def test_a_broken_profile_is_found_before_the_sidecar_reads_it(pair: Path) -> None:
    """What is no benchmark profile is refused with the key that names it."""
    (pair / "profile.json").write_text("{")
    found = run(loaded(pair, f"sidecar: {{benchmark_profile: {pair / 'profile.json'}}}")).errors
    assert [f.where for f in found if f.code == "profile-unusable"] == [
        f"sidecar.benchmark_profile ({pair / 'profile.json'})"
    ]


def test_without_speculation_the_draft_is_not_read(pair: Path) -> None:
    """``enabled: false`` checks the target alone."""
    for file in (pair / "draft").iterdir():
        file.unlink()
    report = run(loaded(pair, "speculative_decoding: {enabled: false}\n"))
    assert report.ok
    assert report.draft is None
    assert report.as_dict()["pair"]["draft"] is None


def test_one_fault_is_said_once(pair: Path) -> None:
    """A head configured as a model is not told again as the method that vLLM would choose."""
    make.write(pair / "draft", make.eagle3())
    report = run(loaded(pair))
    assert [f.code for f in report.errors] == ["head-as-model"]
