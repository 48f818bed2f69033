"""How the Hub is reached: the variables of huggingface_hub and vLLM, as the engine will have them.

huggingface_hub reads its variables once, of its own process; the engine's environment may say
something else (``engine.env``). Names and meanings were read in huggingface_hub 2.4
(``constants.py``, ``utils/_auth.py``) and vLLM 0.32 (``envs.py``), 2026-12-01.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import expandvars
from pathlib import Path

from specserve.config.schema import Settings
from specserve.files import read_small

HUB = "https://huggingface.co"
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
_MAX_TOKEN_BYTES = 64 * 1024


@dataclass(frozen=True)
class HubAccess:
    """Where repositories are looked up, and with which token."""

    endpoint: str
    """Without a slash at the end."""
    cache: Path
    offline: bool = False
    token: str | None = field(default=None, repr=False)
    modelscope: Path | None = None
    """ModelScope's cache, where the engine takes its models from ModelScope
    (``VLLM_USE_MODELSCOPE``).
    """

    @classmethod
    def of(
        cls, environ: Mapping[str, str], *, token: str | None = None, offline: bool = False
    ) -> HubAccess:
        """As these variables say; ``token`` None takes theirs, or the file of ``hf auth login``.

        >>> access = HubAccess.of({"HF_ENDPOINT": "https://mirror/", "TRANSFORMERS_OFFLINE": "1"})
        >>> access.endpoint, access.offline
        ('https://mirror', True)
        """
        home = environ.get("HOME") or str(Path.home())
        base = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
        hf_home = _path(environ.get("HF_HOME") or f"{base}/huggingface", home)
        cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
        off = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
        modelscope = None
        if environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
            modelscope = _path(
                environ.get("MODELSCOPE_CACHE") or f"{home}/.cache/modelscope/hub", home
            )
        return cls(
            endpoint=(environ.get("HF_ENDPOINT") or HUB).rstrip("/"),
            cache=_path(cache or f"{hf_home}/hub", home),
            offline=offline or off.upper() in _TRUE,
            token=token or _token(environ, hf_home, home),
            modelscope=modelscope,
        )

    def in_modelscope(self, name: str) -> Path | None:
        """Where ModelScope's cache holds a model; None where it does not.

        Its newer layout has a folder ``models``, and a dot in a name is three underscores.
        """
        if self.modelscope is None:
            return None
        spelt = name.replace(".", "___")
        places = (self.modelscope / part / spelt for part in ("models", "hub/models", ""))
        return next((place for place in places if place.is_dir()), None)


def access(settings: Settings, environ: Mapping[str, str] | None) -> HubAccess:
    """How the engine of this config will reach the Hub."""
    env = settings.engine.env
    variables = {**(environ or {}), **env}
    return HubAccess.of(variables, token=env.get("HF_TOKEN") or settings.models.token)


def _token(environ: Mapping[str, str], hf_home: Path, home: str) -> str | None:
    if environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
        return None
    given = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN")
    if given and given.strip():
        return given.strip()
    file = _path(environ.get("HF_TOKEN_PATH") or f"{hf_home}/token", home)
    try:
        return read_small(file, limit=_MAX_TOKEN_BYTES).strip() or None
    except (OSError, ValueError):
        return None


def _path(text: str, home: str) -> Path:
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]
    return Path(expandvars(text))
