"""Models on the Hub: little is fetched, commits are resolved, and each way to fail has its sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specserve.app import preflight
from specserve.config.schema import Settings
from tests import checkpoints as make
from tests.hub_server import COMMIT, Hub, serve

READ = """
import json, os, sys
from specserve.checkpoint import read as checkpoint
from specserve.checkpoint.access import HubAccess
from specserve.checkpoint.facts import CheckpointRefused
out = []
for request in json.loads(sys.argv[1]):
    try:
        token, offline = request.pop("token", None), request.pop("offline", False)
        access = HubAccess.of(os.environ, token=token, offline=offline)
        m = checkpoint.read(**request, access=access)
    except CheckpointRefused as e:
        out.append({"codes": [f.code for f in e.findings], "text": str(e)})
    else:
        out.append({"revision": m.revision, "bytes": m.total_size_bytes, "tensors": len(m.tensors or ()),
                    "folder": m.folder and str(m.folder), "template": m.chat_template})
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A Hub with a public, a private and a broken repository."""
    root = tmp_path_factory.mktemp("hub")
    big = make.llama(hidden_size=512, heads=8, intermediate_size=2048, vocab_size=4096)
    make.write(root / "org" / "big", big, shards=2)
    make.write(root / "private" / "model", make.llama())
    make.write(root / "org" / "bad", make.llama())
    (root / "org" / "bad" / "model.safetensors").write_bytes(b"\xff" * 64)
    with serve(root) as server:
        server.token = "hf_secret"
        yield server


def read(url: str, cache: Path, *requests: dict[str, Any], **environ: str) -> list[dict[str, Any]]:
    """Read in a process of its own: the Hub client takes its settings from the environment when it is imported."""
    env = {"PATH": os.environ["PATH"], "HF_HOME": str(cache), "HF_ENDPOINT": url, **environ}
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(requests)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_headers_only(hub: Hub, tmp_path: Path) -> None:
    """Config, index and headers are fetched, the weights are not; main becomes a commit."""
    before = hub.sent_bytes
    [found] = read(hub.url, tmp_path, {"path": "org/big"})
    total = sum(f.stat().st_size for f in (hub.root / "org" / "big").glob("*.safetensors"))
    assert (found["revision"], found["tensors"], found["folder"]) == (COMMIT, 75, None)
    assert found["bytes"] > 0.99 * total
    assert found["template"]
    assert hub.sent_bytes - before < total / 100


def test_ways_to_fail(hub: Hub, tmp_path: Path) -> None:
    """Unknown name, unknown revision, no token, wrong token, broken header: each is said, the token never."""
    answers = read(
        hub.url,
        tmp_path,
        {"path": "org/none"},
        {"path": "org/big", "revision": "v9"},
        {"path": "private/model"},
        {"path": "private/model", "token": "hf_wrongwrongwrong"},
        {"path": "private/model", "token": "hf_secret"},
        {"path": "org/bad"},
        {"path": "org/big", "offline": True},
    )
    assert [a.get("codes") for a in answers] == [
        ["checkpoint-missing"],
        ["hub-revision"],
        ["hub-access"],
        ["hub-access"],
        None,
        ["checkpoint-corrupt"],
        ["hub-unreachable"],
    ]
    assert "models.hub_token_file" in answers[2]["text"]
    assert "hf_wrong" not in json.dumps(answers)
    assert "hf download org/big" in answers[6]["text"]


def test_server_without_ranges(hub: Hub, tmp_path: Path) -> None:
    """A proxy that ignores Range costs no more than the header's bytes."""
    hub.ranges = False
    try:
        [found] = read(hub.url, tmp_path, {"path": "org/big"})
    finally:
        hub.ranges = True
    assert found["tensors"] == 75


def test_no_network_uses_the_cache(hub: Hub, tmp_path: Path) -> None:
    """What the cache holds is used when nothing answers, and the commit is known from it."""
    snapshot = tmp_path / "hub" / "models--org--big" / "snapshots" / COMMIT
    make.write(snapshot, make.llama())
    refs = tmp_path / "hub" / "models--org--big" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    gone, absent = read("http://127.0.0.1:9", tmp_path, {"path": "org/big"}, {"path": "org/other"})
    assert (gone["revision"], gone["folder"]) == (COMMIT, str(snapshot))
    assert absent["codes"] == ["hub-unreachable"]
    [offline] = read(hub.url, tmp_path, {"path": "org/big"}, HF_HUB_OFFLINE="1")
    assert offline["revision"] == COMMIT


def test_unpinned_revision_is_warned_about(hub: Hub, tmp_path: Path) -> None:
    """A branch is warned about with the commit to pin; own code that is trusted must be pinned."""
    make.write(hub.root / "org" / "code", make.small_llama(auto_map={"AutoConfig": "m.M"}))
    program = """
import json, os, sys
from specserve.app import preflight
from specserve.config.schema import Settings
for revision in (None, sys.argv[1]):
    models = {"target_model": {"path": "org/code", "revision": revision, "trust_remote_code": True}}
    settings = Settings.model_validate({"models": models, "speculative_decoding": {"method": "ngram"}})
    target, _ = preflight.read(settings, "target_model", os.environ)
    print([(f.code, f.fix) for f in preflight.pair_findings(settings, target, None).findings])
"""
    env = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
    done = subprocess.run(
        [sys.executable, "-c", program, COMMIT], env=env, capture_output=True, text=True, check=True
    )
    fix = f'set models.target_model.revision: "{COMMIT}"'
    assert done.stdout.splitlines() == [
        str([("revision-unpinned", fix), ("remote-code-unpinned", fix)]),
        "[]",
    ]


def of(path: str, **env: str) -> Settings:
    """A config that serves one model, with variables for its engine."""
    return Settings.model_validate(
        {
            "models": {"target_model": {"path": path}},
            "speculative_decoding": {"enabled": False},
            "engine": {"env": env},
        }
    )


def codes(settings: Settings, **environ: str) -> list[str]:
    """What reading the target shows."""
    return [f.code for f in preflight.read(settings, "target_model", environ)[1]]


def test_the_engines_environment_counts(hub: Hub, tmp_path: Path) -> None:
    """Mirror, cache, token and offline mode of engine.env are those of our own look-ups."""
    reached = {"HF_ENDPOINT": f"{hub.url}/", "HF_HOME": str(tmp_path)}
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    assert codes(of("org/big", **reached), **away) == []
    assert codes(of("org/big"), **away) == ["hub-unreachable"]
    assert codes(of("private/model", **reached)) == ["hub-access"]
    assert codes(of("private/model", **reached, HF_TOKEN="hf_secret"), HF_TOKEN="hf_no") == []
    (tmp_path / "token").write_text("hf_secret\n")
    assert codes(of("private/model", **reached)) == []
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        assert codes(of("org/big", **reached, **{name: "1"})) == ["hub-unreachable"]
        assert codes(of("org/big", **reached, **{name: "0"}), **{name: "1"}) == []


def test_the_cache_is_the_engines(hub: Hub, tmp_path: Path) -> None:
    """A model in the cache that engine.env names is found there without a network."""
    repository = tmp_path / "cache" / "models--org--big"
    make.write(repository / "snapshots" / COMMIT, make.llama())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    settings = of("org/big", HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    target, found = preflight.read(settings, "target_model", {"HF_ENDPOINT": hub.url})
    assert found == []
    assert target is not None
    assert target.revision == COMMIT


def test_modelscope_is_read_from_its_cache_or_said(hub: Hub, tmp_path: Path) -> None:
    """The Hub is not asked for a model of ModelScope: its cache is read, or a warning says why not."""
    asked = len(hub.requests)
    environ = {"HF_ENDPOINT": hub.url, "VLLM_USE_MODELSCOPE": "True"}
    settings = of("org/big-1.5", MODELSCOPE_CACHE=str(tmp_path))
    target, [finding] = preflight.read(settings, "target_model", environ)
    assert target is None
    assert (finding.code, finding.severity) == ("hub-modelscope", "warning")
    make.write(tmp_path / "models" / "org" / "big-1___5", make.llama())
    target, found = preflight.read(settings, "target_model", environ)
    assert target is not None
    assert found == []
    assert len(hub.requests) == asked
