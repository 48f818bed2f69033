"""What is known of a draft's checkpoint that explains its acceptance: its context and its
vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from specserve.alert.causes import ServerFacts
from specserve.checkpoint import read
from specserve.checkpoint.access import HubAccess
from specserve.checkpoint.context import context_length
from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.errors import SpecserveError
from specserve.pair.reach import rows_of
from specserve.pair.vocabulary import vocab_size

LOG = logging.getLogger("specserve.sidecar")


def of_models(
    settings: Settings, target: ModelFacts | None, draft: ModelFacts | None
) -> ServerFacts:
    """From checkpoints that were read; what they do not say stays unknown."""
    context = share = None
    if draft is not None:
        found = context_length(draft)
        longest = settings.engine.max_model_len
        if found is not None and (longest is None or found.longest < longest):
            context = found.longest
        rows, whole = rows_of(draft), None
        if target is not None:
            whole = vocab_size(target)
        if rows is not None and whole is not None and 0 < rows < whole:
            share = rows / whole
    return ServerFacts(settings.method, context, share)


def of_settings(settings: Settings, environ: Mapping[str, str]) -> ServerFacts:
    """From what lies on this machine; nothing is fetched, and an unreadable checkpoint is one of
    which nothing is known."""
    target, draft = settings.models.target_model, settings.models.draft_model
    if draft is None or settings.method is None:
        return ServerFacts(settings.method)
    return of_models(
        settings,
        _config(target.path, target.revision, environ),
        _config(draft.path, draft.revision, environ),
    )


def _config(path: str, revision: str | None, environ: Mapping[str, str]) -> ModelFacts | None:
    access = HubAccess.of(environ, offline=True)
    try:
        return read.read_config(path, revision=revision, access=access)
    except SpecserveError as error:
        LOG.debug("nothing is known of %s", path, extra={"why": str(error)})
        return None
