"""Every check before launch, in one report: the pair, what the engine supports, and memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specserve.app import evidence, pricing, remedies
from specserve.app.pricing import Remedy
from specserve.checkpoint import lock as integrity
from specserve.checkpoint import read as reading
from specserve.checkpoint.access import access
from specserve.checkpoint.context import native_length
from specserve.checkpoint.facts import CheckpointRefused, ModelFacts
from specserve.checkpoint.quantization import quant_method
from specserve.config.models import DraftModel, TargetModel
from specserve.config.schema import Settings
from specserve.config.speculation import NEEDS_DRAFT
from specserve.engine.inside import economics
from specserve.errors import ConfigError, PreflightRefused, Problem
from specserve.files import read_small
from specserve.findings import CODES, Finding, Severity, Verdicts
from specserve.memory.findings import of_plan
from specserve.pair import consistency, heads, match, mtp, reach, sampling, vocabulary
from specserve.pair.consistency import Role
from specserve.pair.head_shapes import block, head_of

if TYPE_CHECKING:
    from pydantic import JsonValue

    from specserve.app.plan import Planning
    from specserve.config.load import Loaded
    from specserve.engine.installed.chosen import Chosen
    from specserve.engine.installed.introspect import EngineFacts, Installed
    from specserve.engine.installed.machine import ServingMachine
    from specserve.memory.result import MemoryPlan

_ORDER = {"error": 0, "warning": 1, "info": 2}
_TARGET, _DRAFT = "models.target_model", "models.draft_model"
Purpose = Literal["look", "launch"]
"""``launch`` starts the engine here: what only a look may leave open refuses it."""
_WITHOUT_WEIGHTS = {"weights-missing", "pickle-weights", "gguf-weights"}

_WRONG_KIND = {"head-as-model", "model-as-head", "head-kind", "mtp-modules-missing"}
_SAID_BY = {
    "method-mismatch": _WRONG_KIND,
    "known-bad-m-rope-draft": {"draft-mrope"},
    "does-not-fit": {"tp-divisible", "head-as-target"},
    "architecture-unsupported": {"head-as-target"},
    "architecture-fallback": {"head-as-target"},
}
"""Code -> codes that say the same with its cause."""


_NOTHING_SAID = Verdicts("unknown", "unknown", "unknown")


@dataclass(frozen=True)
class PreflightReport:
    """What was found, errors first, and what was read and planned on the way."""

    findings: tuple[Finding, ...]
    method: str | None = None
    target: ModelFacts | None = None
    """None when it cannot be read."""
    draft: ModelFacts | None = None
    """None when it cannot be read, or none is configured."""
    vocabularies: vocabulary.Comparison | None = None
    """None when they were not compared."""
    vocabulary_overlap_ratio: float | None = None
    plan: MemoryPlan | None = None
    """The memory plan; None when it was not made."""
    judged_for: Chosen | None = None
    """The vLLM that all this holds for."""
    planning: Planning | None = None
    """What the plan was made from, for plans of changed settings."""
    verdicts: Verdicts = _NOTHING_SAID
    proven: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    """What was not looked at, and why."""
    price: str | None = None
    """What the draft costs in memory."""
    next_command: str | None = None
    """What to type now; None where something refuses."""
    remedies: tuple[Remedy, ...] = ()
    """Changes with which memory would be enough, each with its price; of a refusal alone."""

    @property
    def ok(self) -> bool:
        """Whether nothing refuses."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that refuse."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def weights_bytes(self) -> int | None:
        """Of both models together, as their files have them; None if the target's are unknown."""
        if self.target is None or self.target.total_size_bytes is None:
            return None
        if self.draft is None or self.draft.total_size_bytes is None:
            return self.target.total_size_bytes
        return self.target.total_size_bytes + self.draft.total_size_bytes

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        pair: dict[str, JsonValue] = {
            "method": self.method,
            "target": None,
            "draft": None,
            "vocabulary": None,
            "vocabulary_overlap_ratio": self.vocabulary_overlap_ratio,
        }
        if self.target is not None:
            pair["target"] = _model_dict(self.target)
        if self.draft is not None:
            pair["draft"] = {"kind": heads.kind_of(self.draft), **_model_dict(self.draft)}
        if self.vocabularies is not None:
            pair["vocabulary"] = self.vocabularies.as_dict()
        vram = None
        if self.plan is not None:
            vram = self.plan.as_dict()
        findings: list[JsonValue] = [f.as_dict() for f in self.findings]
        judged_for = None
        if self.judged_for is not None:
            judged_for = self.judged_for.as_dict()
        pair["verdict"] = self.verdicts.pair
        return {
            "ok": self.ok,
            "verdicts": self.verdicts.as_dict(),
            "engine": self.verdicts.engine,
            "memory": self.verdicts.memory,
            "judged_for": judged_for,
            "findings": findings,
            "pair": pair,
            "vram": vram,
            "proven": list(self.proven),
            "not_checked": list(self.unproven),
            "price": self.price,
            "remedies": [remedy.as_dict() for remedy in self.remedies],
            "next": self.next_command,
        }


def require(report: PreflightReport) -> None:
    """Raise PreflightRefused with every error of the report, if there is one."""
    if not report.ok:
        raise PreflightRefused([f.as_problem() for f in report.errors])


def run(
    loaded: Loaded,
    *,
    skip: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    chosen: Chosen | None = None,
    purpose: Purpose = "look",
    progress: integrity.Progress = lambda _name, _n: None,
    sample: Path | None = None,
) -> PreflightReport:
    """Run every check; nothing is raised for what they find. ``skip`` names codes to leave out.

    ``sample`` is a text of which the tokens that a pruned head can draft are counted.

    ``chosen`` is the vLLM to judge for; None chooses by the config and what is installed.
    ``purpose`` decides what may stay open: a look takes a folder without weights, a launch takes
    an unknown size where no GPU is seen.

    Raises ConfigError for an unknown code in ``skip``, and for an unknown ``engine.version``.
    """
    from specserve.engine.installed import introspect, machine, support
    from specserve.engine.installed.chosen import choose

    _require_known(skip)
    settings, env = loaded.settings, environ or {}
    chosen = chosen or choose(settings, here=introspect.installed())
    with ThreadPoolExecutor(1) as pool:
        # In a thread, since a vLLM that was not asked before takes seconds to describe itself.
        asked = pool.submit(_ask_engine, chosen, env)
        target, findings = read(settings, "target_model", env, purpose)
        draft = None
        if settings.uses_draft_model:
            draft, more = read(settings, "draft_model", env, purpose)
            findings += more
        planning = _planning(loaded, target, draft, env, chosen)
        plan = None
        in_memory: list[Finding] = []
        if planning is not None:
            plan = planning.plan()
            in_memory = [_for(purpose, f, planning) for f in of_plan(plan)]
        findings += integrity.against_lock(loaded.path, _read(target, draft))
        verdict = pair_findings(
            settings,
            target,
            draft,
            environ=env,
            known_types=lambda: _types(asked.result()[0]),
            progress=progress,
        )
        engine, unasked = asked.result()
    findings += [*verdict.findings, *unasked]
    if sample is not None and target is not None and draft is not None:
        findings += reach.of_sample(target, draft, sample)
    findings += support.findings(
        settings,
        target,
        draft,
        chosen.engine,
        engine,
        environ=env,
        shm_bytes=_shm_bytes(),
        is_elsewhere=not chosen.is_here,
    )
    findings += [*in_memory, *_profile(settings), *machine.files(settings)]
    if chosen.is_here:
        findings += _measured_with_another(loaded, chosen.engine)
        here = _machine(settings, env, on_cpu=chosen.engine.on_cpu)
        findings += machine.findings(settings, target, draft, here)
    would_fit: tuple[Remedy, ...] = ()
    if planning is not None and plan is not None and plan.refusal == "memory":
        would_fit = pricing.remedies(planning, plan)
    found = _without_echoes(findings)
    again = _again(target, draft, chosen, engine, env, compare=not verdict.was_compared)
    kept = remedies.proven([f for f in found if f.code not in skip], settings, again)
    kept = [pricing.priced(f, would_fit) for f in kept]
    kept.sort(key=lambda f: _ORDER[f.severity])
    judged = evidence.verdicts(found, plan, engine, chosen)
    report = PreflightReport(
        tuple(kept),
        settings.method,
        target,
        draft,
        vocabularies=verdict.comparison,
        vocabulary_overlap_ratio=verdict.overlap,
        plan=plan,
        judged_for=chosen,
        planning=planning,
        verdicts=judged,
        proven=tuple(
            evidence.proven(
                settings,
                target,
                draft,
                vocabularies=verdict.comparison,
                chosen=chosen,
                verdict=judged,
                plan=plan,
            )
        ),
        unproven=tuple(
            evidence.unproven(
                settings,
                target,
                draft,
                findings=found,
                vocabularies=verdict.comparison,
                chosen=chosen,
                verdict=judged,
                plan=plan,
            )
        ),
        price=evidence.price(plan),
        remedies=would_fit,
    )
    if not report.ok:
        return report
    has_gpu = planning is not None and planning.sees_hardware
    follows = evidence.next_command(loaded, judged, plan, has_gpu=has_gpu)
    return replace(report, next_command=follows)


def _for(purpose: Purpose, finding: Finding, planning: Planning) -> Finding:
    """An unknown size refuses a launch only where a GPU is seen that it may not fit."""
    if finding.code != "size-unknown" or purpose == "look":
        return finding
    severity: Severity = "warning"
    if planning.devices:
        severity = "error"
    return replace(finding, severity=severity)


def _again(
    target: ModelFacts | None,
    draft: ModelFacts | None,
    chosen: Chosen,
    engine: EngineFacts | None,
    environ: Mapping[str, str],
    *,
    compare: bool,
) -> remedies.Again:
    """What a remedy is tried with: everything but hashes, and the vocabularies where they were
    compared already."""
    from specserve.engine.installed import support

    def check(settings: Settings) -> list[Finding]:
        theirs = None
        if settings.models.draft_model is not None:
            theirs = draft
        pair = pair_findings(
            settings,
            target,
            theirs,
            environ=environ,
            known_types=lambda: _types(engine),
            progress=None,
            compare=compare,
        )
        found = support.findings(
            settings,
            target,
            theirs,
            chosen.engine,
            engine,
            environ=environ,
            is_elsewhere=not chosen.is_here,
        )
        return _without_echoes([*pair.findings, *found])

    return check


def is_known(code: str) -> bool:
    """Whether ``--skip`` may name it."""
    from specserve.engine.installed import known_bad

    return code in CODES or code in {entry.code for entry in known_bad.entries()}


def _require_known(skip: Sequence[str]) -> None:
    from specserve.engine.command.flags import did_you_mean

    unknown = [code for code in skip if not is_known(code)]
    if unknown:
        problems = []
        for code in unknown:
            hint = did_you_mean(code, CODES) or "; docs/checks.md lists them"
            problems.append(Problem(f"unknown code '{code}'{hint}", "--skip"))
        raise ConfigError(problems)


def read(
    settings: Settings,
    role: str,
    environ: Mapping[str, str] | None = None,
    purpose: Purpose = "launch",
) -> tuple[ModelFacts | None, list[Finding]]:
    """One checkpoint of the config, and what reading it showed; None when it cannot be read.

    Where nobody is about to load it, a folder that holds everything but weights is worth a look.
    """
    model: TargetModel | DraftModel | None = settings.models.target_model
    if role == "draft_model":
        model = settings.models.draft_model
    assert model is not None
    try:
        facts = reading.read(model.path, revision=model.revision, access=access(settings, environ))
    except CheckpointRefused as refused:
        return None, [_placed(f, role) for f in refused.findings]
    if role == "target_model":
        try:
            facts = reading.overridden(facts, settings.engine.flags.mapping("hf-overrides"))
        except CheckpointRefused as refused:
            return None, [*refused.findings]
    without = settings.engine.flags.text("load-format") == "dummy"
    found = [
        _placed(f, role) for f in facts.findings if not (without and f.code in _WITHOUT_WEIGHTS)
    ]
    if purpose == "look" and not any(name.endswith(".safetensors") for name in facts.sizes):
        found = [_noted(f) for f in found]
    return facts, found


def _noted(finding: Finding) -> Finding:
    """Weights that are not here at all are a note for whoever only looks."""
    if finding.code != "weights-missing":
        return finding
    message = "there are no weights here; judged by config.json and tokenizer alone"
    fix = "download the weights before a launch: specserve models pull CONFIG"
    return replace(finding, severity="info", message=message, fix=fix)


def _placed(finding: Finding, role: str) -> Finding:
    """The finding with the config key before the path, so that a reader knows which model it is."""
    where = f"models.{role}.path ({finding.where})"
    return replace(finding, where=where)


def pair_findings(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    *,
    environ: Mapping[str, str] | None = None,
    known_types: Callable[[], Collection[str] | None] = lambda: None,
    progress: integrity.Progress | None = lambda _name, _n: None,
    compare: bool = True,
) -> vocabulary.Verdict:
    """Every finding that the checkpoints alone decide. One unreadable model hides nothing.

    ``known_types`` is asked last: the ``model_type``s that the installed libraries know; None where
    none could say. Without ``progress`` nothing is hashed, without ``compare`` the vocabularies are
    left alone.
    """
    verdict = _checkpoints(
        settings, target, draft, environ or {}, progress=progress, compare=compare
    )
    code = [
        f for role in _roles(settings, target, draft) for f in consistency.code(role, known_types())
    ]
    return replace(verdict, findings=(*verdict.findings, *code))


def _roles(
    settings: Settings, target: ModelFacts | None, draft: ModelFacts | None
) -> Iterator[Role]:
    ours, theirs = settings.models.target_model, settings.models.draft_model
    tp, trust = ours.tensor_parallel_size, ours.trust_remote_code
    if target is not None:
        yield Role(target, ours, _TARGET, tp, trust)
    if draft is not None and theirs is not None:
        is_head = heads.kind_of(draft) not in (None, "draft_model")
        own = settings.draft_tensor_parallel_size()
        yield Role(draft, theirs, _DRAFT, own, trust, is_head)


def _checkpoints(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    environ: Mapping[str, str],
    *,
    progress: integrity.Progress | None,
    compare: bool,
) -> vocabulary.Verdict:
    found: list[Finding] = []
    if target is not None:
        misplaced = heads.as_target(target)
        if misplaced is not None:  # whatever else is odd about it follows from that
            return vocabulary.Verdict((misplaced,))
    roles = tuple(_roles(settings, target, draft))
    found += consistency.tensor_parallel(roles)
    for role in roles:
        found += consistency.check(role)
        found += match.float16_refused(settings, role.facts, f"{role.key}.path")
        if progress is not None:
            found += integrity.check(role.facts, role.settings.sha256, role.key, progress)
    if target is not None:
        found += match.target_length(settings, target, environ)
        if settings.method is not None:
            found += sampling.check(settings, target)
    if settings.method == "mtp":
        found += _mtp(settings, target, draft)
    if settings.method == "dspark" and settings.models.draft_model is None and target is not None:
        # vLLM checks nothing: beyond the block all positions are accepted less.
        found += block(head_of(target), settings.num_speculative_tokens, "dspark")
    if target is None or draft is None:
        return vocabulary.Verdict(tuple(found))
    return _both(settings, target, draft, found, compare=compare)


def _both(
    settings: Settings,
    target: ModelFacts,
    draft: ModelFacts,
    found: list[Finding],
    *,
    compare: bool,
) -> vocabulary.Verdict:
    is_head = settings.method != "draft_model"
    if settings.method in NEEDS_DRAFT:
        together = list(
            match.check(
                settings, target, draft, is_head=is_head, break_even=economics.break_even_chance
            )
        )
        if any(f.code == "draft-is-target" for f in together):
            return vocabulary.Verdict((*found, *together))
        found += together
    wrong = list(heads.check(settings, target, draft))
    found += wrong
    if is_head:
        found += reach.check(target, draft)
    if not compare or any(f.code in _WRONG_KIND for f in wrong):
        return vocabulary.Verdict(tuple(found))
    spec = settings.speculative_decoding
    verdict = vocabulary.check(
        target,
        draft,
        heterogeneous=bool(spec.use_heterogeneous_vocab),
        is_head=is_head,
        floor=spec.min_vocab_overlap_ratio,
    )
    if verdict.comparison is not None and match.is_cheap_relative(
        target, draft, same_vocabulary=verdict.comparison.relation == "identical"
    ):
        found = [f for f in found if f.code != "size-ratio"]
    return vocabulary.Verdict((*found, *verdict.findings), verdict.comparison, verdict.overlap)


def _mtp(
    settings: Settings, target: ModelFacts | None, draft: ModelFacts | None
) -> Iterator[Finding]:
    carrier, where = target, _TARGET
    if settings.models.draft_model is not None:
        carrier, where = draft, _DRAFT
        if target is not None and draft is not None:
            yield from mtp.width(target, draft)
    if carrier is not None:
        k = settings.num_speculative_tokens
        yield from mtp.check(carrier, k, f"{where}.path")


def _ask_engine(
    chosen: Chosen, environ: Mapping[str, str]
) -> tuple[EngineFacts | None, list[Finding]]:
    """What the vLLM to judge for supports, and what is to be said about the choice."""
    answer = chosen.facts(environ)
    if isinstance(answer, Finding):
        return None, [*chosen.findings, answer]
    return answer, [*chosen.findings]


def _measured_with_another(loaded: Loaded, installed: Installed) -> Iterator[Finding]:
    """What was measured with another version of the engine says little about this one."""
    from specserve.memory import calibration

    profile = loaded.settings.sidecar.benchmark_profile
    measured = [(calibration.path_for(loaded.path), f"specserve launch {loaded.path} --calibrate")]
    if profile is not None:
        measured.append((Path(profile), f"specserve bench {loaded.path}"))
    for path, fix in measured:
        try:
            engine = json.loads(read_small(path)).get("engine")
        except (
            OSError,
            ValueError,
            AttributeError,
        ):  # whoever uses the file says what is wrong with it
            continue
        if isinstance(engine, str) and engine.split()[-1:] != [installed.version]:
            message = f"was measured with {engine}; installed is {installed}"
            yield Finding("engine-changed", "warning", str(path), message, fix)


def _profile(settings: Settings) -> Iterator[Finding]:
    """The benchmark profile, which the sidecar reads when it starts."""
    from specserve.sidecar import speedup

    path = settings.sidecar.benchmark_profile
    if path is None or not settings.sidecar.enabled:
        return
    try:
        speedup.load(Path(path))
    except ConfigError as error:
        fix = "give the profile that specserve bench wrote, or remove sidecar.benchmark_profile"
        for problem in error.problems:
            where = f"sidecar.benchmark_profile ({problem.where})"
            yield Finding("profile-unusable", "error", where, problem.message, fix)


def _read(target: ModelFacts | None, draft: ModelFacts | None) -> dict[str, ModelFacts]:
    return {
        key: facts
        for key, facts in (("target_model", target), ("draft_model", draft))
        if facts is not None
    }


def _types(engine: EngineFacts | None) -> Collection[str] | None:
    if engine is None:
        return None
    return engine.model_types or None


def _machine(settings: Settings, environ: Mapping[str, str], *, on_cpu: bool) -> ServingMachine:
    """This machine, as the engine will find it. Where other hardware is described, its GPUs are
    not looked at."""
    from specserve.engine.installed.machine import ServingMachine, installed_torch
    from specserve.gpu import devices as gpu

    env = {**environ, **settings.engine.env}
    home = Path(env.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 - never raises
    driver = found = None
    if not on_cpu and not settings.hardware.gpu_name and not settings.hardware.gpu_memory_gib:
        driver = gpu.driver_version()
        found = gpu.of_engine(gpu.devices(), env.get("CUDA_VISIBLE_DEVICES"))
    return ServingMachine(env, home, on_cpu, driver, found, installed_torch())


def _shm_bytes() -> int | None:
    try:
        status = os.statvfs("/dev/shm")  # noqa: S108
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def _planning(
    loaded: Loaded,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    environ: Mapping[str, str],
    chosen: Chosen,
) -> Planning | None:
    """What a memory plan needs, where everything that will be loaded could be read."""
    from specserve.app.plan import Planning

    if target is None or (draft is None and loaded.settings.uses_draft_model):
        return None
    return Planning.of(loaded, environ=environ, target=target, draft=draft, chosen=chosen)


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Each fault once: where a check of the pair names the cause, the engine's view is left out."""
    codes = {f.code for f in findings}
    return [f for f in dict.fromkeys(findings) if not codes & _SAID_BY.get(f.code, set())]


def _model_dict(facts: ModelFacts) -> dict[str, JsonValue]:
    return {
        "path": facts.path,
        "revision": facts.revision,
        "architecture": next(iter(facts.architectures), None),
        "weights_bytes": facts.total_size_bytes,
        "dtype": match.stored_dtype(facts),
        "quantization": quant_method(facts.config),
        "vocab_size": vocabulary.vocab_size(facts),
        "max_position_embeddings": native_length(facts),
    }
