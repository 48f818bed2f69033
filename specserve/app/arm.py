"""One arm of a benchmark as a live server: launched as any user would, or already running."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from specserve.bench import slo
from specserve.bench.result import Search, Speculation
from specserve.bench.workload import Request, Workload
from specserve.config.load import Loaded
from specserve.engine.canary import corruption
from specserve.engine.http import metrics
from specserve.engine.http.client import Completion, EngineClient, EngineError, own_client
from specserve.errors import (
    ConfigError,
    EngineStartError,
    ExitCode,
    PreflightRefused,
    Problem,
    SpecserveError,
    Unsound,
)
from specserve.supervise.child import Child, exit_cause
from specserve.supervise.owner import Owner

POLL_SECONDS = 0.2
MAX_FOREIGN_SHARE = 0.05
"""More tokens than this beyond ours: the counters are not about us alone. Requests that failed
halfway have made some."""
Snapshot: TypeAlias = metrics.EngineSnapshot | None
"""None where it could not be read."""
_REFUSALS: Mapping[int, type[SpecserveError]] = {
    ExitCode.CONFIG: ConfigError,
    ExitCode.PREFLIGHT: PreflightRefused,
}
"""A launch that refused before it started anything: its verdict is ours."""


@dataclass(frozen=True)
class ArmSpec:
    """One arm: a configuration to launch, or a server that already runs."""

    name: str
    loaded: Loaded
    url: str | None = None

    def client(self) -> EngineClient:
        """A client of its server."""
        if self.url is None:
            return own_client(self.loaded.settings)
        return EngineClient(self.url, self.api_key)

    @property
    def api_key(self) -> str | None:
        """What its server asks for."""
        return self.loaded.settings.server.own_key

    @property
    def verifies(self) -> bool:
        """Whether the certificate of its server is checked; one that we launch has our own."""
        return self.url is not None


def require_side_by_side(specs: Sequence[ArmSpec], *, has_gpu: bool) -> None:
    """Raises ConfigError where arms launched together want more than the memory of their GPUs."""
    engines = [s.loaded.settings.engine for s in specs if s.url is None]
    shares: dict[str | None, float] = {}
    for engine in engines:
        devices = engine.env.get("CUDA_VISIBLE_DEVICES")
        shares[devices] = shares.get(devices, 0.0) + engine.gpu_memory_utilization
    share = max(shares.values(), default=0.0)
    if has_gpu and share > 1:
        raise ConfigError(
            f"the arms want {share:.2f} of the same GPU's memory; must be at most 1 together",
            where="--together",
            fix="--set engine.gpu_memory_utilization=0.45, or leave --together out",
        )


class ArmServer:
    """The server of one arm: launched as any user would, or already running."""

    def __init__(
        self,
        spec: ArmSpec,
        out: Path,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec, self._out, self._environ, self._clock = spec, out, environ, clock
        self.client = spec.client()
        self.child: Child | None = None
        self.ready_seconds: float | None = None
        self.kv_cache_tokens: int | None = None
        self.model = spec.loaded.settings.served_model_name

    def start(self) -> None:
        """Raises EngineStartError when it does not become ready."""
        if self.spec.url is None:
            self._launch()
        else:
            self.model = self.client.models(timeout=30)[0]

    def _launch(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            (self._out / f"{self.spec.name}.log").open("a") as log,
        ):
            told = Path(folder) / "ready.json"
            self.child = Child(self._command(told), self._environ, lambda line: _append(log, line))
            while not told.exists():
                status = self.child.poll()
                if status is not None:
                    message = f"{exit_cause(status)} before it was ready"
                    problem = Problem(message, f"arm '{self.spec.name}'", _tail(self.child))
                    raise _REFUSALS.get(status, EngineStartError)([problem])
                time.sleep(POLL_SECONDS)
            facts = json.loads(told.read_text(encoding="utf-8"))
        self.ready_seconds, self.kv_cache_tokens = facts["ready_seconds"], facts["kv_cache_tokens"]

    def _command(self, told: Path) -> list[str]:
        """The sidecar stays off: its canaries would count as traffic."""
        overrides = [*self.spec.loaded.overrides, "sidecar.enabled=false"]
        sets = [part for o in overrides for part in ("--set", o)]
        owner = Owner.ourselves()
        if owner is not None:  # it ends with us, also when we are killed
            sets += ["--owner", str(owner)]
        path = str(self.spec.loaded.path)
        return [sys.executable, "-m", "specserve", "launch", path, "--ready-file", str(told), *sets]

    def terminate(self) -> None:
        """Ask it to drain and end."""
        if self.child is not None:
            self.child.terminate()

    def wait(self) -> int:
        """The exit status after at most the drain time and some; -9 if it has not ended by then."""
        if self.child is None:
            return 0
        deadline = self._clock() + self.spec.loaded.settings.engine.drain_timeout_seconds + 30
        while self._clock() < deadline:
            status = self.child.poll()
            if status is not None:
                return status
            time.sleep(POLL_SECONDS)
        return -9

    def stop(self) -> None:
        """Drain and end; kill what does not. A second signal to us is passed on."""
        if self.child is None:
            return
        try:
            self.terminate()
            self.wait()
        except KeyboardInterrupt:
            self.terminate()
            self.wait()
            raise
        finally:
            self.child.finish()

    def counters(self) -> metrics.EngineSnapshot | None:
        """The engine's counters now; None when they cannot be read."""
        return counters(self.client, self._clock)


def counters(client: EngineClient, clock: Callable[[], float], timeout: float = 30) -> Snapshot:
    """What the engine of a client counts now; None when it cannot be read."""
    try:
        return metrics.parse(client.metrics_text(timeout=timeout), at_seconds=clock())
    except (EngineError, metrics.MetricsError):
        return None


def _append(log: TextIO, line: str) -> None:
    log.write(line + "\n")
    log.flush()


def speculation(before: Snapshot, after: Snapshot) -> Speculation | None:
    """What was drafted and accepted in between; None when nothing was, or it is unknown."""
    drafts = _delta(before, after, "drafts")
    drafted = _delta(before, after, "draft_tokens")
    accepted = _delta(before, after, "accepted_tokens")
    if before is None or after is None or drafts is None or accepted is None or not drafted:
        return None
    new, old = after.accepted_per_position or (), before.accepted_per_position or ()
    return Speculation(
        drafts=drafts,
        draft_tokens=drafted,
        accepted_tokens=accepted,
        accepted_per_position=[n - o for n, o in zip_longest(new, old, fillvalue=0.0)],
    )


def _delta(before: Snapshot, after: Snapshot, name: str) -> float | None:
    if before is None or after is None:
        return None
    old, new = before.total(name), after.total(name)
    if old is None or new is None:
        return None
    return new - old


def foreign_tokens(before: Snapshot, after: Snapshot, ours: int) -> float | None:
    """Tokens that the server made for others, 0 when hardly any; None when it is unknown."""
    made = _delta(before, after, "generation_tokens")
    if made is None:
        return None
    if made <= ours * (1 + MAX_FOREIGN_SHARE):
        return 0.0
    return made - ours


def prefix_hits(before: Snapshot, after: Snapshot) -> float | None:
    """Share of the queried tokens that the prefix cache held."""
    hits = _delta(before, after, "prefix_cache_hits")
    queries = _delta(before, after, "prefix_cache_queries")
    if hits is None or not queries:
        return None
    return hits / queries


def ask(client: EngineClient, request: Request, **sampling: Any) -> Completion:
    """The answer in one piece. Raises EngineError."""
    if request.messages is None:
        return client.complete(request.prompt or "", **sampling)
    return client.chat(list(request.messages), **sampling)


def score(client: EngineClient, request: Request, text: str) -> list[float] | None:
    """Distance of each token of ``text`` to the target's best after this request, in nats.

    None when it is unknown.
    """
    try:
        shared: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 1,
            "return_token_ids": True,
        }
        prompt = ask(client, request, **shared)
        tokens = client.complete(text, add_special_tokens=False, **shared)
        if prompt.prompt_token_ids is None or tokens.prompt_token_ids is None:
            return None
        answer = tokens.prompt_token_ids
        whole = client.complete([*prompt.prompt_token_ids, *answer], **shared)
    except EngineError:
        return None
    if whole.prompt_logprobs is None:
        return None
    start = len(prompt.prompt_token_ids)
    return corruption.gaps(answer, whole.prompt_logprobs[start:])


def guidellm(environ: Mapping[str, str]) -> str:
    """The command that searches: on the PATH, or beside this interpreter."""
    path = f"{environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
    found = shutil.which("guidellm", path=path)
    if found is None:
        raise ConfigError(
            "guidellm is not installed; it searches for the highest load",
            where="--slo",
            fix="pip install 'specserve[slo]', or pipx install 'guidellm~=0.8.1'",
        )
    return found


def search(
    server: ArmServer,
    workload: Workload,
    objectives: Mapping[str, float],
    probe_seconds: float,
    environ: Mapping[str, str],
) -> Search:
    """The highest load at which this arm meets the objectives. Raises Unsound if guidellm fails."""
    with tempfile.TemporaryDirectory() as name:  # for us alone: the scenario holds the key
        folder = Path(name)
        scenario = slo.prepare(
            folder,
            workload,
            objectives,
            probe_seconds,
            target=server.client.base_url,
            model=server.model,
            api_key=server.spec.api_key,
        )
        argv = [guidellm(environ), "run", "--config", str(scenario), "--disable-console"]
        child = Child(argv, environ, lambda _: None, tied=True)
        try:
            status = child.poll()
            while status is None:
                time.sleep(POLL_SECONDS)
                status = child.poll()
        finally:
            child.kill()
        if status != 0:
            fix = "the same command with --resume, with or without --slo, goes on from here"
            raise Unsound([Problem(f"guidellm {exit_cause(status)}", "--slo", _tail(child), fix)])
        return slo.read(folder, server.spec.name, workload.name, objectives)


def _tail(child: Child) -> tuple[tuple[str, str], ...]:
    return tuple(("log", line) for line in child.lines()[-20:])
