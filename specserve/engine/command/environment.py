"""The environment that the engine runs in: what vLLM only warns about is set, what the user set is
left alone.

Read in vLLM 0.32's sources (``vllm/envs.py``, ``platforms/cpu.py``, ``v1/worker/cpu_worker.py``;
2026-11-29). On a GPU nothing is tuned: vLLM documents no NCCL or allocator setting as better than
its own default, and its sleep mode refuses ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``
(``config/vllm.py``).

Light to import: code inside the engine loads it (:mod:`specserve.engine.inside.repairs`, `.auth`).
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.errors import ConfigError, Problem
from specserve.units import GIB, gib

if TYPE_CHECKING:
    from specserve.config.schema import Settings

REPAIRS_VARIABLE = "SPECSERVE_REPAIRS"
"""Comma-separated repairs that :mod:`specserve.engine.inside.repairs` may apply inside the engine.
"""
CONTROL_VARIABLE = "SPECSERVE_CONTROL"
"""What the live control inside the engine is told (:class:`ControlOrder`)."""
RUN_VARIABLE = "SPECSERVE_RUN"
"""Tells the processes of one start of an engine from all others."""
RUN_HEADER = "X-Specserve-Run"
"""The same in its answer to /health."""
API_KEY_VARIABLE = "VLLM_API_KEY"
API_KEYS_VARIABLE = "SPECSERVE_API_KEYS"
"""Several keys, one a line: vLLM takes more than one on its command line only, which every user of
the machine can read, so they are asked for by our middleware alone.
"""
KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

RUNTIME_BYTES = 4 * GIB
"""Left beside weights and KV cache: three processes with torch and vLLM loaded, and activations."""
KV_SHARE = 0.4
"""Part of what is then free that the KV cache gets: weights are held twice for a moment while they
load, and the machine is rarely ours alone."""

_TCMALLOC_FOLDERS = (
    "usr/lib/*-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/local/lib64",
)
_OTHER_REPOSITORIES = frozenset(
    {
        "tokenizer",
        "hf-config-path",
        "generation-config",
        "lora-modules",
        "load-format",
        "model-loader-extra-config",
    }
)
"""Flags of vLLM's that may name something on the Hub."""


@dataclass(frozen=True)
class EngineEnvironment:
    """Changes to the environment that specserve itself was given."""

    env: Mapping[str, str]
    """Set, or set anew. What the settings ask for is in :attr:`EngineCommand.env`."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: what was found, and what was missing."""
    unset: frozenset[str] = field(default_factory=frozenset)
    """Variables of ours that the engine has no use for; some carry secrets."""

    def over(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the engine.

        >>> (EngineEnvironment({"A": "2"}, unset=frozenset({"B"})).over({"A": "1", "B": "1",
        ...  "C": "1"}))
        {'A': '2', 'C': '1'}
        """
        return {name: value for name, value in environ.items() if name not in self.unset} | dict(
            self.env
        )


@dataclass(frozen=True)
class Machine:
    """What the environment depends on, so that a test can be any machine."""

    root: Path = Path("/")
    prefix: Path = Path(sys.prefix)
    """Where the engine's Python packages put their libraries (``lib/libiomp5.so``)."""
    architecture: str = field(default_factory=platform.machine)


def prepare(
    settings: Settings,
    environ: Mapping[str, str] | None = None,
    *,
    cpu: bool,
    weights_bytes: int | None = None,
    machine: Machine | None = None,
) -> EngineEnvironment:
    """The environment for ``settings``. A value in ``environ`` or in ``engine.env`` always wins
    over ours.

    ``cpu``: the engine runs on the CPU. ``weights_bytes``: of target and draft together. Raises
    ConfigError for a key that only the engine would know. Names that vLLM does not read, or that
    Kubernetes made, are :mod:`specserve.engine.installed.support`'s to find.
    """
    if environ is None:
        environ = os.environ
    machine = machine or Machine()
    theirs = {**environ, **settings.engine.env}
    if unknown := unknown_key(settings, environ):
        raise ConfigError([unknown])
    notes: list[str] = []
    ours = {"VLLM_NO_USAGE_STATS": "1"}
    if _all_local(settings):
        ours["HF_HUB_OFFLINE"] = "1"
    if cpu:
        ours |= _preload(machine, theirs, notes)
        ours |= _kv_space(settings, machine, theirs, weights_bytes, notes)
    wanted = {name: value for name, value in ours.items() if name not in environ}
    if cpu:
        marker = _marker(settings, theirs, notes)
    else:
        marker = {}
    unset = frozenset(
        name for name in environ if name.startswith("SPECSERVE_") and name not in marker
    )
    return EngineEnvironment({**wanted, **marker}, tuple(notes), unset)


@dataclass(frozen=True)
class ControlOrder:
    """What the live control inside the engine is told: where to begin, and where never to draft."""

    rows: tuple[tuple[int, int, int], ...] = ()
    """First batch size, last batch size, tokens per draft: of ``speculative_decoding.schedule``."""
    largest_batch: int | None = None
    """``speculative_decoding.max_batch_size``."""

    def first_at(self, batch: int, longest: int) -> int:
        """Tokens per draft to begin with at a batch size; none where no row says anything.

        >>> ControlOrder(((1, 8, 4), (9, 64, 2))).first_at(100, 5), ControlOrder().first_at(1, 5)
        (2, 0)
        """
        tokens = 0
        for first, _, row_tokens in self.rows:
            if first <= batch:
                tokens = row_tokens
        return min(tokens, longest)

    def as_text(self) -> str:
        """The value of the variable."""
        return json.dumps({"rows": self.rows, "largest_batch": self.largest_batch})


def control_order(environ: Mapping[str, str] | None = None) -> ControlOrder:
    """What the live control is told; asked inside the engine. Raises ValueError for another text
    than ours.
    """
    if environ is None:
        environ = os.environ
    text = environ.get(CONTROL_VARIABLE)
    if not text:
        return ControlOrder()
    given = json.loads(text)
    rows = tuple((int(first), int(last), int(tokens)) for first, last, tokens in given["rows"])
    return ControlOrder(rows, given["largest_batch"])


def requested_repairs(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """The repairs that whoever started this process asked for; asked inside the engine."""
    value = (os.environ if environ is None else environ).get(REPAIRS_VARIABLE, "")
    return frozenset(name for name in value.split(",") if name)


def run_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Which start of an engine this process belongs to; asked inside the engine."""
    return (os.environ if environ is None else environ).get(RUN_VARIABLE) or None


def api_keys(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The keys that clients of this engine may send; asked inside the engine."""
    if environ is None:
        environ = os.environ
    several = environ.get(API_KEYS_VARIABLE, "").splitlines()
    return tuple(several) or tuple(key for key in [environ.get(API_KEY_VARIABLE)] if key)


def unknown_key(settings: Settings, environ: Mapping[str, str]) -> Problem | None:
    """A key that the engine would ask for and that specserve's own checks would not send."""
    ours, inside = settings.server.api_keys, settings.engine.env.get(API_KEY_VARIABLE)
    if inside is not None and (inside,) != (ours or ("",)):
        return Problem(
            (
                "is not what server.api_key is; the engine would ask for a key that specserve's "
                "own "
                "checks do not send"
            ),
            where=f"engine.env.{API_KEY_VARIABLE}",
            fix="move it to server.api_key, or better to a file that server.api_key_file names",
        )
    if inside is None and not ours and environ.get(API_KEY_VARIABLE):
        return Problem(
            (
                "is set but server.api_key is not; the engine would ask for a key that specserve's "
                "own checks do not send"
            ),
            where=f"environment {API_KEY_VARIABLE}",
            fix=f"--set 'server.api_key=${{{API_KEY_VARIABLE}}}', or unset {API_KEY_VARIABLE}",
        )
    return None


def _all_local(settings: Settings) -> bool:
    """Whether nothing that the engine loads can be on the Hub."""
    models = settings.models
    paths = [models.target_model.path, *([models.draft_model.path] if models.draft_model else [])]
    return all(Path(path).is_dir() for path in paths) and not (
        _OTHER_REPOSITORIES & settings.engine.flags.values.keys()
    )


def _marker(settings: Settings, theirs: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """The variable that lets our plugin act; without it the plugin does nothing."""
    repairs = settings.engine.repairs
    plugins = theirs.get("VLLM_PLUGINS")
    if repairs and plugins is not None and "specserve_repairs" not in plugins.split(","):
        names = ", ".join(repairs)
        notes.append(
            f"VLLM_PLUGINS leaves out specserve_repairs, so these repairs are not applied: {names}"
        )
    if repairs:
        return {REPAIRS_VARIABLE: ",".join(repairs)}
    return {}


def _preload(machine: Machine, theirs: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """OpenMP first, then the allocator, as vLLM's guide for CPUs asks; itself it only warns.

    What it brings depends on the worker's threads, which vLLM 0.32 binds to all physical cores but
    one. With a single thread nothing was to be measured (scripts/bench_launch.py). With two, on a
    busy machine, linear layers of 64 rows took 3.5 ms under Intel's OpenMP and 7.9 ms under the
    libgomp that vLLM would load itself (2026-11-30).
    """
    if "LD_PRELOAD" in theirs:
        notes.append(f"LD_PRELOAD is set and left as it is: {theirs['LD_PRELOAD'] or '(empty)'}")
        return {}
    found, missing = [], []
    if machine.architecture == "x86_64":  # elsewhere vLLM preloads torch's own libgomp
        openmp = machine.prefix / "lib" / "libiomp5.so"
        (
            found.append(openmp)
            if openmp.exists()
            else missing.append("OpenMP (pip install intel-openmp)")
        )
    tcmalloc = _tcmalloc(machine.root)
    (
        found.append(tcmalloc)
        if tcmalloc
        else missing.append("tcmalloc (apt-get install libtcmalloc-minimal4)")
    )
    # The loader splits LD_PRELOAD at colons and spaces, and knows no quoting.
    unusable = [path for path in found if set(" :") & set(str(path))]
    missing += [f"{path.name} (its path {path} has a space or colon)" for path in unusable]
    usable = [str(path) for path in found if path not in unusable]
    if usable:
        notes.append(f"preloading {', '.join(usable)}")
    if missing:
        notes.append(f"not preloaded, though vLLM asks for it: {'; '.join(missing)}")
    if usable:
        return {"LD_PRELOAD": ":".join(usable)}
    return {}


def _tcmalloc(root: Path) -> Path | None:
    for name in (
        "libtcmalloc_minimal.so.4",
        "libtcmalloc.so.4",
        "libtcmalloc_minimal.so",
        "libtcmalloc.so",
    ):
        for folder in _TCMALLOC_FOLDERS:
            if found := sorted(root.glob(f"{folder}/{name}")):
                return found[0]
    return None


def _kv_space(
    settings: Settings,
    machine: Machine,
    theirs: Mapping[str, str],
    weights_bytes: int | None,
    notes: list[str],
) -> dict[str, str]:
    """KV cache of each worker in whole GiB, vLLM's unit.

    Without it vLLM takes ``gpu_memory_utilization`` of the machine's whole memory, and refuses to
    start when anything else holds more than the rest.
    """
    free = free_bytes(machine.root)
    if (
        KV_VARIABLE in theirs
        or "kv-cache-memory-bytes" in settings.engine.flags.values
        or free is None
    ):
        return {}
    workers = (
        settings.models.target_model.tensor_parallel_size
        * settings.models.target_model.pipeline_parallel_size
    )
    left = max(0, free - RUNTIME_BYTES - (weights_bytes or 0))
    space = max(1, int(left * KV_SHARE / workers / GIB))
    if left < GIB * workers / KV_SHARE:
        notes.append(
            f"only {gib(free)} of memory is free; the KV cache gets the least vLLM allows, 1 GiB"
        )
    return {KV_VARIABLE: str(space)}


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that may still be used: MemAvailable, or less where a cgroup (v2, else v1) bounds this
    process.

    Page cache that the kernel would drop first (``inactive_file``) counts as free, as Kubernetes
    counts it.
    """
    available = _field(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        found = []
    else:
        found = [available * 1024]
    cgroup = root / "sys/fs/cgroup"
    for limit_file, usage_file, stat_file, cache in (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat", "inactive_file"),
        (
            cgroup / "memory/memory.limit_in_bytes",
            cgroup / "memory/memory.usage_in_bytes",
            cgroup / "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, usage = _integer(limit_file), _integer(usage_file)
        # V1 writes "unlimited" as a huge number.
        if limit is not None and usage is not None and limit < 1 << 62:
            found.append(max(0, limit - usage + (_field(stat_file, cache) or 0)))
    return min(found, default=None)


def _field(path: Path, name: str) -> int | None:
    """The number after a name in a file of lines ``name number``."""
    rows = (line.split() for line in _lines(path))
    return next(
        (int(row[1]) for row in rows if len(row) > 1 and row[0] == name and row[1].isdigit()), None
    )


def _lines(path: Path) -> Sequence[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return ()


def _integer(path: Path) -> int | None:
    """The number in a file; None when there is no file, or a word (``max``)."""
    text = "".join(_lines(path)).strip()
    if text.isdigit():
        return int(text)
    return None
