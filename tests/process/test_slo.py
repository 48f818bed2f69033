"""The search for the highest load within objectives: what guidellm is told, and what is made of its report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Program

from specserve.app.arm import ArmServer, ArmSpec, search
from specserve.bench import advice, judge, report, workload
from specserve.bench.result import Arm, Result
from specserve.config.load import load
from specserve.errors import Unsound

RECORDED = Path(__file__).parents[1] / "data" / "guidellm-0.8.1.json"
"""Trimmed report of a search against the stub engine (6 ms a step, and 1 ms more for each further request)."""
OBJECTIVES = {"ttft_p99": 0.2, "tpot_p99": 0.015}
CONFIG = "server: {served_model_name: stub}\nmodels: {target_model: {path: /m}}\nspeculative_decoding: {method: ngram}\n"
PROGRAM = """#!{python}
import json, pathlib, shutil, sys
scenario = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
shutil.copy(scenario, "{seen}")
spec = json.loads(scenario.read_text())["spec"]
assert len(pathlib.Path(spec["data"][0]["path"]).read_text().splitlines()) >= 5000
shutil.copy("{report}", spec["outputs"][0]["path"])
"""


def program(folder: Path, report: Path) -> dict[str, str]:
    """Environment whose guidellm answers with a recorded report."""
    path = folder / "guidellm"
    path.write_text(PROGRAM.format(python=sys.executable, seen=folder / "seen.json", report=report))
    path.chmod(0o755)
    return {"PATH": str(folder)}


def server(folder: Path, url: str) -> ArmServer:
    path = folder / "config.yaml"
    path.write_text(CONFIG)
    (folder / "key").write_text("k3y")
    loaded = load(path, environ={}, overrides=(f"server.api_key_file={folder}/key",))
    return ArmServer(ArmSpec("speculative", loaded, url=url), folder, {})


def test_the_search_is_guidellms(tmp_path: Path) -> None:
    """Objectives, prompts and key reach guidellm; its probes and its answer become the result, in words for people."""
    arm = server(tmp_path, "http://127.0.0.1:1")
    found = search(arm, workload.builtin("chat"), OBJECTIVES, 5.0, program(tmp_path, RECORDED))
    spec = json.loads((tmp_path / "seen.json").read_text())["spec"]
    assert spec["metrics"]["slo"] == {"ttft_ms": 200.0, "tpot_ms": 15.0}
    assert (spec["backend"]["target"], spec["backend"]["api_key"]) == ("http://127.0.0.1:1", "k3y")
    assert spec["constraints"] == [{"kind": "max_duration", "seconds": 5.0}]
    assert [p.concurrency for p in found.probes] == [1, 2, 4, 8, 16, 12, 10, 9]
    assert found.best is not None
    assert (found.concurrency, found.best.is_met, found.best.is_certain) == (9, True, False)
    assert found.best.tpot_p99_seconds is not None
    assert 0.013 < found.best.tpot_p99_seconds < 0.015
    outcome = Result(
        specserve_version="0",
        created="2026-01-01",
        arms=[Arm(name="speculative")],
        blocks=[],
        searches=[found],
    )
    said = advice.conclusion(judge.verdict(outcome))
    assert said == [
        "Within TTFT P99 200 ms and TPOT P99 15 ms, chat: speculative 9 concurrent requests (23.9/s)."
    ]
    (part,) = [p for p in report.document([judge.verdict(outcome)]) if p.title == "Highest load"]
    assert part.table is not None
    ((*row, sure),) = part.table.rows
    assert row == ["chat", "speculative", "9", "23.94", "20.7", "14.2"]
    assert sure.startswith("no, 16 requests are too few")


def test_a_report_of_another_shape_is_said(tmp_path: Path) -> None:
    """A guidellm whose report is not known here is answered with the version that is."""
    (tmp_path / "other.json").write_text('{"benchmarks": []}')
    with pytest.raises(Unsound, match="guidellm's report cannot be read: KeyError: 'conclusions'"):
        search(
            server(tmp_path, "http://127.0.0.1:1"),
            workload.builtin("chat"),
            OBJECTIVES,
            5.0,
            program(tmp_path, tmp_path / "other.json"),
        )


def test_without_guidellm_it_is_said_what_to_install(tmp_path: Path) -> None:
    """--slo without guidellm, or with an objective that is none, ends before anything starts, with what to type."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    for slo, words in (
        ("ttft_p99=200ms", "guidellm is not installed; it searches for the highest load"),
        ("ttft=200", "'ttft=200' is not an objective; must be one of ttft_p99, tpot_p99, e2e_p99"),
    ):
        if "installed" in words and shutil.which("guidellm", path=str(Path(sys.executable).parent)):
            continue
        argv = [
            sys.executable,
            "-m",
            "specserve",
            "bench",
            str(tmp_path / "config.yaml"),
            "--slo",
            slo,
        ]
        argv += ["--url-baseline", "http://127.0.0.1:1", "--url-speculative", "http://127.0.0.1:2"]
        out = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
            env=os.environ | {"PATH": ""},
        )
        assert (out.returncode, words in out.stderr) == (2, True), out.stderr
    assert not (tmp_path / "bench").exists()


@pytest.mark.skipif(
    shutil.which("guidellm") is None, reason="needs guidellm: pip install 'specserve[slo]'"
)
@pytest.mark.timeout(600)
def test_a_load_that_is_known_is_found(stub: Callable[..., Program], tmp_path: Path) -> None:
    """A server whose step grows by 10 ms a request cannot serve six within 55 ms, and one it can."""
    url = stub("--stub-step", "0.01", "--stub-per-sequence", "0.01", "--api-key", "k3y").url
    small = workload.limit(workload.builtin("chat"), 8)
    found = search(server(tmp_path, url), small, {"tpot_p99": 0.055}, 3.0, dict(os.environ))
    assert found.concurrency is not None
    assert 1 <= found.concurrency <= 5
