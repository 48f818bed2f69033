"""The real engine, started through `specserve launch`: one at a time, kept while tests ask for it.

A test names its engine in one string: a file of configs/, then overrides as for ``--set``.

    @pytest.mark.parametrize("engine_server", ["tiny-pair.yaml speculative_decoding.enabled=false"], indirect=True)
    def test_target_alone(engine_server): ...

Without a parameter it is ``tiny-pair.yaml`` with a quick sidecar. A test that hurts its engine takes the
fixture ``launch`` instead, or, to save a start, ``last_engine_server``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MODELS = ROOT / ".cache" / "models"
DEFAULT = (
    "tiny-pair.yaml sidecar.scrape_interval_seconds=1"
    " sidecar.canary_timeout_seconds=5 sidecar.canary_interval_seconds=5"
)
"""With a sidecar that is quick, so that the tests of the sidecar can share it."""
HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
"""Without it the CPU engine emulates bfloat16, and checking a draft costs nearly as much as writing it."""
QUICKSTART = "quickstart.yaml"
if not HAS_AVX512:
    QUICKSTART += " models.target_model.dtype=float32"
START_SECONDS = 420
STOP_SECONDS = 60
MARK = "ENGINE_TEST_RUN"
"""Every process of one launch carries this variable, also those that lost their parent."""


@dataclass(frozen=True)
class Launched:
    """A `specserve launch` that runs."""

    spec: str
    base_url: str
    """Of the OpenAI server, without /v1."""
    sidecar_url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    """What specserve printed."""
    engine_log_path: Path
    mark: str
    sessions: set[int] = field(default_factory=set)
    """Every session seen: vLLM's workers write a title over their environment, which hides the mark."""

    def log(self) -> str:
        """What specserve printed until now."""
        return self.log_path.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Every living process of this launch, specserve first."""
        self.sessions.update(
            s for p in psutil.process_iter() if _carries(p, self.mark) and (s := _session(p))
        )
        found = [p for p in psutil.process_iter() if _session(p) in self.sessions]
        return sorted(found, key=lambda p: p.pid != self.process.pid)

    def stop(self) -> int:
        """SIGTERM, wait, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def end(self) -> list[str]:
        """Stop whatever still runs, by force if need be; the command lines of what had been left behind."""
        self.family()  # sessions, while somebody still carries the mark
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_SECONDS)
        _, left = psutil.wait_procs(self.family(), timeout=5)
        for process in left:
            process.kill()
        return [str(process) for process in left]


def _session(process: psutil.Process) -> int | None:
    """The session of a living process."""
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _start(spec: str, folder: Path) -> Launched:
    """Start without waiting."""
    config, *overrides = spec.split()
    port, sidecar_port = _free_ports(2)
    mark = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    log_path, engine_log = folder / f"{mark[:8]}-specserve.log", folder / f"{mark[:8]}-engine.log"
    settings = [*overrides, f"server.port={port}", f"sidecar.port={sidecar_port}"]
    path = ROOT / "configs" / config
    argv = [sys.executable, "-m", "specserve", "launch", str(path), "--engine-log", str(engine_log)]
    argv += [part for setting in settings for part in ("--set", setting)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=os.environ | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    base = f"http://127.0.0.1:{port}"
    return Launched(
        spec, base, f"http://127.0.0.1:{sidecar_port}", process, log_path, engine_log, mark
    )


def _wait_until_ready(launched: Launched) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "\nReady\n" not in f"\n{launched.log()}":
        code = launched.process.poll()
        if code is not None or time.monotonic() > deadline:
            state = "is not ready" if code is None else f"ended with {code}"
            launched.end()
            pytest.fail(f"{launched.spec}: {state}\n{launched.log()[-6000:]}", pytrace=False)
        time.sleep(0.2)


class EngineHost:
    """At most one engine alive in each lane: this machine may have two cores."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: Launched | None = None

    def get(self, spec: str) -> Launched:
        """The running engine if it is this one and lives, else a new one."""
        current = self._current
        if current is None or current.spec != spec or current.process.poll() is not None:
            self.start(spec)
            assert self._current is not None
            _wait_until_ready(self._current)
        assert self._current is not None
        return self._current

    def start(self, spec: str) -> Launched:
        """A new engine, whatever runs, without waiting for it."""
        self.end()
        self._current = _start(spec, self._folder)
        return self._current

    def end(self) -> None:
        """Stop the engine that runs. It must leave nothing behind."""
        current, self._current = self._current, None
        if current is None:
            return
        left = current.end()
        assert left == [], f"{current.spec} left behind: {left}"


@pytest.fixture(scope="session")
def tiny_pair() -> dict[str, Path]:
    """Folders of the tiny models by name: target, draft, bad-draft. Trained on first use (a minute)."""
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "prepare_models.py", "tiny"], check=True, cwd=ROOT
    )
    return {name: MODELS / f"tiny-{name}" for name in ("target", "draft")} | {
        "bad-draft": MODELS / "tiny-draft-bad"
    }


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched on first use."""
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "prepare_models.py", "smollm2"], check=True, cwd=ROOT
    )
    return MODELS / "smollm2-135m"


@pytest.fixture(scope="session")
def engine_host(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair: dict[str, Path]
) -> Iterator[EngineHost]:
    """Who owns the one engine. Ends it after the last test."""
    host = EngineHost(tmp_path_factory.mktemp("engine"))
    yield host
    host.end()


@pytest.fixture
def engine_server(request: pytest.FixtureRequest, engine_host: EngineHost) -> Launched:
    """A ready server, shared by all tests that name the same one. Do it no harm."""
    spec = getattr(request, "param", DEFAULT)
    if spec.startswith("quickstart"):
        request.getfixturevalue("smollm2")
    return engine_host.get(spec)


@pytest.fixture
def last_engine_server(engine_server: Launched, engine_host: EngineHost) -> Iterator[Launched]:
    """The shared server for the last test that uses it, which may end it in any way."""
    yield engine_server
    engine_host.end()


@pytest.fixture
def launch(engine_host: EngineHost) -> Iterator[Callable[..., Launched]]:
    """Start an engine for this test alone, to be hurt: ``launch("tiny-pair.yaml a.b=c")``, ready on return.

    ``launch(spec, wait=False)`` returns at once. It is stopped afterwards, and must have left nothing behind.
    """

    def start(spec: str = DEFAULT, *, wait: bool = True) -> Launched:
        launched = engine_host.start(spec)
        if wait:
            _wait_until_ready(launched)
        return launched

    yield start
    engine_host.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark, give time to start, and keep together what shares an engine.

    Two lanes run side by side (scripts/test: `--dist loadgroup`): the start of an engine is mostly
    the import of vLLM, which keeps one core busy. A group stays in one lane, so that its engine
    starts once. What compares speeds, or keeps both cores busy, is marked `alone` and runs after both lanes.
    """
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.xdist_group(_group(item)))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
    ours.sort(key=_order)  # stable: tests of one group stay as they were
    places = iter(ours)
    items[:] = [next(places) if item in ours else item for item in items]


def _group(item: pytest.Item) -> str:
    """What a test shares: a served engine, the fixture of its module, or nothing."""
    names = getattr(item, "fixturenames", ())
    if "engine_server" in names:
        callspec = getattr(item, "callspec", None)
        if callspec is None:
            return DEFAULT
        return str(callspec.params.get("engine_server", DEFAULT))
    if item.path.stem in ("test_bench", "test_launch", "test_repairs") or "launch" in names:
        return item.nodeid
    return item.path.stem


def _order(item: pytest.Item) -> tuple[int, str, bool]:
    """Long groups first, so that neither lane ends with one; in a group, what ends the engine last."""
    group = _group(item)
    names = getattr(item, "fixturenames", ())
    if group == DEFAULT:
        rank = 0
    elif "engine_server" in names or group in ("test_pod", "test_nodes"):
        rank = 1
    elif "launch" in names or "engine_host" in names:
        rank = 2
    else:
        rank = 3
    return rank, group, "last_engine_server" in names
