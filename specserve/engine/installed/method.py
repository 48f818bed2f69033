"""The method and the model runner that vLLM will end up with, by its own rules.

``SpeculativeConfig.__post_init__`` does not take the configured method on trust: the draft's path
and its ``model_type`` can overrule it, in silence. The order of its rules was read in 0.32
(``vllm/config/speculative.py``, 2026-11-29); the lists they use are asked from the installed
version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.config.speculation import WITHOUT_DRAFT
from specserve.engine.installed.introspect import EngineFacts, release
from specserve.pair.derive import PATH_WORDS

KEPT = frozenset({"eagle", "eagle3", "dflash", "dspark"})
"""Methods that vLLM takes as they are configured."""
_DFLASH_ARCHITECTURES = frozenset({"MuseGlimmerAssistantModel"})
_DSPARK_ARCHITECTURES = frozenset({"Qwen3DSparkModel", "Qwen3OmniDSparkModel", "Gemma4DSparkModel"})
_DSPARK_TARGETS = frozenset({"deepseek_v4", "deepseek_v41"})
_DSPARK_READ_UNTIL = (0, 34)
"""From this version on, more targets may carry DSpark stages: nothing is said."""
_MTP_ONLY_WITH_LAYERS = frozenset({"nemotron_h", "nemotron_h_puzzle"})
"""Model types that become MTP types only if their config has MTP layers."""


@dataclass(frozen=True)
class Predicted:
    """A method, and what makes vLLM choose it. ``method`` None: vLLM refuses the configured one."""

    method: str | None
    because: str


def predict(
    settings: Settings,
    target: ModelFacts | None,
    draft: ModelFacts | None,
    engine: EngineFacts | None,
) -> Predicted | None:
    """The method in force after vLLM's own detection; None where that cannot be said."""
    method = settings.method
    if method is None:
        return None
    if method == "dspark" and not settings.uses_draft_model:
        return _dspark_of(target, engine)
    if method in WITHOUT_DRAFT or method in KEPT:
        return Predicted(method, "vLLM takes it as configured")
    if settings.uses_draft_model:
        facts = draft
    else:
        facts = target
    if facts is None:
        return None
    return (
        _by_path(facts)
        or _by_architecture(facts)
        or _by_type(method, facts, engine, own=not settings.uses_draft_model)
    )


def _dspark_of(target: ModelFacts | None, engine: EngineFacts | None) -> Predicted | None:
    """DSpark without a draft path: vLLM loads the target again, always as a DeepSeek draft."""
    if target is None or engine is None or release(engine.installed.version) >= _DSPARK_READ_UNTIL:
        return None
    names = set(target.architectures)
    if target.config.get("model_type") in _DSPARK_TARGETS or names & (
        _DSPARK_ARCHITECTURES | {"K3DSparkModel"}
    ):
        return Predicted("dspark", "vLLM takes it as configured")
    model_type = target.config.get("model_type")
    return Predicted(
        None,
        f"the target (model_type '{model_type}') carries no DSpark stages; a draft path is needed",
    )


def _by_path(facts: ModelFacts) -> Predicted | None:
    path = facts.path.lower()
    for part, method in PATH_WORDS:
        if part in path:
            return Predicted(method, f"its path contains '{part}'")
    return None


def _by_architecture(facts: ModelFacts) -> Predicted | None:
    names = set(facts.architectures)
    dspark = names & _DSPARK_ARCHITECTURES
    if "DSparkDraftModel" in names and facts.config.get("model_type") == "qwen3":
        dspark |= {"DSparkDraftModel"}
    for found, method in ((names & _DFLASH_ARCHITECTURES, "dflash"), (dspark, "dspark")):
        if found:
            return Predicted(method, f"its architecture is {min(found)}")
    return None


def _by_type(
    method: str, facts: ModelFacts, engine: EngineFacts | None, *, own: bool
) -> Predicted | None:
    model_type = facts.config.get("model_type")
    if method == "medusa":  # vLLM writes the model type 'medusa' over whatever the draft says
        return Predicted("medusa", "vLLM takes it as configured")
    if model_type in ("medusa", "mlp_speculator"):
        return Predicted(model_type, f"its model_type is '{model_type}'")
    if engine is None or not engine.mtp_model_types:
        return None
    mtp = mtp_type(facts, engine)
    if mtp is not None:
        return Predicted("mtp", f"vLLM reads its model_type '{model_type}' as '{mtp}'")
    if method == "draft_model":
        return Predicted("draft_model", "vLLM takes it as configured")
    if own:
        whose = "the target"
    else:
        whose = "the draft"
    return Predicted(
        None,
        (
            f"{whose} (model_type '{model_type}') is nothing that "
            f"{engine.installed} can run as {method}"
        ),
    )


def mtp_type(facts: ModelFacts, engine: EngineFacts) -> str | None:
    """The MTP model type that this vLLM makes of a checkpoint; None when it has none for it."""
    for config in (facts.config, facts.text_config):
        name = str(config.get("model_type"))
        if name in _MTP_ONLY_WITH_LAYERS and not config.get("num_nextn_predict_layers"):
            continue
        if name in engine.mtp_model_types:
            return name
        if name in engine.mtp_sources:
            return engine.mtp_sources[name]
    return next(
        (engine.mtp_sources[name] for name in facts.architectures if name in engine.mtp_sources),
        None,
    )


@dataclass(frozen=True)
class Runner:
    """The model runner of the engine, ``v1`` or ``v2``."""

    name: str
    because: str
    forced: bool = False
    """Chosen by VLLM_USE_V2_MODEL_RUNNER."""


def runner(
    settings: Settings, engine: EngineFacts | None, environ: Mapping[str, str]
) -> Runner | None:
    """The runner that will be live; None where this vLLM did not say how it chooses."""
    forced = {**environ, **settings.engine.env}.get("VLLM_USE_V2_MODEL_RUNNER")
    if forced is not None:
        if forced.strip().lower() in ("1", "true"):
            name = "v2"
        else:
            name = "v1"
        return Runner(name, f"VLLM_USE_V2_MODEL_RUNNER={forced}", forced=True)
    if engine is None or not engine.runner_refusals:
        return None
    if engine.has_triton is False:
        return Runner("v1", "Model Runner V2 needs Triton, which is not there")
    refusals = v2_refusals(settings, engine)
    if refusals:
        return Runner("v1", f"Model Runner V2 does not support {', '.join(refusals)}")
    return Runner("v2", "default")


def v2_refusals(settings: Settings, engine: EngineFacts) -> tuple[str, ...]:
    """What Model Runner V2 does not support of this configuration."""
    spec, method = settings.speculative_decoding, settings.method
    if method is None:
        return ()
    known = list(engine.runner_refusals.get(method, {}).get("v2", ()))
    if spec.parallel_drafting and method not in ("dflash", "dspark"):
        known.append("parallel drafting")
    if spec.use_heterogeneous_vocab:
        known.append("drafts with another vocabulary")
    return tuple(known)
