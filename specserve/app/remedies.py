"""The remedies of a report, fitted to the file that they are for.

A check knows what is wrong and names the key that mends it. What else of this file must change with
that key, and how a flag is spelt in it, is added here, so that a remedy that is typed as it stands
leaves a config that is valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specserve.config.schema import Settings
from specserve.errors import Change
from specserve.findings import Finding

EXTRA_ARGS = "engine.extra_args."
_TOKENS = "speculative_decoding.num_speculative_tokens"
_OTHER_VOCABULARY = "speculative_decoding.use_heterogeneous_vocab"
_SAMPLING = "speculative_decoding.draft_sample_method"


def fitted(finding: Finding, settings: Settings) -> Finding:
    """The finding, with every edit that its remedy needs in this file."""
    if not finding.changes:
        return finding
    changes, fix = list[Change](), finding.fix or ""
    for change in finding.changes:
        here = tuple(_as_written(change, settings))
        if here != (change,):
            fix = fix.replace(str(change), _listed(here))
        changes += here
    keys = {change.key for change in changes}
    along = [c for change in changes for c in _along(change, settings) if c.key not in keys]
    if along:
        fix = f"{fix}; with it {_listed(along)}"
    return replace(finding, fix=fix, changes=(*changes, *along))


def _listed(changes: tuple[Change, ...] | list[Change]) -> str:
    return ", ".join(map(str, changes))


def _as_written(change: Change, settings: Settings) -> Iterator[Change]:
    """The change under the spelling of the flag that the file already has."""
    if not change.key.startswith(EXTRA_ARGS):
        yield change
        return
    name = change.key.removeprefix(EXTRA_ARGS)
    written = [flag for flag in settings.engine.flags.flags if flag.name == name]
    for flag in written:
        if flag.key != name or change.value is None:
            yield Change(EXTRA_ARGS + flag.key)
    if change.value is not None or not written:
        yield change


def _along(change: Change, settings: Settings) -> Iterator[Change]:
    """What the rules of the config want to be changed with it."""
    draft, spec = settings.models.draft_model, settings.speculative_decoding
    value = change.value
    if change.key == "models.target_model.tensor_parallel_size" and draft is not None:
        if draft.tensor_parallel_size not in (None, 1, value):
            yield Change("models.draft_model.tensor_parallel_size", value)
    elif change.key == "engine.max_model_len" and isinstance(value, int) and draft is not None:
        if draft.max_model_len is not None and draft.max_model_len > value:
            yield Change("models.draft_model.max_model_len", value)
    elif change.key == _TOKENS and isinstance(value, int) and spec.schedule:
        rows = [[first, last, min(tokens, value)] for first, last, tokens in spec.schedule]
        if rows != [list(row) for row in spec.schedule]:
            yield Change("speculative_decoding.schedule", [list(row) for row in rows])
    elif change.key == _OTHER_VOCABULARY and spec.draft_sample_method == "probabilistic":
        yield Change(_SAMPLING, "greedy")
