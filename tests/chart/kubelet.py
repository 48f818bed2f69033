"""What a kubelet does with a rendered pod, as local processes: no cluster, no image, no namespaces.

Init containers run one after the other; then the containers, each with its startup, readiness and liveness probes and
their defaults; a liveness failure ends the container as a deletion does and starts it anew. Ending is preStop,
SIGTERM, the grace period that both share, SIGKILL. Folders of the pod become folders of the test: wherever a mount
path stands in a command, an argument or a variable, the local one takes its place.

Left out: images, users and security contexts, resource limits, the network, restart back-off.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

TICK = 0.1


@dataclass(frozen=True)
class Probe:
    """An httpGet probe with Kubernetes' defaults."""

    url: str
    period: float
    timeout: float
    failures: int

    @classmethod
    def of(cls, container: Mapping[str, Any], name: str) -> Probe:
        spec = container[name]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        get = spec["httpGet"]
        url = f"http://127.0.0.1:{ports.get(get['port'], get['port'])}{get['path']}"
        return cls(
            url,
            spec.get("periodSeconds", 10),
            spec.get("timeoutSeconds", 1),
            spec.get("failureThreshold", 3),
        )

    def passes(self) -> bool:
        try:
            return 200 <= requests.get(self.url, timeout=self.timeout).status_code < 400
        except requests.RequestException:
            return False


@dataclass
class Watched:
    """One probe's next time and its failures in a row."""

    probe: Probe
    due: float = 0.0
    failed: int = 0

    def ask(self, now: float) -> bool | None:
        """None when it is not due; False when it has failed often enough, True when it passed."""
        if now < self.due:
            return None
        self.due = now + self.probe.period
        if self.probe.passes():
            self.failed = 0
            return True
        self.failed += 1
        return False if self.failed >= self.probe.failures else None


@dataclass
class Pod:
    """A running pod."""

    spec: Mapping[str, Any]
    folder: Path
    config_maps: Mapping[str, Mapping[str, str]]
    given: Mapping[str, Path] = field(default_factory=dict)
    """Claims and Secrets by name: the folder that stands for them."""
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Container -> what to run in place of `specserve` and its subcommand, before its arguments."""
    events: list[str] = field(default_factory=list)
    ready: bool = False
    restarts: int = 0
    killed: bool = False
    """Whether the grace period ran out."""

    def __post_init__(self) -> None:
        self._paths = self._volumes()
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Pod:
        """Init containers first, in this thread; then the rest goes on by itself."""
        for container in self.spec.get("initContainers", []):
            done = self._spawn(container).wait()
            self.events.append(f"{container['name']} ended with {done}")
            assert done == 0, self.log(container["name"])
        self._thread.start()
        return self

    def stop(self) -> float:
        """Delete the pod; the seconds that it took."""
        began = time.monotonic()
        self.ready = False  # endpoints drop a terminating pod at once
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        return time.monotonic() - began

    def log(self, container: str = "engine") -> str:
        path = self.folder / f"{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def leader(self) -> int | None:
        """Process id of the container's command."""
        return self._process.pid if self._process is not None else None

    def becomes_ready(self, seconds: float) -> None:
        """Wait for readiness; fails with what the container said."""
        deadline = time.monotonic() + seconds
        while not self.ready:
            assert time.monotonic() < deadline, f"not ready: {self.events}\n{self.log()[-4000:]}"
            time.sleep(TICK)

    def _volumes(self) -> dict[str, Path]:
        """Mount path -> local path."""
        places = {v["name"]: self._volume(v) for v in self.spec["volumes"]}
        out: dict[str, Path] = {}
        for container in [*self.spec.get("initContainers", []), *self.spec["containers"]]:
            for mount in container["volumeMounts"]:
                place = places[mount["name"]]
                out[mount["mountPath"]] = place / mount["subPath"] if "subPath" in mount else place
        return out

    def _volume(self, volume: Mapping[str, Any]) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.given[volume["persistentVolumeClaim"]["claimName"]]
        if "secret" in volume:
            return self.given[volume["secret"]["secretName"]]
        folder = self.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.config_maps.get(
            volume.get("configMap", {}).get("name", ""), {}
        ).items():
            (folder / name).write_text(text, encoding="utf-8")
        return folder

    def _here(self, text: str) -> str:
        """A path of the pod as a path of this machine."""
        for mount in sorted(self._paths, key=len, reverse=True):
            if text == mount or text.startswith(mount + "/"):
                return str(self._paths[mount]) + text[len(mount) :]
        return text

    def _spawn(self, container: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        argv = [
            self._here(part) for part in [*container.get("command", []), *container.get("args", [])]
        ]
        instead = self.commands.get(container["name"])
        if instead is not None:
            argv = [*instead, *argv[2:]]
        elif argv[0] == "specserve":
            argv = [sys.executable, "-m", *argv]
        base = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        env = base | {e["name"]: self._here(e["value"]) for e in container["env"]}
        self.events.append(f"{container['name']} starts")
        with (self.folder / f"{container['name']}.log").open("ab") as out:
            return subprocess.Popen(
                argv, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _run(self) -> None:
        (container,) = self.spec["containers"]
        while not self._stopping.is_set():
            self._process = self._spawn(container)
            why = self._attend(container, self._process)
            self.ready = False
            if why:
                self.events.append(why)
            self._end(container, self._process)
            if not self._stopping.is_set():
                self.restarts += 1

    def _attend(self, container: Mapping[str, Any], process: subprocess.Popen[bytes]) -> str | None:
        """Probe until the pod stops (None), the process ends or a probe gives it up."""
        startup, readiness, liveness = (
            Watched(Probe.of(container, name))
            for name in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        started = False
        while not self._stopping.wait(TICK):
            now = time.monotonic()
            if process.poll() is not None:
                return f"{container['name']} ended with {process.returncode}"
            if not started:
                answer = startup.ask(now)
                if answer is False:
                    return "startup failed"
                if answer:
                    started = True
                    self.events.append("started")
                continue
            if (answer := readiness.ask(now)) is not None and answer != self.ready:
                self.ready = answer
                self.events.append("ready" if answer else "not ready")
            if liveness.ask(now) is False:
                return "liveness failed"
        return None

    def _end(self, container: Mapping[str, Any], process: subprocess.Popen[bytes]) -> None:
        """preStop, TERM, KILL, within one grace period."""
        deadline = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if process.poll() is None and hook and shutil.which(hook[0]):
            subprocess.run(hook, timeout=max(0.0, deadline - time.monotonic()), check=False)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.killed = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.events.append(f"{container['name']} is gone")
