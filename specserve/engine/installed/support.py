"""What the installed vLLM will do with this configuration: method, classes, flags, runner, known
defects.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.engine.command import args, environment, flags, removed
from specserve.engine.installed import known_bad, profiles
from specserve.engine.installed.conditions import Situation
from specserve.engine.installed.introspect import EngineFacts, Installed, release
from specserve.engine.installed.method import mtp_type, predict, runner, v2_refusals
from specserve.errors import Change, ConfigError, Problem, nearest
from specserve.findings import Finding, Severity
from specserve.pair import head_shapes, heads, mtp
from specserve.units import GIB, size

MIN_SHM_BYTES = GIB
"""Workers of one engine exchange through /dev/shm; containers start with 64 MB of it."""
MIN_PREFILL_SHARE = 0.25
"""Part of a step's token budget that a full decode batch should leave to prefill."""
_FIXED_CLASSES = {"medusa": "MedusaModel", "mlp_speculator": "MLPSpeculatorPreTrainedModel"}
_HEAD_PREFIXES = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": "DFlash"}
_SERVICE_LINK = re.compile(r"VLLM_(?:SERVICE_(?:HOST|PORT)\w*|PORT_\d+_\w+)")
"""What Kubernetes sets beside VLLM_PORT for a Service named 'vllm'; vLLM reads none of it."""


def findings(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    installed: Installed | None,
    engine: EngineFacts | None,
    *,
    environ: Mapping[str, str] | None = None,
    shm_bytes: int | None = None,
    is_elsewhere: bool = False,
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
) -> list[Finding]:
    """Everything this vLLM would refuse, do otherwise than configured, or is known to do wrong.

    ``shm_bytes`` is the size of /dev/shm; None does not look at it. What could not be asked is not
    judged, nor what is beside a vLLM that ``is_elsewhere``, not on this machine.
    """
    env = environ or {}
    found = [*_environment(settings, engine, env), *_shared_memory(settings, shm_bytes)]
    if installed is None:
        return found
    found += _arguments(settings, installed, engine)
    found += _architecture(settings, target, draft, engine)
    if settings.method is not None:
        found += _method(settings, target, draft, engine)
        found += _runner(settings, engine, env)
        found += _requirements(settings, has_module, is_elsewhere=is_elsewhere)
        found += _step_budget(settings, engine.default_max_num_seqs if engine else None)
        live = runner(settings, engine, env)
        situation = Situation(settings, target, draft, engine, live)
        found += known_bad.findings(situation, installed.version)
    return found


def _finding(code: str, problem: Problem) -> Finding:
    where = problem.where or "engine"
    return Finding(code, "error", where, problem.message, problem.fix, problem.changes)


def _arguments(
    settings: Settings, installed: Installed, engine: EngineFacts | None
) -> Iterator[Finding]:
    """Flags and keys that are said twice, or that this vLLM does not have."""
    try:
        command = args.build(settings, installed=installed)
    except ConfigError as error:
        yield from (_finding("argument-conflict", p) for p in error.problems)
        return
    if engine is not None:
        yield from (_finding("flag-unsupported", p) for p in flags.check_flags(command, engine))
        yield from (_finding("key-unsupported", p) for p in flags.check_keys(command, engine))


def _architecture(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    engine: EngineFacts | None,
) -> Iterator[Finding]:
    """Model classes. A class that only Transformers has is served through it, more slowly."""
    if engine is None or not engine.architectures:
        return
    if target is not None and target.architectures:
        yield from _known(target.architectures, "models.target_model", target, engine)
    if draft is not None and settings.uses_draft_model:
        names = draft_architectures(settings, draft, engine)
        if names:
            yield from _known(names, "models.draft_model", draft, engine)


def _known(
    names: tuple[str, ...], where: str, facts: ModelFacts, engine: EngineFacts
) -> Iterator[Finding]:
    if set(names) & engine.architectures:
        return
    if set(names) & engine.transformers_architectures or "auto_map" in facts.config:
        yield Finding(
            "architecture-fallback",
            "warning",
            where,
            (
                f"{engine.installed} has no class of its own for {', '.join(names)}; "
                "it falls back to Transformers' code"
            ),
            "measure it before rolling out, or install a newer vLLM",
        )
        return
    yield Finding(
        "architecture-unsupported",
        "error",
        where,
        (
            f"{engine.installed} cannot load {', '.join(names)}; it must be an "
            "architecture that this version knows"
        ),
        f"{_where_it_is('architectures', *names)}, or choose another checkpoint",
    )


def _where_it_is(question: str, *names: str) -> str:
    """What to install for one of these names: a newer version, or one that still had it."""
    found = [version for name in names for version in profiles.having(question, name)]
    if not found:
        return "install a newer vLLM"
    versions = sorted(set(found), key=release)
    if versions[0] == versions[-1]:
        return f"install vLLM {versions[0]}"
    return f"install vLLM {versions[0]} to {versions[-1]}"


def draft_architectures(
    settings: Settings, draft: ModelFacts, engine: EngineFacts
) -> tuple[str, ...]:
    """The classes vLLM will ask for: it renames those of heads
    (``transformers_utils/configs/eagle.py``, 0.32).

    Empty where the name cannot be foretold: speculators' own format, and MTP types.
    """
    method, names = settings.method or "", draft.architectures
    if method in _FIXED_CLASSES:
        return (_FIXED_CLASSES[method],)
    if "speculators_config" in draft.config or draft.config.get("model_type") == "eagle":
        return ()
    if prefix := _HEAD_PREFIXES.get(method):
        return tuple(n if _is_head(n, prefix) else f"{prefix}{n}" for n in names)
    if method == "draft_model" and mtp_type(draft, engine) is None:
        return names
    return ()


def _is_head(name: str, prefix: str) -> bool:
    ends_so = prefix != "Eagle" and name.endswith(prefix)
    return name.startswith(prefix) or ends_so or name == "LiLiCorrDraftModel"


def _method(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    engine: EngineFacts | None,
) -> Iterator[Finding]:
    """The method that will run is the one configured."""
    method = settings.method
    if method is None:
        return
    if engine is not None and engine.methods and method not in engine.methods:
        yield Finding(
            "method-unsupported",
            "error",
            "speculative_decoding.method",
            (
                f"{engine.installed} has no method '{method}'; it must be one of "
                f"{', '.join(sorted(engine.methods))}"
            ),
            f"{_where_it_is('methods', method)}, or choose another method",
        )
        return
    if engine is not None and (name := _without_hidden_states(method, target, draft, engine)):
        yield Finding(
            "method-unsupported",
            "error",
            "speculative_decoding.method",
            (
                f"{engine.installed} cannot give the hidden states of a {name} to a "
                f"draft; method '{method}' reads them"
            ),
            "install a newer vLLM, or choose method ngram, suffix or draft_model",
        )
    predicted = predict(settings, target, draft, engine)
    if predicted is None or predicted.method == method:
        return
    if settings.uses_draft_model:
        whose = "the draft"
    else:
        whose = "the target"
    where, changes = "speculative_decoding.method", tuple[Change, ...]()
    if predicted.method is None:
        message, fix = predicted.because, "choose the method this checkpoint was made for"
    else:
        message = (
            f"vLLM would run method '{predicted.method}' ({whose}: "
            f"{predicted.because}), not '{method}'"
        )
        changes = _method_as_predicted(predicted.method, settings, target, draft)
        fix = " and ".join(map(str, changes))
        if "path" in predicted.because:
            moved = "move the checkpoint to a folder whose path does not say so"
            fix = ", or ".join([fix, moved] if fix else [moved])
        elif not changes:
            fix = "choose another draft, or a method without one (ngram, suffix)"
    yield Finding("method-mismatch", "error", where, message, fix, changes)


def _method_as_predicted(
    method: str, settings: Settings, target: ModelFacts | None, draft: ModelFacts | None
) -> tuple[Change, ...]:
    """The edits under which config and engine agree; none where the draft is nothing for that
    method."""
    change = Change("speculative_decoding.method", method)
    if draft is None or not settings.uses_draft_model:
        return (change,)
    if method != "mtp":
        if not draft.tensors or heads.kind_of(draft) in (None, method):
            return (change,)
        return ()
    widths = (
        None if target is None else head_shapes.hidden_size(target),
        head_shapes.hidden_size(draft),
    )
    if mtp.modules(draft) and len(set(widths) - {None}) < 2:
        return (change,)
    if target is not None and mtp.modules(target):
        return (change, Change("models.draft_model"))
    return ()


def _without_hidden_states(
    method: str | None, target: ModelFacts | None, draft: ModelFacts | None, engine: EngineFacts
) -> str | None:
    """The target's class, if it cannot do what EAGLE3 and DFlash need. vLLM finds out after both
    are loaded (``gpu_model_runner.py`` of 0.32). An EAGLE3 head may say that it does without."""
    if draft:
        own = draft.config.get("eagle_config")
    else:
        own = None
    needless = isinstance(own, Mapping) and own.get("use_aux_hidden_state") is False
    if target is None or method not in ("eagle3", "dflash") or needless:
        return None
    names = set(target.architectures)
    if names and names <= engine.without_eagle3:
        return min(names)
    return None


def _runner(
    settings: Settings, engine: EngineFacts | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """A forced model runner must know the method; the one chosen automatically is named."""
    live = runner(settings, engine, environ)
    if live is None or engine is None or settings.method is None:
        return
    refused = {
        "v1": engine.runner_refusals.get(settings.method, {}).get("v1", ()),
        "v2": v2_refusals(settings, engine),
    }[live.name]
    if live.forced and refused:
        fix, changes = _unset("VLLM_USE_V2_MODEL_RUNNER", settings)
        yield Finding(
            "model-runner",
            "error",
            "VLLM_USE_V2_MODEL_RUNNER",
            (
                f"{live.because} forces Model Runner {live.name.upper()}, which does "
                f"not support {', '.join(refused)}"
            ),
            f"{fix}, so that vLLM chooses the runner",
            changes,
        )
    elif not live.forced and refused:
        yield Finding(
            "model-runner",
            "error",
            "speculative_decoding.method",
            f"the engine runs Model Runner {live.name.upper()} ({live.because}), which does not "
            f"support "
            f"{', '.join(refused)}",
            "choose another method",
        )
    elif live.name == "v1" and engine.platform != "cpu" and not live.forced:
        yield Finding(
            "model-runner",
            "info",
            "speculative_decoding.method",
            f"the engine will run Model Runner V1: {live.because}",
        )


def _requirements(
    settings: Settings, has_module: Callable[[str], bool], *, is_elsewhere: bool
) -> Iterator[Finding]:
    spec = args.speculative_config(settings) or {}
    if settings.method == "suffix" and is_elsewhere:
        yield Finding(
            "arctic-inference-missing",
            "info",
            "speculative_decoding.method",
            "method 'suffix' needs the package arctic-inference beside vLLM, which was not looked "
            "for: that vLLM is not installed here",
        )
    elif settings.method == "suffix" and not has_module("arctic_inference"):
        yield Finding(
            "arctic-inference-missing",
            "error",
            "speculative_decoding.method",
            "method 'suffix' needs the package arctic-inference, which is not installed",
            "pip install arctic-inference==0.1.1",
        )
    if spec.get("rejection_sample_method") == "synthetic":
        change = Change("speculative_decoding.extra_config.rejection_sample_method")
        yield Finding(
            "synthetic-acceptance",
            "error",
            change.key,
            "'synthetic' accepts tokens at a set rate, whatever the target thinks of them: it is "
            "for measurements and "
            "its text is wrong",
            f"{change}, or set it to standard or block",
            (change,),
        )


def extra_slots(settings: Settings) -> int:
    """Tokens per sequence and step that drafting needs beside the k + 1 that are verified.

    ``SpeculativeConfig.max_num_new_slots_for_drafting``, read in 0.32.
    """
    method, spec = settings.method, settings.speculative_decoding
    k = settings.num_speculative_tokens
    if method == "dflash":
        return k
    if spec.parallel_drafting or method == "dspark":
        if method == "draft_model":
            return k
        return k - 1
    if method == "draft_model":
        return 1
    return 0


def _step_budget(settings: Settings, default_seqs: int | None) -> Iterator[Finding]:
    """A full decode batch against the tokens of one step, where both are known."""
    tokens = settings.engine.max_num_batched_tokens
    if tokens is None:
        return
    where, extra = "engine.max_num_batched_tokens", extra_slots(settings)
    a_sequence = settings.num_speculative_tokens + 1 + extra
    # Without max_num_seqs vLLM takes its default, or the tokens of a step where those are fewer:
    # more tokens then mean more sequences, up to the default.
    most = settings.engine.max_num_seqs or default_seqs
    enough = Change(where, -(-(most or 1) * a_sequence * 4 // 3))
    if tokens <= extra:
        message = (
            f"{tokens} tokens per step leave nothing beside the {extra} that "
            "drafting takes; vLLM refuses that"
        )
        yield Finding("step-budget", "error", where, message, f"{enough}, or more", (enough,))
        return
    if most is None:
        return
    seqs = settings.engine.max_num_seqs or min(most, tokens)
    full = seqs * a_sequence
    if tokens - full < MIN_PREFILL_SHARE * tokens:
        severity: Severity = "warning"
        if settings.engine.flags.is_on("enable-lora") and tokens < full:
            severity = "error"
        message = (
            f"{seqs} sequences take {full} of {tokens} tokens in a step, so prefill gets "
            f"{max(0, tokens - full)}; prompts would wait"
        )
        fix = f"{enough}, or more, or lower engine.max_num_seqs"
        yield Finding("step-budget", severity, where, message, fix, (enough,))


def _shared_memory(settings: Settings, shm_bytes: int | None) -> Iterator[Finding]:
    workers = settings.gpus_per_node
    if workers > 1 and shm_bytes is not None and shm_bytes < MIN_SHM_BYTES:
        yield Finding(
            "shared-memory",
            "error",
            "/dev/shm",  # noqa: S108
            f"{size(shm_bytes)} for {workers} workers; must be at least {size(MIN_SHM_BYTES)}",
            (
                "docker run --shm-size=2g ...   # Kubernetes: an emptyDir with medium: Memory at "
                "/dev/shm"
            ),
        )


def _environment(
    settings: Settings, engine: EngineFacts | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Variables of vLLM's that Kubernetes made, or that this version does not read, and a key that
    only it knows.
    """
    if unknown := environment.unknown_key(settings, environ):
        yield _finding("api-key-unknown", unknown)
    merged = {**environ, **settings.engine.env}
    for name in sorted(merged):
        if not name.startswith("VLLM_"):
            continue
        if name in settings.engine.env:
            where = f"engine.env.{name}"
        else:
            where = name
        if merged[name].startswith("tcp://"):
            yield Finding(
                "kubernetes-service-variable",
                "error",
                where,
                (
                    f"it is {merged[name]}: Kubernetes made it for a Service named "
                    "'vllm', and vLLM reads it as its own"
                ),
                "set enableServiceLinks: false in the pod, or rename the Service",
            )
        elif _SERVICE_LINK.fullmatch(name):
            continue
        elif (
            engine is not None and engine.environment_names and name not in engine.environment_names
        ):
            yield _unknown_variable(name, where, settings, engine)


def _unknown_variable(name: str, where: str, settings: Settings, engine: EngineFacts) -> Finding:
    fix, changes = _unset(name, settings)
    gone = removed.VARIABLES.get(name)
    if gone is not None:
        message = f"{engine.installed} does not read it: {gone.why}"
        if gone.instead is not None:
            fix, changes = removed.instead_of(where, gone), ()
        return Finding("environment-unknown", "warning", where, message, fix, changes)
    near = nearest(name, engine.environment_names)
    hint = ""
    if near:
        hint = f"; did you mean '{near}'?"
        fix = f"rename it to {near}"
        if changes:
            changes = (*changes, Change(f"engine.env.{near}", settings.engine.env[name]))
    message = f"{engine.installed} does not read it{hint}"
    return Finding("environment-unknown", "warning", where, message, fix, changes)


def _unset(name: str, settings: Settings) -> tuple[str, tuple[Change, ...]]:
    """How a variable is taken away: from the config where that sets it, else from the shell."""
    if name in settings.engine.env:
        change = Change(f"engine.env.{name}")
        return str(change), (change,)
    return f"unset {name}", ()
