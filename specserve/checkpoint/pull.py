"""Bring a checkpoint here: from the Hub, or any place fsspec reaches. Its final name appears when
it is whole.

Several machines may pull into one folder, and not every network file system keeps locks between
them. Copies need none: all write the same bytes at the same offsets, and skip what another
finished. From the Hub each machine has a folder of its own; huggingface_hub (2.4, read 2026-11-30)
does not share one. Names are given by rename.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from specserve.checkpoint.access import HubAccess
from specserve.checkpoint.lock import Progress
from specserve.errors import ConfigError

_CHUNK = 8 * 1024**2
_SYNC = 64 * 1024**2
"""Bytes between two syncs, and so what a machine that died may have left as zeros at the end of a
file.
"""
_IDENTITY = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified")
"""What tells one content of a remote file from the next, as the file systems of fsspec name it."""


def destination(store: Path, path: str, revision: str | None) -> Path:
    """Where a model goes: the last two parts of its name, and the commit where one is known.

    >>> str(destination(Path("/models"), "Qwen/Qwen3-8B", "0123456789abcdef"))
    '/models/Qwen--Qwen3-8B@0123456789ab'
    >>> str(destination(Path("/models"), "s3://bucket/llm/big/", None))
    '/models/llm--big'
    """
    parts = [
        p for p in path.rsplit("://", maxsplit=1)[-1].strip("/").split("/") if p not in (".", "..")
    ]
    name = "--".join(parts[-2:])
    return store / (f"{name}@{revision[:12]}" if revision else name)


def from_hub(repo: str, *, revision: str, store: Path, access: HubAccess) -> Path:
    """Download one commit.

    Files that an earlier, broken run finished are kept. Raises ConfigError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    final = destination(store, repo, revision)
    if final.exists():
        return final
    partial = final.with_name(f".partial-{final.name}-{socket.gethostname()}")
    try:
        with _alone(partial):
            if not final.exists():
                snapshot_download(
                    repo,
                    revision=revision,
                    local_dir=partial,
                    token=access.token,
                    endpoint=access.endpoint,
                )
                _name(partial, final)
    except (OSError, ValueError, HTTPError) as e:
        if not final.exists():  # another machine was faster, and took this folder away
            raise _stopped("download", e, repo) from None
    for rest in (final / ".cache", *store.glob(f".partial-{escape(final.name)}-*")):
        shutil.rmtree(rest, ignore_errors=True)
        with suppress(OSError):  # the lock is a file
            rest.unlink()
    return final


@contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """One process of this machine at a time: huggingface_hub takes a file away that another has
    just written.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.with_name(f"{partial.name}.lock").open("w") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def to_cache(repo: str, *, revision: str | None, commit: str | None, access: HubAccess) -> Path:
    """Download into the Hub cache, which keeps unfinished files under other names. Raises
    ConfigError.

    ``revision`` as configured: the cache finds a branch offline only if it was asked for by this
    name.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                token=access.token,
                endpoint=access.endpoint,
                cache_dir=access.cache,
            )
        )
    except (OSError, ValueError, HTTPError) as e:
        raise _stopped("download", e, repo) from None
    if commit is not None and folder.name != commit:
        message = f"{revision or 'main'} moved from {commit} to {folder.name} during the download"
        raise ConfigError(message, where=repo, fix="run it again")
    return folder


def from_place(url: str, *, store: Path, progress: Progress) -> Path:
    """Copy every file below an fsspec URL (``s3://``, ``gs://``, ``file://`` ...).

    Raises ConfigError.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        message = "copying from other places than the Hub needs fsspec"
        raise ConfigError(message, where=url, fix="pip install 'specserve[pull]'") from None
    final = destination(store, url, None)
    if final.exists():
        return final
    partial = None
    try:
        files, root = url_to_fs(url)
        listing = files.find(root, detail=True)
        if not listing:
            raise ConfigError("there is nothing at this place", where=url, fix="correct the path")
        partial = _partial(final, listing)
        # Several pullers begin with different files.
        for remote in random.sample(list(listing), len(listing)):
            if final.exists():
                break
            _copy(
                files,
                remote,
                int(listing[remote]["size"]),
                partial / _inside(remote, root),
                progress,
            )
        _name(partial, final)
    except (OSError, ValueError, ImportError) as e:
        if not final.exists():
            raise _stopped("copy", e, url) from None
    if partial is not None:  # it is there where another puller was faster
        shutil.rmtree(partial, ignore_errors=True)
    # By a puller that asked for the file just before another named it.
    for begun in final.rglob(".partial-*"):
        begun.unlink(missing_ok=True)
    return final


def _partial(final: Path, listing: Mapping[str, Mapping[str, Any]]) -> Path:
    """The folder to fill.

    A listing that changed gets another one: two contents never mix in one file.
    """
    facts = [
        [name, info["size"], *(str(info.get(key)) for key in _IDENTITY)]
        for name, info in sorted(listing.items())
    ]
    partial = final.with_name(
        f".partial-{sha256(repr(facts).encode()).hexdigest()[:8]}-{final.name}"
    )
    for old in final.parent.glob(f".partial-????????-{escape(final.name)}"):
        if old != partial:
            shutil.rmtree(old, ignore_errors=True)
    return partial


def _name(partial: Path, final: Path) -> None:
    """Give what is whole its name, unless another puller did."""
    try:
        partial.rename(final)
    except OSError:
        if not final.exists():
            raise


def _stopped(what: str, error: Exception, where: str) -> ConfigError:
    return ConfigError(
        f"the {what} stopped ({error}); what is there is kept", where=where, fix="run it again"
    )


def _inside(remote: str, root: str) -> PurePosixPath:
    name = PurePosixPath(remote).relative_to(PurePosixPath(root))
    if ".." in name.parts or name.is_absolute():
        raise ValueError(f"{remote!r} is outside {root!r}")
    return name


def _copy(files: Any, remote: str, size: int, to: Path, progress: Progress) -> None:
    """Copy one file, going on before the end of what an earlier run synced, or another puller
    writes.
    """
    if to.exists():
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".partial-{to.name}")
    # No mode of open() creates and keeps.
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "r+b") as sink, files.open(remote, "rb") as source:
        synced = at = max(0, os.fstat(descriptor).st_size - _SYNC)
        source.seek(at)
        sink.seek(at)
        while chunk := source.read(_CHUNK):
            sink.write(chunk)
            at += len(chunk)
            if at - synced >= _SYNC or at == size:
                sink.flush()
                os.fsync(sink.fileno())
                synced = at
            progress(to.name, len(chunk))
    if at != size:
        raise OSError(f"{remote} gave {at} of {size} bytes")
    _name(partial, to)
