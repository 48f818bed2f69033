"""Are these the files that were meant?

SHA-256 from the config, or a manifest of names, sizes and hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from pydantic import JsonValue

from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.safetensors import Corrupt, parse_object
from specserve.config.models import Sha256
from specserve.errors import Change, ConfigError
from specserve.files import read_small
from specserve.findings import Finding

Progress = Callable[[str, int], None]
"""Called with a file's name and the bytes hashed since the last call."""
_CHUNK = 8 * 1024**2
MAX_MANIFEST_BYTES = 16 * 1024**2
MAX_FILES = 20_000


@dataclass(frozen=True)
class FileRecord:
    """One file as it was locked."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Files of each model, by its key in the config (``target_model``, ``draft_model``)."""

    models: Mapping[str, Mapping[str, FileRecord]]
    revisions: Mapping[str, str | None]

    def to_json(self) -> str:
        """The file's text: stable order, one entry a line."""
        models = {
            key: {
                "revision": self.revisions.get(key),
                "files": {n: asdict(r) for n, r in sorted(files.items())},
            }
            for key, files in self.models.items()
        }
        return json.dumps({"version": 1, "models": models}, indent=2) + "\n"


def lock_path(config: Path) -> Path:
    """The manifest beside a config file.

    >>> str(lock_path(Path("configs/prod.yaml")))
    'configs/prod.lock.json'
    """
    return config.with_suffix(".lock.json")


def files_below(folder: Path) -> dict[str, int]:
    """Every regular file of a checkpoint with its size; hidden folders (the Hub's bookkeeping) are
    left out.
    """
    found: dict[str, int] = {}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            path = Path(root, name)
            if path.exists():
                status = path.stat()
            else:
                status = None
            if status is not None and stat.S_ISREG(status.st_mode) and len(found) < MAX_FILES:
                found[path.relative_to(folder).as_posix()] = status.st_size
    return found


def lock(models: Mapping[str, ModelFacts], progress: Progress) -> Manifest:
    """Hash every file of every model.

    Raises ConfigError for a model that is not on this machine.
    """
    recorded, revisions = {}, {}
    for key, facts in models.items():
        folder = _folder(facts)
        recorded[key] = {
            name: FileRecord(n, sha256(folder / name, progress))
            for name, n in files_below(folder).items()
        }
        revisions[key] = facts.revision
    return Manifest(recorded, revisions)


def _folder(facts: ModelFacts) -> Path:
    if facts.folder is None:
        message = f"{facts.path} is not on this machine; its files cannot be hashed"
        raise ConfigError(message, fix="specserve models pull CONFIG")
    return facts.folder


def read_manifest(path: Path) -> Manifest:
    """A manifest from its file. Raises ConfigError."""
    fix = "specserve models lock CONFIG"
    try:
        body = parse_object(read_small(path, limit=MAX_MANIFEST_BYTES).encode())
        models = {key: _records(entry["files"]) for key, entry in body["models"].items()}
        revisions = {key: entry.get("revision") for key, entry in body["models"].items()}
    except FileNotFoundError:
        raise ConfigError(
            "there is no such manifest; it must be made first", where=str(path), fix=fix
        ) from None
    except (OSError, Corrupt) as e:
        raise ConfigError(f"the manifest cannot be used: {e}", where=str(path), fix=fix) from None
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
    ):  # another shape of JSON
        raise ConfigError(
            "the manifest cannot be used: it is not what `models lock` writes",
            where=str(path),
            fix=fix,
        ) from None
    return Manifest(models, revisions)


def _records(files: Mapping[str, JsonValue]) -> dict[str, FileRecord]:
    records = {}
    for name, entry in files.items():
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise Corrupt(f"{name!r} is outside the checkpoint")
        if not isinstance(entry, dict) or not isinstance(entry["size"], int):
            raise Corrupt(f"{name!r} has no size")
        records[name] = FileRecord(entry["size"], str(entry["sha256"]))
    return records


def verify(
    manifest: Manifest, models: Mapping[str, ModelFacts], progress: Progress | None = None
) -> Iterator[Finding]:
    """Compare what is there with the manifest: revision, names and sizes, then hashes of what is
    left.

    Without ``progress`` nothing is hashed; that takes milliseconds, and works for a model on the
    Hub too.
    """
    for key, facts in models.items():
        where, records = f"models.{key}.path", manifest.models.get(key)
        if records is None:
            message, fix = "the manifest does not hold this model", "specserve models lock CONFIG"
            yield Finding("lock-mismatch", "error", where, message, fix)
            continue
        if facts.folder is None:
            sizes = facts.sizes
        else:
            sizes = files_below(facts.folder)
        locked = manifest.revisions.get(key)
        if locked and facts.revision and facts.revision != locked:
            message = f"is at commit {facts.revision}, locked was {locked}"
            change = Change(f"models.{key}.revision", locked)
            yield Finding("lock-mismatch", "error", where, message, str(change), (change,))
        for name, record in records.items():
            # The Hub's listing was read for the top of the repository.
            if facts.folder is None and "/" in name:
                continue
            problem = _size_problem(sizes.get(name), record)
            if problem is None and progress is not None:
                problem = _hash_problem(_folder(facts) / name, record, progress)
            if problem:
                fix = f"download {name} again, or lock anew if the change was meant"
                yield Finding("lock-mismatch", "error", f"{where}: {name}", problem, fix)
        if facts.folder is not None and (extra := sorted(sizes.keys() - records.keys())):
            message = f"{len(extra)} files are not in the manifest, e.g. {extra[0]}"
            fix = "remove them, or lock anew if the change was meant"
            yield Finding("lock-mismatch", "warning", where, message, fix)


def _size_problem(n: int | None, record: FileRecord) -> str | None:
    if n is None:
        return "is missing"
    if n == record.size:
        return None
    return f"has {n} bytes, locked were {record.size}"


def _hash_problem(path: Path, record: FileRecord, progress: Progress) -> str | None:
    try:
        digest = sha256(path, progress)
    except OSError as e:
        return f"cannot be read ({e.strerror})"
    if digest == record.sha256:
        return None
    return f"has SHA-256 {digest[:16]}..., locked was {record.sha256[:16]}..."


def against_lock(config: Path, models: Mapping[str, ModelFacts]) -> Iterator[Finding]:
    """The quick comparison with the manifest beside a config file, where there is one."""
    path = lock_path(config)
    if not path.exists():
        return
    try:
        found = list(verify(read_manifest(path), models))
    except ConfigError as e:
        found = [
            Finding("lock-mismatch", "error", p.where or str(path), p.message, p.fix)
            for p in e.problems
        ]
    yield from found
    if not found:
        message = "names and sizes of all files are as locked; hashes were not computed"
        yield Finding(
            "lock-unhashed", "info", str(path), message, f"specserve models verify {config}"
        )


def bytes_to_hash(models: Mapping[str, ModelFacts]) -> int:
    """The size of all files of models that are on this machine: the total of a progress bar."""
    folders = [facts.folder for facts in models.values() if facts.folder is not None]
    return sum(size for folder in folders for size in files_below(folder).values())


def sha256(path: Path, progress: Progress) -> str:
    """Hash one file in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
            progress(path.name, len(chunk))
    return digest.hexdigest()


def check(
    facts: ModelFacts, expected: Sha256 | None, key: str, progress: Progress
) -> Iterator[Finding]:
    """``models.*.sha256``: one hash for the single weights file, or a map from file to hash."""
    if expected is None:
        return
    where = f"{key}.sha256"
    wanted, problem = _wanted(facts, expected)
    if problem:
        yield Finding(
            "sha256-unusable", "error", where, problem, "give a map: {model.safetensors: <hash>}"
        )
        return
    if facts.folder is None:
        message = f"{facts.path} is not on this machine; its files cannot be hashed"
        yield Finding("sha256-unusable", "error", where, message, "specserve models pull CONFIG")
        return
    for name, digest in wanted.items():
        try:
            actual = sha256(facts.folder / name, progress)
        except OSError as e:
            yield Finding(
                "sha256-mismatch",
                "error",
                where,
                f"{name} cannot be read ({e.strerror})",
                f"download {name} again",
            )
            continue
        if actual != digest.lower().removeprefix("sha256:"):
            message = f"{name} has SHA-256 {actual}; must be {digest}"
            yield Finding(
                "sha256-mismatch",
                "error",
                where,
                message,
                f"download {name} again; do not run this copy",
            )


def _wanted(facts: ModelFacts, expected: Sha256) -> tuple[dict[str, str], str | None]:
    if isinstance(expected, dict):
        outside = [
            n for n in expected if PurePosixPath(n).is_absolute() or ".." in PurePosixPath(n).parts
        ]
        return expected, f"{outside[0]!r} is outside the checkpoint" if outside else None
    weights = sorted({t.file for t in (facts.tensors or {}).values()})
    if len(weights) != 1:
        return (
            {},
            f"one hash is given and the weights are {len(weights)} files; each file needs its own",
        )
    return {weights[0]: expected}, None
