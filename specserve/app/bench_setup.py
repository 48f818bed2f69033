"""A benchmark before it runs: arms and workloads from the options, and everything that forbids
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specserve.app import arm, preflight
from specserve.app.arm import ArmSpec
from specserve.app.bench import Bench, fresh
from specserve.bench import result, slo, workload
from specserve.bench.plan import BenchPlan
from specserve.bench.result import Result
from specserve.bench.workload import Workload
from specserve.config.load import Loaded, load
from specserve.errors import ConfigError
from specserve.gpu import devices as gpu

DEFAULT_WORKLOADS = ("code-edit", "chat")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of ``specserve bench``, as they were typed."""

    names: tuple[str, ...] = ()
    trace: Path | None = None
    concurrency: str = "1,4,16"
    arms: str = "baseline,speculative"
    prompts: int = 16
    max_tokens: int | None = None
    repeat: int = 1
    together: bool = False
    seed: int = 0
    completions: bool = False
    url_baseline: str | None = None
    url_speculative: str | None = None
    slo: str | None = None
    slo_seconds: float = 30.0


def prepare(
    loaded: Loaded, options: BenchOptions, out: Path, *, resume: bool, environ: Mapping[str, str]
) -> Bench:
    """Everything decided, nothing started. Raises ConfigError or PreflightRefused.

    Both arms are checked here, before minutes are spent on the first.
    """
    specs = _arms(loaded, options, environ)
    if options.together:
        arm.require_side_by_side(specs, has_gpu=bool(gpu.devices()))
    plan = BenchPlan(
        arms=tuple(s.name for s in specs),
        workloads=tuple(_workloads(options)),
        concurrency=_numbers(options.concurrency),
        repeat=options.repeat,
    )
    objectives = {}
    if options.slo:
        objectives = slo.parse(options.slo)
        arm.guidellm(environ)  # is it installed?
    out.mkdir(parents=True, exist_ok=True)
    start = fresh(specs, plan, together=options.together)
    if (out / "result.json").exists():
        start = _resumed(out, start, plan, resume=resume)
    for spec in specs:
        if spec.url is None:
            preflight.require(preflight.run(spec.loaded, environ=environ, purpose="launch"))
    return Bench(
        specs,
        plan,
        out,
        environ,
        start=start,
        objectives=objectives,
        probe_seconds=options.slo_seconds,
    )


def _arms(loaded: Loaded, options: BenchOptions, environ: Mapping[str, str]) -> list[ArmSpec]:
    urls = (options.url_baseline, options.url_speculative)
    if all(urls):
        return [
            ArmSpec("baseline", loaded, url=options.url_baseline),
            ArmSpec("speculative", loaded, url=options.url_speculative),
        ]
    if any(urls):
        raise ConfigError(
            "one of --url-baseline and --url-speculative is missing; must be both or none",
            where="bench",
        )
    arms = []
    for i, name in enumerate(options.arms.split(",")):
        if options.together:
            moved = i
        else:
            moved = 0
        arms.append(_arm(loaded, name.strip(), environ, moved))
    if len(arms) < 2 or len({a.name for a in arms}) < len(arms):
        raise ConfigError(
            f"'{options.arms}' must name different arms",
            where="--arms",
            fix="--arms baseline,speculative",
        )
    return arms


def _arm(loaded: Loaded, name: str, environ: Mapping[str, str], moved: int) -> ArmSpec:
    """An arm by name, or of a config file; its server's port is ``moved`` up by so many."""
    overrides = list(loaded.overrides)
    if name == "baseline":
        overrides.append("speculative_decoding.enabled=false")
    elif name != "speculative":
        loaded, name = load(Path(name), environ=environ, overrides=overrides), Path(name).stem
    if moved:
        overrides.append(f"server.port={loaded.settings.server.port + moved}")
    if loaded.overrides != tuple(overrides):
        loaded = load(loaded.path, environ=environ, overrides=overrides)
    return ArmSpec(name, loaded)


def _workloads(options: BenchOptions) -> list[Workload]:
    found = [workload.builtin(name) for name in dict.fromkeys(options.names)]
    if options.trace:
        own = workload.from_file(options.trace)
        if own.name in options.names:
            raise ConfigError(
                f"has the name of the built-in workload {own.name}; "
                "the cells of a report are told apart by name",
                where=str(options.trace),
                fix="rename the file",
            )
        found.append(own)
    if not found:
        found = [workload.builtin(name) for name in DEFAULT_WORKLOADS]
    picked = []
    for one in found:
        chosen = workload.pick(one, options.prompts, seed=options.seed)
        if options.completions:
            chosen = workload.as_completions(chosen)
        if options.max_tokens is not None:
            chosen = workload.limit(chosen, options.max_tokens)
        picked.append(chosen)
    return picked


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise ConfigError(
            f"'{text}' must be different whole numbers from 1",
            where="--concurrency",
            fix="--concurrency 1,4,16",
        )
    return numbers


def _resumed(out: Path, now: Result, plan: BenchPlan, *, resume: bool) -> Result:
    """The result in the folder, if it is of this benchmark and is to be continued."""
    if not resume:
        raise ConfigError(
            "already holds a result",
            where=str(out),
            fix="give another --out, or --resume to add what it lacks",
        )
    path = out / "result.json"
    before = result.read(path)
    facts = result.differences(before, now)
    if plan.left(before.blocks) is None:
        then = "then in another order, or more"
        facts.append(("blocks", then, "now as --workload, --concurrency and --repeat say"))
    if facts:
        raise ConfigError(
            "holds another benchmark; --resume continues the same one, "
            "with the same or a higher --repeat",
            where=str(path),
            facts=facts,
            fix="give another --out, or the configuration and options of then",
        )
    return before
