"""Bring a checkpoint here: from the Hub, or any place fsspec reaches. Its final name appears when it is whole."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from specserve.errors import ConfigError
from specserve.pair.integrity import Progress

_CHUNK = 8 * 1024**2


def destination(store: Path, path: str, revision: str | None) -> Path:
    """Where a model goes: the last two parts of its name, and the commit where one is known.

    >>> str(destination(Path("/models"), "Qwen/Qwen3-8B", "0123456789abcdef"))
    '/models/Qwen--Qwen3-8B@0123456789ab'
    >>> str(destination(Path("/models"), "s3://bucket/llm/big/", None))
    '/models/llm--big'
    """
    parts = [p for p in path.rsplit("://", maxsplit=1)[-1].strip("/").split("/") if p not in (".", "..")]
    name = "--".join(parts[-2:])
    return store / (f"{name}@{revision[:12]}" if revision else name)


def from_hub(repo: str, *, revision: str, store: Path, token: str | None) -> Path:
    """Download one commit. Files that an earlier, broken run finished are kept. Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    final = destination(store, repo, revision)
    if final.exists():
        return final
    partial = _partial(final)
    try:
        snapshot_download(repo, revision=revision, local_dir=partial, token=token)
    except (OSError, ValueError, HTTPError) as e:
        raise ConfigError(
            f"the download stopped ({e}); what is there is kept", where=repo, fix="run it again"
        ) from None
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    return partial.rename(final)


def to_cache(repo: str, *, revision: str | None, token: str | None) -> Path:
    """Download into the Hub cache, which keeps unfinished files under other names. Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        return Path(snapshot_download(repo, revision=revision, token=token))
    except (OSError, ValueError, HTTPError) as e:
        raise ConfigError(
            f"the download stopped ({e}); what is there is kept", where=repo, fix="run it again"
        ) from None


def from_place(url: str, *, store: Path, progress: Progress) -> Path:
    """Copy every file below an fsspec URL (``s3://``, ``gs://``, ``file://`` ...). Raises ConfigError."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        message = "copying from other places than the Hub needs fsspec"
        raise ConfigError(message, where=url, fix="pip install 'specserve[pull]'") from None
    final = destination(store, url, None)
    if final.exists():
        return final
    partial = _partial(final)
    try:
        files, root = url_to_fs(url)
        listing = files.find(root, detail=True)
        if not listing:
            raise ConfigError("there is nothing at this place", where=url, fix="correct the path")
        for remote, info in listing.items():
            name = _inside(remote, root)
            _copy(files, remote, int(info["size"]), partial / name, progress)
    except (OSError, ValueError, ImportError) as e:
        raise ConfigError(f"the copy stopped ({e}); what is there is kept", where=url, fix="run it again") from None
    return partial.rename(final)


def _partial(final: Path) -> Path:
    partial = final.with_name(f".partial-{final.name}")
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def _inside(remote: str, root: str) -> PurePosixPath:
    name = PurePosixPath(remote).relative_to(PurePosixPath(root))
    if ".." in name.parts or name.is_absolute():
        raise ValueError(f"{remote!r} is outside {root!r}")
    return name


def _copy(files: Any, remote: str, size: int, to: Path, progress: Progress) -> None:
    """Copy one file, going on where an earlier run stopped."""
    to.parent.mkdir(parents=True, exist_ok=True)
    done = to.stat().st_size if to.exists() else 0
    if done > size:
        to.unlink()
        done = 0
    if done == size and to.exists():
        return
    with files.open(remote, "rb") as source, to.open("ab") as sink:
        source.seek(done)
        while chunk := source.read(_CHUNK):
            sink.write(chunk)
            progress(to.name, len(chunk))
    if to.stat().st_size != size:
        raise OSError(f"{remote} gave {to.stat().st_size} of {size} bytes")
