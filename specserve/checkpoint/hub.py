"""A checkpoint on the Hub: its listing, its small files, byte ranges of its weights. Nothing else
is fetched.

The HTTP API is used directly (``/api/models/<id>/revision/<rev>?blobs=true`` and
``/<id>/resolve/<commit>/<file>``); endpoint, token and cache are those of huggingface_hub's
variables (:mod:`specserve.checkpoint.access`), so they work as everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pydantic import JsonValue

from specserve.checkpoint.access import HubAccess
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
    access: HubAccess
    folder: Path | None = None

    def files(self) -> Mapping[str, int]:
        """Files at the top of the repository."""
        return self.sizes

    def read(self, name: str, start: int, length: int) -> bytes:
        """Bytes of one file, by range request; from the cache where it is there."""
        if cached := _cached(self.name, name, self.revision, self.access):
            with cached.open("rb") as f:
                f.seek(start)
                return f.read(length)
        length = min(length, self.sizes.get(name, length) - start)
        if length <= 0:
            return b""
        url = f"{self.access.endpoint}/{self.name}/resolve/{self.revision}/{quote(name)}"
        response = _get(url, self.access.token, {"Range": f"bytes={start}-{start + length - 1}"})
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


def open_repository(name: str, *, revision: str | None, access: HubAccess) -> Source:
    """The repository at ``revision``, resolved to a commit; the cache when offline.

    Raises CheckpointRefused.
    """
    import requests

    if access.modelscope is not None:
        return _from_modelscope(name, access)
    if access.offline:
        return _from_cache(name, revision, "offline mode is on (HF_HUB_OFFLINE)", access)
    url = (
        f"{access.endpoint}/api/models/{name}/revision/"
        f"{quote(revision or 'main', safe='')}?blobs=true"
    )
    try:
        with _get(url, access.token, {}) as response:
            if response.status_code != 200:
                raise CheckpointRefused([_refusal(name, revision, response, access)])
            body = _bounded(response, MAX_LISTING_BYTES)
    except (requests.RequestException, OSError) as e:
        return _from_cache(name, revision, f"the Hub cannot be reached ({_short(e)})", access)
    commit, sizes = _listing(name, body)
    return _complete_snapshot(name, commit, sizes, access) or HubRepository(
        name, commit, sizes, access
    )


def _from_modelscope(name: str, access: HubAccess) -> Source:
    """The engine takes its models from ModelScope, whose cache is read and nothing else."""
    from specserve.checkpoint.folder import LocalFolder

    folder = access.in_modelscope(name)
    if folder is not None:
        return LocalFolder(name, folder)
    message = (
        "VLLM_USE_MODELSCOPE is on, and ModelScope's cache does not hold the model; only what is "
        "there can be checked"
    )
    fix = f"modelscope download --model {name}"
    raise CheckpointRefused([Finding("hub-modelscope", "warning", name, message, fix)])


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


def _sibling(entry: JsonValue) -> tuple[str, int]:
    if not isinstance(entry, dict):
        return "", 0
    name, lfs = entry.get("rfilename"), entry.get("lfs")
    if not isinstance(name, str):
        return "", 0
    if entry.get("size") is not None:
        n = entry.get("size")
    elif isinstance(lfs, dict):
        n = lfs.get("size")
    else:
        n = None
    if isinstance(n, int) and n >= 0:
        return name, n
    return name, 0


def _refusal(
    name: str, revision: str | None, response: requests.Response, access: HubAccess
) -> Finding:
    code = response.headers.get("X-Error-Code", "")
    if code == "RevisionNotFound":
        message = (
            f"revision {revision!r} does not exist on the Hub; it must be a commit, tag or branch"
        )
        return Finding("hub-revision", "error", name, message, "correct the revision")
    if response.status_code in (401, 403) or code == "GatedRepo":
        if access.token is not None:
            message = (
                f"the Hub refuses this token ({response.status_code}); it must "
                "have access to the repository"
            )
            fix = f"ask for access at {access.endpoint}/{name}, or use another token"
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


def _from_cache(name: str, revision: str | None, reason: str, access: HubAccess) -> Source:
    from specserve.checkpoint.folder import LocalFolder

    config = _cached(name, "config.json", revision, access)
    if config is None:
        message = f"there is no folder of this name, {reason} and the model is not in the Hub cache"
        commit = ""
        if revision:
            commit = f" --revision {revision}"
        fix = (
            f"hf download {name}{commit} --include '*.json' '*.model', enough for check and plan "
            "(without --include to serve); HF_ENDPOINT names a mirror"
        )
        raise CheckpointRefused([Finding("hub-unreachable", "error", name, message, fix)])
    return LocalFolder(name, config.parent, config.parent.name)


def _complete_snapshot(
    name: str, commit: str, sizes: Mapping[str, int], access: HubAccess
) -> Source | None:
    """The cache's snapshot of this commit when it holds every file that is read here."""
    from specserve.checkpoint.folder import LocalFolder

    wanted = [n for n in sizes if n.endswith((".json", ".safetensors", ".model"))]
    config = _cached(name, "config.json", commit, access)
    if config is None or not all(_cached(name, n, commit, access) for n in wanted):
        return None
    return LocalFolder(name, config.parent, commit)


def _cached(repo: str, file: str, revision: str | None, access: HubAccess) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, cache_dir=access.cache, revision=revision)
    if isinstance(found, str):
        return Path(found)
    return None


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
