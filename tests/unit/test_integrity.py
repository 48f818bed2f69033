"""Files are the ones that were meant: hashes, manifests, and copies that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from specserve import cli
from specserve.checkpoint import lock as integrity
from specserve.checkpoint import pull
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.read import read
from specserve.errors import ConfigError
from tests import checkpoints as make
from tests.hub_server import COMMIT, serve


def quiet(_name: str, _n: int) -> None:
    """No progress."""


@pytest.fixture
def model(tmp_path: Path) -> ModelFacts:
    """A checkpoint on disk, with a file in a subfolder."""
    folder = make.write(tmp_path / "model", make.small_llama())
    (folder / "original").mkdir()
    (folder / "original" / "notes.txt").write_text("hello")
    return read(str(folder))


def verdict(manifest: integrity.Manifest, model: ModelFacts) -> list[tuple[str, str]]:
    """Place and sentence of each difference."""
    return [
        (f.where, f.message) for f in integrity.verify(manifest, {"target_model": model}, quiet)
    ]


def test_lock_and_verify(model: ModelFacts, tmp_path: Path) -> None:
    """What was locked verifies; the manifest survives its file."""
    manifest = integrity.lock({"target_model": model}, quiet)
    path = tmp_path / "prod.lock.json"
    path.write_text(manifest.to_json())
    again = integrity.read_manifest(path)
    assert again == manifest
    record = again.models["target_model"]["original/notes.txt"]
    assert record == integrity.FileRecord(5, hashlib.sha256(b"hello").hexdigest())
    assert verdict(again, model) == []


def test_each_difference_is_named(model: ModelFacts) -> None:
    """A changed byte, another size, a missing and a further file: one line each."""
    manifest = integrity.lock({"target_model": model}, quiet)
    assert model.folder is not None
    weights = model.folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + b"\x01")
    (model.folder / "config.json").write_text("{}")
    (model.folder / "tokenizer.json").unlink()
    (model.folder / "new.txt").write_text("x")
    found = dict(verdict(manifest, model))
    assert "has SHA-256" in found["models.target_model.path: model.safetensors"]
    assert "has 2 bytes, locked were" in found["models.target_model.path: config.json"]
    assert found["models.target_model.path: tokenizer.json"] == "is missing"
    assert found["models.target_model.path"] == "1 files are not in the manifest, e.g. new.txt"
    assert len(found) == 4


def test_the_lock_beside_a_config_is_compared_without_hashing(
    model: ModelFacts, tmp_path: Path
) -> None:
    """Names, sizes and commit are; a changed byte is not seen, and that hashes were left out is said."""

    def found(facts: ModelFacts) -> list[tuple[str, str]]:
        return [
            (f.code, f.severity)
            for f in integrity.against_lock(tmp_path / "c.yaml", {"target_model": facts})
        ]

    assert found(model) == []
    assert model.folder is not None
    pinned = replace(model, revision=COMMIT)
    path = integrity.lock_path(tmp_path / "c.yaml")
    path.write_text(integrity.lock({"target_model": pinned}, quiet).to_json())
    assert found(pinned) == found(model) == [("lock-unhashed", "info")]
    assert found(replace(model, revision=COMMIT[::-1])) == [("lock-mismatch", "error")]
    assert found(replace(model, folder=None, sizes=model.sizes)) == [("lock-unhashed", "info")]
    weights = model.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert found(model) == [("lock-unhashed", "info")]
    (model.folder / "new.txt").write_text("x")
    assert found(model) == [("lock-mismatch", "warning")]
    weights.write_bytes(b"")
    assert found(model) == [("lock-mismatch", "error"), ("lock-mismatch", "warning")]
    path.write_text("nonsense")
    assert found(model) == [("lock-mismatch", "error")]


@pytest.mark.parametrize(
    "body",
    [
        "nonsense",
        "[]",
        '{"models": {"target_model": {}}}',
        '{"models": {"target_model": {"files": {"../../etc/passwd": {"size": 1, "sha256": "x"}}}}}',
        '{"models": {"target_model": {"files": {"a": 1}}}}',
        '{"models": {"target_model": {"files": {"a": {"size": "all", "sha256": "x"}}}}}',
        '{"models": {"target_model": {"files": {"a": {"size": 1e999, "sha256": "x"}}}}}',
    ],
)
def test_unusable_manifest(tmp_path: Path, body: str) -> None:
    """A manifest that is broken, or that points outside, is a configuration error."""
    path = tmp_path / "x.lock.json"
    path.write_text(body)
    with pytest.raises(ConfigError, match="cannot be used"):
        integrity.read_manifest(path)


def test_progress_counts_every_byte(model: ModelFacts) -> None:
    """The bar's sum is the size of what was hashed."""
    seen: list[int] = []
    integrity.lock({"target_model": model}, lambda _name, n: seen.append(n))
    assert model.folder is not None
    assert sum(seen) == sum(integrity.files_below(model.folder).values())


def test_single_hash_is_of_the_weights(model: ModelFacts) -> None:
    """``sha256: <hash>`` means the one weights file; upper case and the prefix are fine."""
    assert model.folder is not None
    digest = hashlib.sha256((model.folder / "model.safetensors").read_bytes()).hexdigest()
    assert (
        list(
            integrity.check(model, "sha256:" + digest.upper().lower(), "models.target_model", quiet)
        )
        == []
    )
    assert [f.code for f in integrity.check(model, "0" * 64, "models.target_model", quiet)] == [
        "sha256-mismatch"
    ]


def test_copy_from_a_place(tmp_path: Path) -> None:
    """A copy goes on before its unsynced end, takes no part of another content, and gets its name at the end."""
    source, store = tmp_path / "llm" / "big", tmp_path / "store"
    source.mkdir(parents=True)
    whole = os.urandom(1 << 20) + b"w" * (64 << 20)
    (source / "model.safetensors").write_bytes(whole)
    url = f"file://{source}"

    def stop(_name: str, _n: int) -> None:
        raise OSError("evicted")

    with pytest.raises(ConfigError, match="evicted"):
        pull.from_place(url, store=store, progress=stop)
    (half,) = store.rglob(".partial-model.safetensors")
    half.write_bytes(
        whole[: 1 << 20] + bytes(64 << 20)
    )  # what a machine may leave that died before a sync
    copied: list[int] = []
    final = pull.from_place(url, store=store, progress=lambda _name, n: copied.append(n))
    assert (final, sum(copied)) == (pull.destination(store, url, None), 64 << 20)
    assert (final / "model.safetensors").read_bytes() == whole
    assert list(store.iterdir()) == [final]

    shutil.rmtree(final)
    with pytest.raises(ConfigError, match="evicted"):
        pull.from_place(url, store=store, progress=stop)
    whole = whole[::-1]
    (source / "model.safetensors").write_bytes(whole)
    pull.from_place(url, store=store, progress=quiet)
    assert (final / "model.safetensors").read_bytes() == whole
    with pytest.raises(ConfigError, match="nothing at this place"):
        pull.from_place(f"file://{tmp_path}/none", store=store, progress=quiet)


def test_several_pull_into_one_folder(tmp_path: Path) -> None:
    """Pods that start at once on a shared volume all find the whole model, and leave nothing else."""
    source, store = tmp_path / "llm" / "big", tmp_path / "store"
    source.mkdir(parents=True)
    for n in range(4):
        (source / f"model-{n}.safetensors").write_bytes(os.urandom(9 << 20))
    with ThreadPoolExecutor(4) as pods:
        pulls = [
            pods.submit(pull.from_place, f"file://{source}", store=store, progress=quiet)
            for _ in range(4)
        ]
        (final,) = {done.result() for done in pulls}
    assert [p.read_bytes() for p in sorted(final.iterdir())] == [
        p.read_bytes() for p in sorted(source.iterdir())
    ]
    assert list(store.iterdir()) == [final]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of a target and a draft on disk."""
    make.write(tmp_path / "target", make.llama())
    make.write(tmp_path / "draft", make.small_llama())
    path = tmp_path / "pair.yaml"
    path.write_text(
        f"models:\n  target_model: {{path: {tmp_path}/target}}\n  draft_model: {{path: {tmp_path}/draft}}\n"
    )
    return path


def specserve(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    env = {"PATH": os.environ["PATH"], **environ}
    command = [sys.executable, "-m", "specserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_commands(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lock, verify, change one byte, verify again: 0, 0, 3; without a manifest 2."""

    def typed(command: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["models", command, str(config)])
        return (int(ended.value.code or 0), *capsys.readouterr())

    assert typed("verify")[0] == 2
    code, out, err = typed("lock")
    assert (code, err) == (0, "")
    manifest, following = out.splitlines()
    assert manifest.startswith(f"{config.with_suffix('.lock.json')}: locked 8 files of 2 models, ")
    assert following == f"Next: specserve check {config}"
    assert set(json.loads(config.with_suffix(".lock.json").read_text())["models"]) == {
        "target_model",
        "draft_model",
    }
    assert typed("verify")[0] == 0
    weights = config.parent / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    code, _, err = typed("verify")
    assert code == 3
    assert "Error: models.draft_model.path: model.safetensors: has SHA-256" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Hub with one sharded model."""
    root = tmp_path_factory.mktemp("hub")
    make.write(root / "org" / "model", make.small_llama(), shards=2)
    with serve(root) as server:
        yield server.url


def test_pull_from_the_hub(hub: str, tmp_path: Path) -> None:
    """A model is downloaded at its commit, appears whole, and the key to set is printed; again it is there already."""
    path = tmp_path / "pair.yaml"
    path.write_text(
        f"models:\n  store: {tmp_path}/store\n  target_model: {{path: org/model}}\n"
        "speculative_decoding: {method: ngram}\n"
    )
    environ = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}
    final = tmp_path / "store" / f"org--model@{COMMIT[:12]}"
    with ThreadPoolExecutor(2) as pods:
        first, other = pods.map(
            lambda _: specserve("models", "pull", str(path), **environ), range(2)
        )
    assert (first.returncode, other.returncode) == (0, 0), first.stderr + other.stderr
    assert first.stdout.splitlines()[-1] == f"set models.target_model.path: {final}"
    assert [p.name for p in final.parent.iterdir()] == [final.name]
    assert read(str(final)).total_size_bytes == 82240
    assert specserve("models", "pull", str(path), **environ).returncode == 0


@pytest.mark.parametrize("pinned", ["", f", revision: {COMMIT}"])
def test_what_was_pulled_is_found_offline(hub: str, tmp_path: Path, pinned: str) -> None:
    """An engine without a network finds the model in the Hub cache, by its branch as by its commit."""
    path = tmp_path / "pair.yaml"
    path.write_text(
        f"models: {{target_model: {{path: org/model{pinned}}}}}\nspeculative_decoding: {{method: ngram}}\n"
    )
    environ = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}
    pulled = specserve("models", "pull", str(path), **environ)
    assert pulled.returncode == 0, pulled.stderr
    locked = specserve("models", "lock", str(path), HF_HUB_OFFLINE="1", **environ)
    assert locked.returncode == 0, locked.stderr


def test_a_branch_that_moved_is_not_taken_for_what_was_checked(hub: str, tmp_path: Path) -> None:
    """The commit that was asked about and the one that came differ: refused, since nobody checked the second."""
    code = (
        "import os, sys\nfrom specserve.errors import ConfigError\nfrom specserve.checkpoint.pull import to_cache\n"
        "from specserve.checkpoint.access import HubAccess\n"
        f"to = {{'revision': None, 'access': HubAccess.of(os.environ)}}\nprint(to_cache('org/model', commit='{COMMIT}', **to).name)\n"
        "try:\n    to_cache('org/model', commit='0' * 40, **to)\nexcept ConfigError as error:\n    sys.exit(str(error))"
    )
    environ = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert out.stdout.strip() == COMMIT, out.stderr
    assert f"org/model: main moved from {'0' * 40} to {COMMIT} during the download" in out.stderr
