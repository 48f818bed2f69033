"""The benchmark as it runs: arms are launched (or already run), loaded block by block, and
written."""

from __future__ import annotations

import contextlib
import itertools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from specserve import __version__
from specserve.app import golive
from specserve.app.arm import (
    ArmServer,
    ArmSpec,
    ask,
    foreign_tokens,
    prefix_hits,
    score,
    search,
    speculation,
)
from specserve.bench import answers, result
from specserve.bench.load import LoadClient, Measured
from specserve.bench.plan import BenchPlan, Step
from specserve.bench.result import Arm, BenchCheck, BenchMachine, Block, Result
from specserve.bench.workload import Workload
from specserve.config.show import rows
from specserve.engine.http.client import LOOPBACK, EngineError, collect
from specserve.engine.installed import introspect
from specserve.errors import Interrupted
from specserve.gpu import devices as gpu
from specserve.gpu.telemetry import GpuMeans, Telemetry, open_telemetry
from specserve.log import masked

WHOLE_PROMPTS = 4
"""Prompts per arm and workload that are asked again without streaming."""
ANSWER_SECONDS = 300.0
"""Longest time for one of their answers."""


@dataclass(frozen=True)
class BenchProgress:
    """Called with what is being done."""

    step: Callable[[int, int, str], None] = lambda *_: None
    """Blocks done, blocks in all, what is being done."""
    note: Callable[[str], None] = lambda *_: None


class Bench:
    """One benchmark run.

    ``run`` returns the result; what was measured is on disk after every block.
    """

    def __init__(
        self,
        specs: Sequence[ArmSpec],
        plan: BenchPlan,
        out: Path,
        environ: Mapping[str, str],
        *,
        start: Result,
        objectives: Mapping[str, float],
        probe_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``start`` is the result so far, with the blocks that need not be measured again.

        Where it says ``together``, every arm keeps running: no restart between legs. ``objectives``
        are those within which the highest load of each arm is searched
        (:func:`specserve.bench.slo.parse`).
        """
        self._specs = {spec.name: spec for spec in specs}
        self._plan, self._out, self._environ = plan, out, environ
        self._objectives, self._probe_seconds = objectives, probe_seconds
        self._clock, self._result = clock, start
        self._began = clock()
        if start.blocks:
            self._began -= start.blocks[-1].started_seconds
        self._progress = BenchProgress()
        self._running: dict[str, ArmServer] = {}

    def run(self, progress: BenchProgress) -> Result:
        """Measure every block that is missing.

        Raises Interrupted with what was measured on disk.
        """
        self._progress = progress
        steps = self._plan.steps()
        left = self._plan.left(self._result.blocks) or ()
        complete = self._result.complete and not left
        if complete and not self._objectives:
            return self._result
        searches = self._result.searches
        if self._objectives:
            searches = [s for s in searches if s.objectives == self._objectives]
        self._result = self._result.model_copy(update={"searches": searches, "complete": complete})
        try:
            with LoadClient(self._environ, log=self._out / "client.log") as load:
                last = {step.arm: step.index for step in steps}
                for step in left:
                    what = f"{step.arm}: {step.workload} x{step.concurrency}"
                    progress.step(step.index, len(steps), what)
                    self._block(load, step)
                    if step.index == last[step.arm]:  # before the other arm takes its place
                        self._after(self._specs[step.arm], load)
                # What an interruption left out; the baseline scores, so it is last.
                for spec in reversed(self._specs.values()):
                    self._after(spec, load)
                progress.step(len(steps), len(steps), "comparing answers")
                streaming = [a for a in self._result.answers if a.is_streaming]
                self._keep(answers=[*streaming, *self._answers(load)], complete=True)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{len(self._result.blocks)} of {len(steps)} blocks were measured and kept",
                where=str(self._out),
                fix="the same command with --resume continues",
            ) from None
        finally:
            self._stop()
        return self._result

    def _keep(self, **update: Any) -> None:
        self._result = self._result.model_copy(update=update)
        result.write(self._result, self._out / "result.json")

    def _block(self, load: LoadClient, step: Step) -> None:
        server = self._server(load, self._specs[step.arm])
        workload = next(w for w in self._plan.workloads if w.name == step.workload)
        before, began = server.counters(), self._clock()
        with GpuMeans(_telemetry(server.spec, self._environ)) as means:
            run = _send(load, server, workload, step.concurrency)
        after = server.counters()
        foreign = foreign_tokens(before, after, sum(s.output_tokens or 0 for s in run.samples))
        spec = hits = None
        if not foreign:
            spec, hits = speculation(before, after), prefix_hits(before, after)
        block = Block(
            index=step.index,
            arm=step.arm,
            workload=step.workload,
            concurrency=step.concurrency,
            started_seconds=began - self._began,
            duration_seconds=run.duration_seconds,
            samples=list(run.samples),
            speculation=spec,
            prefix_cache_hit_ratio=hits,
            foreign_tokens=foreign,
            gpu=means.result,
        )
        label = f"block {step.index}: {step.arm} {step.workload} x{step.concurrency}"
        self._keep(blocks=[*self._result.blocks, block], order=[*self._result.order, label])

    def _server(self, load: LoadClient, spec: ArmSpec) -> ArmServer:
        """The arm's server, started if it does not run yet; others give way unless they may
        stay."""
        if spec.name in self._running:
            return self._running[spec.name]
        if not self._result.together:
            self._stop()
        if spec.url is None:
            self._progress.note(f"starting {spec.name}")
        else:
            self._progress.note(f"using {spec.url} for {spec.name}")
        server = self._running[spec.name] = ArmServer(spec, self._out, self._environ)
        server.start()
        self._note_start(server)
        warm = self._plan.workloads[0]
        warm = warm.model_copy(update={"requests": warm.requests[: self._plan.warmups]})
        if warm.requests:
            _send(load, server, warm, len(warm.requests))
        return server

    def _note_start(self, server: ArmServer) -> None:
        arms = list(self._result.arms)
        for i, arm in enumerate(arms):
            if arm.name == server.spec.name and server.ready_seconds is not None:
                ready = [*arm.ready_seconds, server.ready_seconds]
                update = {"ready_seconds": ready, "kv_cache_tokens": server.kv_cache_tokens}
                arms[i] = arm.model_copy(update=update)
        self._keep(arms=arms, order=[*self._result.order, f"start {server.spec.name}"])

    def _stop(self) -> None:
        """End what runs, whatever becomes of the others; servers that ran before stay."""
        with contextlib.ExitStack() as ending:
            for server in self._running.values():
                ending.callback(server.stop)
            stopped = [f"stop {name}" for name, s in self._running.items() if s.child is not None]
            self._running.clear()
            if stopped:
                self._keep(order=[*self._result.order, *stopped])

    def _after(self, spec: ArmSpec, load: LoadClient) -> None:
        """What is asked of an arm once it was measured, unless the result has it already.

        Answers under a JSON Schema and in one piece, then the highest load it bears.
        """
        greedy = [w for w in self._plan.workloads if w.is_greedy]
        if spec.name not in {c.arm for c in self._result.checks}:
            server = self._server(load, spec)
            subject = golive.Subject(server.client, spec.loaded.settings, ANSWER_SECONDS)
            found = golive.structured(subject)
            check = BenchCheck(
                arm=spec.name, name=found.name, status=found.status, message=found.message
            )
            streamed = [self._streaming(workload, server) for workload in greedy]
            known = [a for a in streamed if a is not None]
            self._keep(
                checks=[*self._result.checks, check], answers=[*self._result.answers, *known]
            )
        if not self._objectives:
            return
        done = {s.workload for s in self._result.searches if s.arm == spec.name}
        for workload in self._plan.workloads:
            if workload.name not in done:
                what = f"the highest load of {spec.name} for {workload.name}"
                self._progress.note(f"searching {what}: some minutes")
                server = self._server(load, spec)
                highest = search(
                    server, workload, self._objectives, self._probe_seconds, self._environ
                )
                self._keep(searches=[*self._result.searches, highest])

    def _streaming(self, workload: Workload, server: ArmServer) -> result.Answers | None:
        """The first prompts once more, one by one, in one piece and streamed."""
        whole, streamed = {}, {}
        for request in workload.requests[:WHOLE_PROMPTS]:
            sampling: dict[str, Any] = {
                "max_tokens": request.max_tokens,
                "temperature": 0.0,
                "timeout": ANSWER_SECONDS,
            }
            try:
                whole[request.id] = ask(server.client, request, **sampling).text
                chunks = server.client.stream(request.prompt, messages=request.messages, **sampling)
                streamed[request.id] = collect(chunks).text
            except EngineError:  # the blocks show that requests fail; here only texts are compared
                continue
        scorer = _scorer(workload, server)
        return answers.compare_streaming(workload.name, server.spec.name, whole, streamed, scorer)

    def _answers(self, load: LoadClient) -> list[result.Answers]:
        """Greedy answers of each arm compared with the baseline's, which scores what differs."""
        base, *others = self._specs.values()
        greedy = [w for w in self._plan.workloads if w.is_greedy]
        out = []
        for workload, other in itertools.product(greedy, others):
            blocks = [b for b in self._result.blocks if b.workload == workload.name]
            found = answers.compare(
                workload.name,
                [b for b in blocks if b.arm == base.name],
                [b for b in blocks if b.arm == other.name],
                _scorer(workload, self._server(load, base)),
            )
            if found is not None:
                out.append(found)
        return out


def fresh(specs: Sequence[ArmSpec], plan: BenchPlan, *, together: bool = False) -> Result:
    """A result with nothing measured yet."""
    installed = introspect.installed()
    engine = None
    if installed is not None:
        engine = f"{installed.distribution} {installed.version}"
    return Result(
        specserve_version=__version__,
        engine=engine,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        title=specs[-1].loaded.path.stem,
        arms=[Arm(name=s.name, config=_config(s), **masked({"url": s.url})) for s in specs],
        together=together,
        workloads={w.name: w.digest for w in plan.workloads},
        blocks=[],
        complete=False,
    )


def _send(load: LoadClient, server: ArmServer, workload: Workload, concurrency: int) -> Measured:
    url, spec = server.client.base_url, server.spec
    return load.run(
        url,
        server.model,
        workload,
        concurrency=concurrency,
        api_key=spec.api_key,
        verify=spec.verifies,
    )


def gpus_of(spec: ArmSpec, environ: Mapping[str, str]) -> tuple[str | None, int] | None:
    """CUDA_VISIBLE_DEVICES of this arm's engine, and how many it uses; None for another
    machine's."""
    if spec.url is not None and urlsplit(spec.url).hostname not in LOOPBACK:
        return None
    settings = spec.loaded.settings
    default = environ.get("CUDA_VISIBLE_DEVICES")
    visible = settings.engine.env.get("CUDA_VISIBLE_DEVICES", default)
    return visible, settings.gpus_per_node


def _telemetry(spec: ArmSpec, environ: Mapping[str, str]) -> Telemetry | None:
    """Of the GPUs of this arm's engine."""
    used = gpus_of(spec, environ)
    if used is None:
        return None
    return open_telemetry(*used)


def _scorer(workload: Workload, server: ArmServer) -> answers.Scorer:
    requests = {r.id: r for r in workload.requests}
    return lambda prompt, text: score(server.client, requests[prompt], text)


def _config(spec: ArmSpec) -> dict[str, JsonValue]:
    """What differs from the defaults, secrets masked."""
    return {r.key: to_jsonable_python(r.value) for r in rows(spec.loaded) if not r.is_default}


def machine() -> BenchMachine:
    """Facts about this machine that decide speed."""
    return BenchMachine(
        system=platform.system(),
        python=platform.python_version(),
        processor=platform.processor() or platform.machine(),
        cores=psutil.cpu_count(logical=False),
        memory_bytes=psutil.virtual_memory().total,
        gpus=[device.name for device in gpu.devices() or ()],
    )
