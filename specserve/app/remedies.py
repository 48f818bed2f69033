"""The remedies of a report, fitted to the file that they are for.

A check knows what is wrong and names the key that mends it. What else of this file must change with
that key, and how a flag is spelt in it, is added here, so that a remedy that is typed as it stands
leaves a config that is valid. Then it is tried: the checks run again on the config that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue, ValidationError

from specserve.config import rules
from specserve.config.schema import Settings
from specserve.config.speculation import ONLY_FOR, WITHOUT_DRAFT
from specserve.errors import Change
from specserve.findings import Finding

EXTRA_ARGS = "engine.extra_args."
_TOKENS = "speculative_decoding.num_speculative_tokens"
_OTHER_VOCABULARY = "speculative_decoding.use_heterogeneous_vocab"
_METHOD = "speculative_decoding.method"
_SAMPLING = "speculative_decoding.draft_sample_method"


_OPEN = (EXTRA_ARGS, "engine.env.", "speculative_decoding.extra_config.")
"""Sections whose keys are not ours; what follows is one key."""
_LONGEST_CHAIN = 3

Again = Callable[[Settings], Sequence[Finding]]
"""The checks that a remedy is tried with."""


def proven(findings: Sequence[Finding], settings: Settings, again: Again) -> list[Finding]:
    """The findings, with remedies that were tried.

    What a remedy alone would lead to is mended with it; one that leads to what no edit mends is
    withdrawn.
    """
    if not any(finding.changes for finding in findings):
        return list(findings)
    known = {f.code for f in (*findings, *again(settings)) if f.severity == "error"}
    return [_tried(fitted(finding, settings), settings, known, again) for finding in findings]


def _tried(finding: Finding, settings: Settings, known: Collection[str], again: Again) -> Finding:
    changes = finding.changes
    if not changes:
        return finding
    follow: list[tuple[str, tuple[Change, ...]]] = []
    for _ in range(_LONGEST_CHAIN):
        after = applied(settings, changes)
        if isinstance(after, Settings):
            new = [f for f in again(after) if f.severity == "error" and f.code not in known]
            follow = [(f.message, fitted(f, after).changes) for f in new]
        else:
            follow = [(complaint.message, complaint.changes) for complaint in after]
        if not follow:
            return _with_more(finding, changes)
        keys = {change.key for change in changes}
        more = [c for _, edits in follow for c in edits if c.key not in keys]
        if not more or not all(edits for _, edits in follow):
            break
        changes = (*changes, *dict.fromkeys(more))
    # What is proposed does not do alone, and what follows is for the reader to decide.
    fix = f"{finding.fix}; alone that leads to: {follow[0][0]}"
    return replace(finding, changes=(), fix=fix)


def _with_more(finding: Finding, changes: tuple[Change, ...]) -> Finding:
    more = changes[len(finding.changes) :]
    if not more:
        return finding
    return replace(finding, changes=changes, fix=f"{finding.fix}; with it {_listed(more)}")


def applied(settings: Settings, changes: Sequence[Change]) -> Settings | Sequence[rules.Complaint]:
    """The settings after these edits of the file, or why they are no config."""
    values = settings.model_dump(exclude_unset=True)
    for change in changes:
        _put(values, _path(change.key), change.value)
    try:
        after = Settings.model_validate(values)
    except ValidationError as error:
        return [rules.Complaint(item["loc"], item["msg"]) for item in error.errors()]
    return [c for c in rules.check(after) if not c.is_warning] or after


def _path(key: str) -> list[str]:
    for section in _OPEN:
        if key.startswith(section):
            return [*section.rstrip(".").split("."), key.removeprefix(section)]
    return key.split(".")


def _put(values: dict[str, JsonValue], path: Sequence[str], value: JsonValue) -> None:
    *above, last = path
    here = values
    for part in above:
        inner = here.get(part)
        if not isinstance(inner, dict):
            inner = here[part] = {}
        here = inner
    if value is None:
        here.pop(last, None)
    else:
        here[last] = value


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
    name, *path = change.key.removeprefix(EXTRA_ARGS).split(".")
    written = [flag for flag in settings.engine.flags.flags if flag.name == name]
    here = [flag for flag in written if list(flag.path) == path]
    whole = next((flag for flag in written if not flag.path and path), None)
    if whole is not None and not here:
        inside = _inside(settings.engine.flags.mapping(name), path, change.value)
        if inside is not None:
            yield Change(EXTRA_ARGS + whole.key, inside)
            return
    for flag in here:
        if flag.key != change.key.removeprefix(EXTRA_ARGS) or change.value is None:
            yield Change(EXTRA_ARGS + flag.key)
    if change.value is not None or not here:
        yield change


def _inside(
    values: Mapping[str, JsonValue], path: Sequence[str], value: JsonValue
) -> dict[str, JsonValue] | None:
    """A flag's JSON with one key otherwise; None where the key is not in it."""
    key, *deeper = path
    if key not in values:
        return None
    copy = dict(values)
    if deeper:
        inner = copy[key]
        if not isinstance(inner, Mapping):
            return None
        copy[key] = _inside(inner, deeper, value)
        if copy[key] is None:
            return None
    elif value is None:
        del copy[key]
    else:
        copy[key] = value
    return copy


def _along(change: Change, settings: Settings) -> Iterator[Change]:
    """What the rules of the config want to be changed with it."""
    draft, spec = settings.models.draft_model, settings.speculative_decoding
    value, engine = change.value, settings.engine
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
    elif change.key == "engine.node_count" and value is None:
        unset = {
            "engine.node_rank": engine.node_rank,
            "engine.leader_address": engine.leader_address,
        }
        yield from (Change(key) for key, given in unset.items() if given)
    elif change.key == _METHOD:
        yield from _of_other_methods(str(value), settings)
    elif change.key == _OTHER_VOCABULARY and spec.draft_sample_method == "probabilistic":
        yield Change(_SAMPLING, "greedy")


def _of_other_methods(method: str, settings: Settings) -> Iterator[Change]:
    """Keys that the method of before read and this one does not."""
    for key, methods in ONLY_FOR.items():
        if getattr(settings.speculative_decoding, key) is not None and method not in methods:
            yield Change(f"speculative_decoding.{key}")
    if method in WITHOUT_DRAFT and settings.models.draft_model is not None:
        yield Change("models.draft_model")
