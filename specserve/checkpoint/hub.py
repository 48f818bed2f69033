"""A checkpoint on the Hub: its listing, its small files, byte ranges of its weights. Nothing else
is fetched.

The HTTP API is used directly (``/api/models/<id>/revision/<rev>?blobs=true`` and
``/<id>/resolve/<commit>/<file>``); huggingface_hub gives the endpoint, the token and the cache, so
its environment variables work as everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from specserve.checkpoint.facts import CheckpointRefused, Source
from specserve.findings import Finding

if TYPE_CHECKING:
    import requests

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")
_TIMEOUT_SECONDS = 20.0
MAX_LISTING_BYTES = 32 * 1024**2


def looks_like_a_folder(path: str) -> bool:
    """Whether a path that does not exist was meant as a folder.

    >>> [looks_like_a_folder(p) for p in ("/models/x", "./x", "a/b/c", "Qwen/Qwen3-8B", "gpt2")]
    [True, True, True, False, False]
    """
    return (
        path.startswith(("/", ".", "~"))
        or not _HUB_ID.fullmatch(path)
        or "--" in path
        or ".." in path
    )


@dataclass(frozen=True)
class HubRepository:
    """One commit of a repository, read over HTTP; files that the cache already holds are read from
    there.
    """

    name: str
    revision: str
    sizes: Mapping[str, int]
    token: str | None = field(repr=False)
    folder: Path | None = None

    def files(self) -> Mapping[str, int]:
        """Files at the top of the repository."""
        return self.sizes

    def read(self, name: str, start: int, length: int) -> bytes:
        """Bytes of one file, by range request; from the cache where it is there."""
        if cached := _cached(self.name, name, self.revision):
            with cached.open("rb") as f:
                f.seek(start)
                return f.read(length)
        length = min(length, self.sizes.get(name, length) - start)
        if length <= 0:
            return b""
        url = f"{_endpoint()}/{self.name}/resolve/{self.revision}/{quote(name)}"
        response = _get(url, self.token, {"Range": f"bytes={start}-{start + length - 1}"})
        with response:
            response.raise_for_status()
            # a server may ignore Range and send it all
            if response.status_code == 206:
                skip = 0
            else:
                skip = start
            if skip > 1 << 20:
                raise OSError(f"the server ignores range requests for {name}")
            return _bounded(response, skip + length)[skip:]


def open_repository(name: str, *, revision: str | None, token: str | None, offline: bool) -> Source:
    """The repository at ``revision``, resolved to a commit; the cache when offline.

    Raises CheckpointRefused.
    """
    import requests
    from huggingface_hub import constants, get_token

    if offline or constants.HF_HUB_OFFLINE:
        return _from_cache(name, revision, "offline mode is on (HF_HUB_OFFLINE)")
    url = (
        f"{_endpoint()}/api/models/{name}/revision/{quote(revision or 'main', safe='')}?blobs=true"
    )
    secret = token or get_token()
    try:
        with _get(url, secret, {}) as response:
            if response.status_code != 200:
                raise CheckpointRefused(
                    [_refusal(name, revision, response, has_token=secret is not None)]
                )
            body = _bounded(response, MAX_LISTING_BYTES)
    except (requests.RequestException, OSError) as e:
        return _from_cache(name, revision, f"the Hub cannot be reached ({_short(e)})")
    commit, sizes = _listing(name, body)
    return _complete_snapshot(name, commit, sizes) or HubRepository(name, commit, sizes, secret)


def _listing(name: str, body: bytes) -> tuple[str, dict[str, int]]:
    from specserve.checkpoint.safetensors import Corrupt, parse_object

    try:
        info = parse_object(body, what="the Hub's answer")
    except Corrupt as e:
        raise CheckpointRefused(
            [Finding("hub-unreachable", "error", name, str(e), "check HF_ENDPOINT")]
        ) from None
    siblings = info.get("siblings")
    commit = info.get("sha")
    if (
        not isinstance(siblings, list)
        or not isinstance(commit, str)
        or not re.fullmatch(r"[0-9a-f]{7,64}", commit)
    ):
        message = "the Hub's answer has no commit or no files; is this a Hub?"
        raise CheckpointRefused(
            [Finding("hub-unreachable", "error", name, message, "check HF_ENDPOINT")]
        )
    return commit, {file: n for file, n in map(_sibling, siblings) if file and "/" not in file}


def _sibling(entry: Any) -> tuple[str, int]:
    if not isinstance(entry, dict) or not isinstance(entry.get("rfilename"), str):
        return "", 0
    lfs = entry.get("lfs")
    if entry.get("size") is not None:
        n = entry.get("size")
    elif isinstance(lfs, dict):
        n = lfs.get("size")
    else:
        n = None
    return entry["rfilename"], n if isinstance(n, int) and n >= 0 else 0


def _refusal(
    name: str, revision: str | None, response: requests.Response, *, has_token: bool
) -> Finding:
    code = response.headers.get("X-Error-Code", "")
    if code == "RevisionNotFound":
        message = (
            f"revision {revision!r} does not exist on the Hub; it must be a commit, tag or branch"
        )
        return Finding("hub-revision", "error", name, message, "correct the revision")
    if response.status_code in (401, 403) or code == "GatedRepo":
        if has_token:
            message = (
                f"the Hub refuses this token ({response.status_code}); it must "
                "have access to the repository"
            )
            fix = f"ask for access at {_endpoint()}/{name}, or use another token"
        else:
            message = "the Hub wants a token, or there is no such repository and no such folder"
            fix = "correct the path, or set models.hub_token_file (or HF_TOKEN)"
        return Finding("hub-access", "error", name, message, fix)
    if response.status_code == 404:
        message = "there is neither a folder nor a Hub repository of this name"
        return Finding("checkpoint-missing", "error", name, message, "correct the path")
    return Finding(
        "hub-unreachable",
        "error",
        name,
        f"the Hub answers {response.status_code}",
        "try again later",
    )


def _from_cache(name: str, revision: str | None, reason: str) -> Source:
    from specserve.checkpoint.folder import LocalFolder

    config = _cached(name, "config.json", revision)
    if config is None:
        message = f"there is no folder of this name, {reason} and the model is not in the Hub cache"
        fix = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise CheckpointRefused([Finding("hub-unreachable", "error", name, message, fix)])
    return LocalFolder(name, config.parent, config.parent.name)


def _complete_snapshot(name: str, commit: str, sizes: Mapping[str, int]) -> Source | None:
    """The cache's snapshot of this commit when it holds every file that is read here."""
    from specserve.checkpoint.folder import LocalFolder

    wanted = [n for n in sizes if n.endswith((".json", ".safetensors", ".model"))]
    config = _cached(name, "config.json", commit)
    if config is None or not all(_cached(name, n, commit) for n in wanted):
        return None
    return LocalFolder(name, config.parent, commit)


def _cached(repo: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, revision=revision)
    if isinstance(found, str):
        return Path(found)
    return None


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT).rstrip("/")


def _get(url: str, token: str | None, headers: Mapping[str, str]) -> requests.Response:
    import requests

    if token:
        auth = {"Authorization": f"Bearer {token}"}
    else:
        auth = {}
    return requests.get(url, headers={**headers, **auth}, timeout=_TIMEOUT_SECONDS, stream=True)


def _bounded(response: requests.Response, limit: int) -> bytes:
    """The body, at most ``limit`` bytes of it."""
    parts, got = [], 0
    for part in response.iter_content(64 * 1024):
        parts.append(part)
        got += len(part)
        if got >= limit:
            break
    return b"".join(parts)[:limit]


def _short(error: Exception) -> str:
    if len(str(error)) > 80:
        return type(error).__name__
    return str(error)
