"""``specserve plan`` as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from specserve.app.plan import Planning
from specserve.config.load import load
from specserve.engine.installed.introspect import installed
from specserve.engine.output.logs import EngineReport
from specserve.memory import calibration
from tests import checkpoints


def run(folder: Path, body: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Write a config and plan it."""
    config = folder / "pair.yaml"
    config.write_text(yaml.safe_dump(body), encoding="utf-8")
    command = [sys.executable, "-m", "specserve", "plan", str(config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def pair(tmp_path: Path) -> dict[str, Any]:
    """A config with a small target and draft on an L4."""
    target = checkpoints.write(tmp_path / "target", checkpoints.small_llama())
    draft = checkpoints.write(tmp_path / "draft", checkpoints.small_llama(layers=1))
    models = {"target_model": {"path": str(target)}, "draft_model": {"path": str(draft)}}
    return {"models": models, "hardware": {"gpu_name": "NVIDIA L4"}}


def test_a_plan_that_fits(tmp_path: Path) -> None:
    """Exit code 0, a table on stdout with the conclusion, the price and the next command last; nothing on stderr."""
    done = run(tmp_path, pair(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("GPU 0: NVIDIA L4, budget 19.8 GiB (0.90 of 22.0 GiB)\n")
    conclusion, price, following = done.stdout.splitlines()[-3:]
    assert conclusion.startswith("fits; ")
    assert price.startswith("Price of the draft: ")
    assert following.startswith("Next: specserve launch ")


def test_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    """Exit code 3, the error with its fix on stderr, the JSON still whole."""
    body = pair(tmp_path) | {"hardware": {"gpu_memory_gib": 0.01}}
    done = run(tmp_path, body, "--format", "json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["vram"]["fits"] is False
    text = run(tmp_path, body)
    assert text.returncode == 3
    assert "do not fit GPU 0: need " in text.stderr
    assert "\nFix: " in text.stderr


def test_an_index_is_enough(tmp_path: Path) -> None:
    """config.json and the index, no weights: the index's total size is the checkpoint's bytes."""
    body = pair(tmp_path)
    whole = json.loads(run(tmp_path, body, "--format", "json").stdout)["vram"]["gpus"][0][
        "target_weights_bytes"
    ]
    target = Path(body["models"]["target_model"]["path"])
    total = sum(f.stat().st_size for f in target.glob("*.safetensors")) // 2 * 2
    for weights in target.glob("*.safetensors"):
        weights.unlink()
    index = {
        "metadata": {"total_size": total},
        "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"},
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    done = json.loads(run(tmp_path, body, "--format", "json").stdout)["vram"]
    assert abs(done["gpus"][0]["target_weights_bytes"] / whole - 1) < 0.05
    assert done["terms"][0]["source"].startswith("index total_size")


def test_the_grid_is_a_table(tmp_path: Path) -> None:
    """--grid adds contexts x draft x share of the GPU."""
    done = run(tmp_path, pair(tmp_path), "--grid")
    assert done.returncode == 0
    assert "max_model_len  drafting" in done.stdout
    body = json.loads(run(tmp_path, pair(tmp_path), "--grid", "--format", "json").stdout)
    assert {"max_model_len", "draft", "utilization", "fits", "requests"} == body["grid"][0].keys()
    for key, value in (
        ("hardware.gpu_name", "banana"),
        ("models.target_model.tensor_parallel_size", "3"),
    ):
        wrong = run(tmp_path, pair(tmp_path), "--grid", "--set", f"{key}={value}")
        assert "max_model_len" not in wrong.stdout  # no row of it could fit or not fit


def test_what_was_measured_is_used_by_the_next_plan(tmp_path: Path) -> None:
    """A calibration beside the config makes the plan say `measured`, and only for the deployment it was made of."""
    body = pair(tmp_path)
    assert run(tmp_path, body).returncode == 0
    loaded = load(tmp_path / "pair.yaml", environ={})
    said = EngineReport(model_loading_bytes=2**30, available_kv_bytes=17 * 2**30, kv_cache_tokens=1)
    engine = installed()
    version = None if engine is None else engine.version
    plan = Planning.of(loaded, environ={}).plan()
    measured = calibration.measure(
        plan, said, key=calibration.key(loaded.settings, version, plan.gpu_name)
    )
    assert measured is not None
    calibration.save(measured, tmp_path / "pair.yaml")
    again = json.loads(run(tmp_path, body, "--format", "json").stdout)["vram"]
    assert again["confidence"] == "measured"
    assert again["gpus"][0]["kv_cache_bytes"] == 17 * 2**30
    other = json.loads(
        run(tmp_path, body, "--format", "json", "--set", "engine.max_num_seqs=7").stdout
    )["vram"]
    assert other["confidence"] == "modelled"
