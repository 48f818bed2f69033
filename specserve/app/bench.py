"""Composition root of the benchmark: arms are launched (or already run), loaded block by block, written as it goes."""

from __future__ import annotations

import contextlib
import itertools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from specserve import __version__
from specserve.app import golive as verify
from specserve.app.arm import (
    ArmSpec,
    Server,
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
from specserve.gpu.telemetry import GpuMeans, open_telemetry
from specserve.log import masked

WHOLE_PROMPTS = 4
"""Prompts per arm and workload that are asked again without streaming."""
ANSWER_SECONDS = 300.0
"""Longest time for one of their answers."""


@dataclass(frozen=True)
class Progress:
    """Whom to tell."""

    step: Callable[[int, int, str], None] = lambda *_: None
    """Blocks done, blocks in all, what is being done."""
    note: Callable[[str], None] = lambda *_: None


@dataclass
class Bench:
    """One benchmark run. ``run`` returns the result; what was measured is on disk after every block."""

    specs: Sequence[ArmSpec]
    plan: BenchPlan
    out: Path
    environ: Mapping[str, str]
    progress: Progress = field(default_factory=Progress)
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Within which the highest load of each arm is searched, as :func:`specserve.bench.slo.parse` gives them."""
    probe_seconds: float = 30.0
    together: bool = False
    """Keep every arm running, where they fit side by side: no restart between legs."""
    clock: Callable[[], float] = time.monotonic
    _running: dict[str, Server] = field(default_factory=dict)

    def run(self, before: Result | None = None) -> Result:
        """Measure every block that ``before`` does not hold. Raises Interrupted with what was measured on disk."""
        self._result = before or fresh(self.specs, self.plan, together=self.together)
        left = self.plan.left(self._result.blocks) or ()
        if before is not None and before.complete and not left and not self.objectives:
            return before
        searches = [
            s
            for s in self._result.searches
            if s.objectives == self.objectives or not self.objectives
        ]
        complete = self._result.complete and not left
        self._result = self._result.model_copy(update={"searches": searches, "complete": complete})
        self._started = self.clock() - (
            before.blocks[-1].started_seconds if before and before.blocks else 0.0
        )
        steps = self.plan.steps()
        try:
            with LoadClient(self.environ, log=self.out / "client.log") as load:
                last = {step.arm: step.index for step in steps}
                for step in left:
                    self.progress.step(
                        step.index, len(steps), f"{step.arm}: {step.workload} x{step.concurrency}"
                    )
                    self._block(load, step)
                    if step.index == last[step.arm]:  # before the other arm takes its place
                        self._after(self._spec(step.arm), load)
                for spec in reversed(
                    self.specs
                ):  # what an interruption left out; the baseline scores, so it is last
                    self._after(spec, load)
                self.progress.step(len(steps), len(steps), "comparing answers")
                streaming = [a for a in self._result.answers if a.is_streaming]
                self._keep(answers=[*streaming, *self._answers(load)], complete=True)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{len(self._result.blocks)} of {len(steps)} blocks were measured and kept",
                where=str(self.out),
                fix="the same command with --resume continues",
            ) from None
        finally:
            self._stop()
        return self._result

    def _keep(self, **update: Any) -> None:
        self._result = self._result.model_copy(update=update)
        result.write(self._result, self.out / "result.json")

    def _spec(self, name: str) -> ArmSpec:
        return next(s for s in self.specs if s.name == name)

    def _block(self, load: LoadClient, step: Step) -> None:
        server = self._server(load, self._spec(step.arm))
        workload = next(w for w in self.plan.workloads if w.name == step.workload)
        before, began = server.counters(), self.clock()
        used = gpus_of(server.spec, self.environ)
        with GpuMeans(open_telemetry(*used) if used else None) as means:
            run = _send(load, server, workload, step.concurrency)
        after = server.counters()
        foreign = foreign_tokens(before, after, sum(s.output_tokens or 0 for s in run.samples))
        block = Block(
            index=step.index,
            arm=step.arm,
            workload=step.workload,
            concurrency=step.concurrency,
            started_seconds=began - self._started,
            duration_seconds=run.duration_seconds,
            samples=list(run.samples),
            speculation=None if foreign else speculation(before, after),
            prefix_cache_hit_ratio=None if foreign else prefix_hits(before, after),
            foreign_tokens=foreign,
            gpu=means.result,
        )
        label = f"block {step.index}: {step.arm} {step.workload} x{step.concurrency}"
        self._keep(blocks=[*self._result.blocks, block], order=[*self._result.order, label])

    def _server(self, load: LoadClient, spec: ArmSpec) -> Server:
        """The arm's server, started if it does not run yet; others give way unless they may stay."""
        if spec.name in self._running:
            return self._running[spec.name]
        if not self.together:
            self._stop()
        self.progress.note(
            f"starting {spec.name}" if spec.url is None else f"using {spec.url} for {spec.name}"
        )
        server = self._running[spec.name] = Server(spec, self.out, self.environ)
        server.start()
        self._note_start(server)
        warm = self.plan.workloads[0]
        warm = warm.model_copy(update={"requests": warm.requests[: self.plan.warmups]})
        if warm.requests:
            _send(load, server, warm, len(warm.requests))
        return server

    def _note_start(self, server: Server) -> None:
        arms = list(self._result.arms)
        at = next(i for i, arm in enumerate(arms) if arm.name == server.spec.name)
        if server.ready_seconds is not None:
            ready = [*arms[at].ready_seconds, server.ready_seconds]
            arms[at] = arms[at].model_copy(
                update={"ready_seconds": ready, "kv_cache_tokens": server.kv_cache_tokens}
            )
        self._keep(arms=arms, order=[*self._result.order, f"start {server.spec.name}"])

    def _stop(self) -> None:
        """End what runs, each whatever becomes of the others; servers that ran before stay."""
        with contextlib.ExitStack() as ending:
            for server in self._running.values():
                ending.callback(server.stop)
            stopped = [
                f"stop {name}" for name, server in self._running.items() if server.child is not None
            ]
            self._running.clear()
            if stopped:
                self._keep(order=[*self._result.order, *stopped])

    def _after(self, spec: ArmSpec, load: LoadClient) -> None:
        """What is asked of an arm once it was measured, unless the result has it: answers, then the load it bears."""
        settings = spec.loaded.settings
        if spec.name not in {c.arm for c in self._result.checks}:
            server = self._server(load, spec)
            found = verify.structured(verify.Subject(server.client, settings, ANSWER_SECONDS))
            check = BenchCheck(
                arm=spec.name, name=found.name, status=found.status, message=found.message
            )
            streaming = [self._streaming(w, server) for w in self.plan.workloads if w.is_greedy]
            known = [a for a in streaming if a is not None]
            self._keep(
                checks=[*self._result.checks, check], answers=[*self._result.answers, *known]
            )
        done = {(s.arm, s.workload) for s in self._result.searches}
        for workload in self.plan.workloads if self.objectives else ():
            if (spec.name, workload.name) not in done:
                self.progress.note(
                    f"searching the highest load of {spec.name} for {workload.name}: some minutes"
                )
                server = self._server(load, spec)
                highest = search(
                    server, workload, self.objectives, self.probe_seconds, self.environ
                )
                self._keep(searches=[*self._result.searches, highest])

    def _streaming(self, workload: Workload, server: Server) -> result.Answers | None:
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
        base, *others = self.specs
        out = []
        for workload, other in itertools.product(
            (w for w in self.plan.workloads if w.is_greedy), others
        ):
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
    return Result(
        specserve_version=__version__,
        engine=f"{installed.distribution} {installed.version}" if installed else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        title=specs[-1].loaded.path.stem,
        arms=[Arm(name=s.name, config=_config(s), **masked({"url": s.url})) for s in specs],
        together=together,
        workloads={w.name: w.digest for w in plan.workloads},
        blocks=[],
        complete=False,
    )


def _send(load: LoadClient, server: Server, workload: Workload, concurrency: int) -> Measured:
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
    """CUDA_VISIBLE_DEVICES of this arm's engine, and how many it uses; None for a server on another machine."""
    if spec.url is not None and urlsplit(spec.url).hostname not in LOOPBACK:
        return None
    target, env = spec.loaded.settings.models.target_model, spec.loaded.settings.engine.env
    visible = env.get("CUDA_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    return visible, target.tensor_parallel_size * target.pipeline_parallel_size


def _scorer(workload: Workload, server: Server) -> answers.Scorer:
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
