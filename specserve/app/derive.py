"""The settings with what the checkpoints decide: a method and tokens per draft that nobody set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specserve.checkpoint import read as checkpoint
from specserve.checkpoint.access import access
from specserve.checkpoint.facts import CheckpointRefused, ModelFacts
from specserve.config.load import Loaded
from specserve.config.schema import Settings
from specserve.config.speculation import WITHOUT_DRAFT, SpeculativeDecoding
from specserve.pair import derive

_GIVE_TOKENS = frozenset({"mtp", "dspark", "dflash", "medusa", "mlp_speculator", "suffix"})
"""Methods of which something else than our default is expected where nobody sets the number."""
_METHOD, _TOKENS = "speculative_decoding.method", "speculative_decoding.num_speculative_tokens"


def derived(loaded: Loaded, environ: Mapping[str, str]) -> tuple[Loaded, tuple[str, ...]]:
    """The config with method and tokens per draft filled in from config.json, and a sentence for
    each that nobody set.

    A checkpoint that cannot be read decides nothing: whoever checks it says why.
    """
    settings = loaded.settings
    spec = settings.speculative_decoding
    if settings.method is None or (spec.method and spec.num_speculative_tokens):
        return loaded, ()
    notes: list[str] = []
    sources = dict(loaded.sources)
    draft = None
    if settings.uses_draft_model:
        draft = _read(settings, "draft_model", environ)
    if spec.method is None and draft is not None:
        kind = derive.method_of(draft)
        if kind is not None:
            notes.append(f"{_METHOD} is not set; the draft's own files name {kind}")
            settings = _with(settings, spec.model_copy(update={"method": kind}))
            sources[_METHOD] = "the draft's config.json"
    if spec.num_speculative_tokens is None:
        settings, said, source = _tokens(settings, draft, environ)
        if source != "default" or settings.method in _GIVE_TOKENS:
            notes.append(said)
        sources[_TOKENS] = source
    return replace(loaded, settings=settings, sources=sources), tuple(notes)


def _tokens(
    settings: Settings, draft: ModelFacts | None, environ: Mapping[str, str]
) -> tuple[Settings, str, str]:
    """The settings with tokens per draft, a sentence, and where the number comes from."""
    spec, method = settings.speculative_decoding, settings.method
    if spec.schedule:
        most = settings.num_speculative_tokens
        said = f"{_TOKENS} is not set; {most} is the most that the schedule asks for"
        return (
            _with(settings, spec.model_copy(update={"num_speculative_tokens": most})),
            said,
            ("speculative_decoding.schedule"),
        )
    carrier, whose = draft, "draft"
    if method in ("mtp", "dspark") and not settings.uses_draft_model:
        carrier, whose = _read(settings, "target_model", environ), "target"
    named = None
    if carrier is not None and method is not None and method not in WITHOUT_DRAFT:
        named = derive.tokens_of(method, carrier)
    number = named or settings.num_speculative_tokens
    said = f"{_TOKENS} is not set; {number} is "
    if named is not None:
        said += f"what the {whose}'s config.json gives"
        source = f"the {whose}'s config.json"
    else:
        said += f"the default of method {method}"
        source = "default"
    return _with(settings, spec.model_copy(update={"num_speculative_tokens": number})), said, source


def _with(settings: Settings, spec: SpeculativeDecoding) -> Settings:
    return settings.model_copy(update={"speculative_decoding": spec})


def _read(settings: Settings, role: str, environ: Mapping[str, str]) -> ModelFacts | None:
    """The config of one checkpoint; None when it cannot be read."""
    models = settings.models
    if role == "target_model":
        path, revision = models.target_model.path, models.target_model.revision
    else:
        assert models.draft_model is not None
        path, revision = models.draft_model.path, models.draft_model.revision
    try:
        facts = checkpoint.read_config(path, revision=revision, access=access(settings, environ))
        if role == "target_model":
            return checkpoint.overridden(facts, settings.engine.flags.mapping("hf-overrides"))
    except CheckpointRefused:
        return None
    return facts
