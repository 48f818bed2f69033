"""Do both models mean the same by the same id? Token by token, since equal sizes prove nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specserve.checkpoint import encoding
from specserve.checkpoint import tokenizer as tokenizer_files
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.safetensors import Corrupt
from specserve.checkpoint.tokenizer import MissingLibrary, NotEncodable, NotRead, Tokenizer
from specserve.errors import Change
from specserve.findings import Finding
from specserve.units import percent

DRAFT = "models.draft_model.path"
_ALLOW = Change("speculative_decoding.use_heterogeneous_vocab", True)
SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs; it cost $4.20 (really!).",
    "def f(x: int) -> str:\n    return f\"{x:>8}\\t\" if x else ''\n",
    "Größe, naïve façade, l'été, señor, Øre, žluťoučký kůň.",
    "Съешь ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "我们在北京学习人工智能。 日本語の文章です。 한국어 문장입니다.",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם. नमस्ते दुनिया। สวัสดีชาวโลก",
    "E = mc², ∑ᵢ xᵢ ≥ 0, 🙂👩‍🚀, a\u0301 ﬁ ½ \u00a0\u200b \r\n\t  trailing  ",
)
"""What both tokenizers encode: prose, code, accents, Cyrillic, Greek, CJK, right-to-left, symbols,
white space.
"""

Relation = Literal["identical", "added", "different"]
_ROLES = ("bos_token", "eos_token", "pad_token")
_MAX_LISTED = 5


@dataclass(frozen=True)
class Comparison:
    """Two vocabularies side by side."""

    target_tokens: int
    draft_tokens: int
    same_file: bool
    equal_tokens: int
    """Tokens of the target that the draft has under the same id."""
    ordinary_differences: tuple[tuple[int, str | None, str | None], ...] = ()
    """The first ids whose ordinary token differs: id, target's token, draft's token."""
    ordinary_difference_count: int = 0
    added_differences: tuple[str, ...] = ()
    """Added or reserved tokens that only one has, or that have different ids."""
    rule_differences: tuple[str, ...] = ()
    """Parts of tokenizer.json that differ: normalizer, pre_tokenizer, merges, model."""
    sample_differs_at: int | None = None
    """Index of the first line of SAMPLE that encodes to different ids."""
    not_encoded: str | None = None
    """Why SAMPLE could not be encoded by both; None when it was, or needed not to be."""

    @property
    def relation(self) -> Relation:
        """The closest description."""
        if self.ordinary_difference_count:
            return "different"
        if self.added_differences:
            return "added"
        return "identical"

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        unknown = self.ordinary_difference_count or self.not_encoded
        return {
            "relation": self.relation,
            "target_tokens": self.target_tokens,
            "draft_tokens": self.draft_tokens,
            "equal_tokens": self.equal_tokens,
            "ordinary_differences": self.ordinary_difference_count,
            "added_differences": list(self.added_differences),
            "rule_differences": list(self.rule_differences),
            "sample_identical": None if unknown else self.sample_differs_at is None,
        }


def compare(target: Tokenizer, draft: Tokenizer) -> Comparison:
    """Compare maps, rules and the encoding of SAMPLE. Identical files need no further look."""
    if target.digest == draft.digest:
        return Comparison(target.size, draft.size, same_file=True, equal_tokens=target.size)
    ordinary, count = _ordinary(target, draft)
    rules = tuple(
        part
        for part in target.rules
        if part in draft.rules and target.rules[part] != draft.rules[part]
    )
    same_rules = target.kind == draft.kind and bool(target.rules) and not rules
    needless = count or same_rules  # the sample would only repeat what the maps already say
    if needless:
        differs_at, not_encoded = (None, None)
    else:
        differs_at, not_encoded = _sample(target, draft)
    added = _added(target, draft)
    unequal = count + sum(token in target.added or token in target.base for token in added)
    return Comparison(
        target.size,
        draft.size,
        same_file=False,
        equal_tokens=max(0, target.size - unequal),
        ordinary_differences=tuple(ordinary),
        ordinary_difference_count=count,
        added_differences=added,
        rule_differences=rules,
        sample_differs_at=differs_at,
        not_encoded=not_encoded,
    )


def _ordinary(
    target: Tokenizer, draft: Tokenizer
) -> tuple[list[tuple[int, str | None, str | None]], int]:
    """Ids that mean another token to each, where at least one of the two is an ordinary token."""
    if target.base == draft.base and target.added == draft.added:
        return [], 0
    ours, theirs = _by_id(target), _by_id(draft)
    wrong = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
    wrong = sorted(
        i for i in wrong if _is_ordinary(target, ours.get(i)) or _is_ordinary(draft, theirs.get(i))
    )
    return [(i, ours.get(i), theirs.get(i)) for i in wrong[:_MAX_LISTED]], len(wrong)


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: t for t, i in (*tokenizer.base.items(), *tokenizer.added.items())}


def _is_ordinary(tokenizer: Tokenizer, token: str | None) -> bool:
    return token is not None and token not in tokenizer.added and not _looks_reserved(token)


def _looks_reserved(token: str) -> bool:
    """Whether a token of the base vocabulary is a placeholder or control token.

    >>> [_looks_reserved(t) for t in ("<unused12>", "<|reserved_7|>", "[PAD3]", "<a>", "the")]
    [True, True, True, False, False]
    """
    return (token.startswith("<|") and token.endswith("|>")) or token.startswith(
        (
            "<unused",
            "[unused",
            "<reserved",
            "<extra_id",
            "[PAD",
            "<SPECIAL_",
            "<special_",
            "▁<unused",
        )
    )


def _added(target: Tokenizer, draft: Tokenizer) -> tuple[str, ...]:
    def id_in(tokenizer: Tokenizer, token: str) -> int | None:
        return tokenizer.added.get(token, tokenizer.base.get(token))

    names = target.added.keys() | draft.added.keys()
    return tuple(sorted(t for t in names if id_in(target, t) != id_in(draft, t)))


def _sample(target: Tokenizer, draft: Tokenizer) -> tuple[int | None, str | None]:
    """Index of the first line with different ids, or why not both could encode it."""
    try:
        ours, theirs = encoding.encode([target, draft], SAMPLE).ids
    except NotEncodable as e:
        return None, str(e)
    return next((i for i in range(len(SAMPLE)) if ours[i] != theirs[i]), None), None


def overlap_ratio(target: Tokenizer, draft: Tokenizer) -> float | None:
    """Part of the draft's tokens that the target has too, after space marks are made equal.

    vLLM's ``vocab_mapping.py`` (0.32, read 2026-11-29) makes the same intersection. None for an
    empty vocabulary.
    """
    shared = _normalised(target), _normalised(draft)
    if shared[1]:
        return len(shared[0] & shared[1]) / len(shared[1])
    return None


def _normalised(tokenizer: Tokenizer) -> set[str]:
    marks = tokenizer.space_prefix()
    words = {*tokenizer.base, *tokenizer.added}
    return {" " + w[1:] if w.startswith(marks) else w for w in words}


@dataclass(frozen=True)
class Verdict:
    """What the vocabularies say about a pair."""

    findings: tuple[Finding, ...]
    comparison: Comparison | None = None
    overlap: float | None = None

    @property
    def was_compared(self) -> bool:
        """Whether both vocabularies could be read and were compared."""
        return self.comparison is not None or self.overlap is not None


def check(
    target: ModelFacts,
    draft: ModelFacts,
    *,
    heterogeneous: bool,
    is_head: bool,
    floor: float,
) -> Verdict:
    """Every finding about the two vocabularies.

    A head (EAGLE and alike) often ships no tokenizer; then its vocabulary is known from its shapes
    alone.
    """
    ours, problems = _open(target, "models.target_model.path")
    theirs, more = _open(draft, DRAFT)
    problems += more
    if is_head and theirs is None:
        return Verdict(tuple(p for p in problems if p.code != "tokenizer-missing"))
    if ours is None or theirs is None:
        if heterogeneous:
            return Verdict(tuple(problems))
        return Verdict((*problems, *_sizes(target, draft, None)))
    try:
        if heterogeneous:
            return _heterogeneous(target, draft, ours, theirs, floor)
        comparison = compare(ours, theirs)
    except Corrupt as e:
        return Verdict((*problems, _unreadable(DRAFT, str(e))))
    allowed: tuple[Change, ...] = ()
    if not is_head and not _refusals(_heterogeneous(target, draft, ours, theirs, floor)):
        allowed = (_ALLOW,)
    found = [
        *_sizes(target, draft, comparison, allowed),
        *_tokens(comparison, allowed),
        *_rules(comparison),
        *([] if comparison.ordinary_difference_count else _special(target, draft)),
    ]
    return Verdict((*problems, *found), comparison)


def _open(facts: ModelFacts, where: str) -> tuple[Tokenizer | None, list[Finding]]:
    try:
        tokenizer = tokenizer_files.load(facts)
    except MissingLibrary as e:
        message = (
            f"the tokenizer needs the {e} library, which is not installed; "
            "the vocabulary was not compared"
        )
        fix = "pip install 'specserve[vocab]'"
        return None, [Finding("tokenizer-unreadable", "warning", where, message, fix)]
    except NotRead as e:
        message = f"the tokenizer file {e}; the vocabulary was not compared"
        return None, [Finding("tokenizer-unreadable", "warning", where, message)]
    except Corrupt as e:
        return None, [_unreadable(where, str(e))]
    if tokenizer is None:
        message = f"{facts.path} holds no tokenizer file; the vocabulary was not compared"
        return None, [
            Finding(
                "tokenizer-missing",
                "warning",
                where,
                message,
                "copy tokenizer.json beside config.json",
            )
        ]
    return tokenizer, []


def _unreadable(where: str, reason: str) -> Finding:
    message = f"the tokenizer file {reason}; the vocabulary cannot be compared"
    return Finding("tokenizer-corrupt", "error", where, message, "download the tokenizer again")


def vocab_size(facts: ModelFacts) -> int | None:
    """``vocab_size`` of the language model; None when config.json has none."""
    n = facts.text_config.get("vocab_size", facts.config.get("vocab_size"))
    if type(n) is int and n > 0:
        return n
    return None


def _refusals(verdict: Verdict) -> list[Finding]:
    return [f for f in verdict.findings if f.severity == "error"]


def _or_allow(fix: str, allowed: tuple[Change, ...]) -> str:
    """Another draft, or the switch for other vocabularies where it would help."""
    return ", or ".join([fix, *map(str, allowed)])


def _sizes(
    target: ModelFacts,
    draft: ModelFacts,
    comparison: Comparison | None,
    allowed: tuple[Change, ...] = (),
) -> Iterator[Finding]:
    ours, theirs = vocab_size(target), vocab_size(draft)
    if ours is None or theirs is None or ours == theirs:
        return
    fix = _or_allow("use a draft of the same vocab_size", allowed)
    head = f"config.json says vocab_size {ours} for the target and {theirs} for the draft"
    if comparison is not None and comparison.relation in ("identical", "added"):
        message = (
            f"{head}; the tokenizers match and only the padding differs, but vLLM wants equal sizes"
        )
        yield Finding("vocab-size-padding", "error", DRAFT, message, fix, allowed)
    else:
        message = f"{head}; they must be equal"
        yield Finding("vocab-size", "error", DRAFT, message, fix, allowed)


def _tokens(comparison: Comparison, allowed: tuple[Change, ...]) -> Iterator[Finding]:
    if comparison.ordinary_difference_count:
        shown = ", ".join(
            f"{i}: {_quote(a)} / {_quote(b)}" for i, a, b in comparison.ordinary_differences
        )
        message = (
            f"{comparison.ordinary_difference_count} ids mean different tokens (target / draft: "
            f"{shown}); "
            "every id must mean the same to both"
        )
        fix = _or_allow("use a draft of the target's own family", allowed)
        yield Finding("vocab-tokens", "error", DRAFT, message, fix, allowed)
    elif comparison.added_differences:
        listed = ", ".join(comparison.added_differences[:_MAX_LISTED])
        more = len(comparison.added_differences) - _MAX_LISTED
        message = (
            f"ordinary tokens are identical, added tokens differ: "
            f"{listed}{f' and {more} more' if more > 0 else ''}; "
            "the draft cannot propose them"
        )
        yield Finding(
            "vocab-added-tokens",
            "warning",
            DRAFT,
            message,
            "check the acceptance rate on chat and tool calls",
        )


def _quote(token: str | None) -> str:
    if token is None:
        return "nothing"
    return repr(token[:40])


def _rules(comparison: Comparison) -> Iterator[Finding]:
    if comparison.ordinary_difference_count or not (
        comparison.rule_differences
        or comparison.sample_differs_at is not None
        or comparison.not_encoded
    ):
        return
    parts = ", ".join(comparison.rule_differences) or "the tokenizers' rules"
    if comparison.not_encoded:
        message = (
            "the maps are identical; the sample text was not encoded with "
            f"both: {comparison.not_encoded}"
        )
        yield Finding("tokenizer-rules", "info", DRAFT, message)
        return
    if comparison.sample_differs_at is None:
        message = (
            f"the maps are identical, {parts} differ; the built-in sample encodes to the same ids"
        )
        yield Finding("tokenizer-rules", "info", DRAFT, message)
        return
    line = SAMPLE[comparison.sample_differs_at][:30]
    message = (
        f"the maps are identical, {parts} differ: {line!r}... encodes to other "
        "ids; the draft was trained on text split differently"
    )
    yield Finding(
        "tokenizer-rules", "warning", DRAFT, message, "use the draft that was made for this target"
    )


def _special(target: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    differences = []
    for role in _ROLES[:2]:
        ours, theirs = (
            _text(target.tokenizer_config.get(role)),
            _text(draft.tokenizer_config.get(role)),
        )
        if ours and theirs and ours != theirs:
            differences.append(f"{role} {ours!r} / {theirs!r}")
    ours_stop, theirs_stop = stop_ids(target), stop_ids(draft)
    if theirs_stop and set(ours_stop) - set(theirs_stop):
        differences.append(f"stop ids {ours_stop} / {theirs_stop}")
    if differences:
        message = (
            f"special tokens differ (target / draft): {'; '.join(differences)}; "
            "the draft ends its turns differently"
        )
        fix = "use a draft tuned with the target's chat format"
        yield Finding("special-tokens", "warning", DRAFT, message, fix)
    if (
        target.chat_template
        and draft.chat_template
        and target.chat_template.strip() != draft.chat_template.strip()
    ):
        message = (
            "the chat templates differ; a draft tuned on another format is accepted less often"
        )
        fix = "measure acceptance through /v1/chat/completions"
        yield Finding("chat-template", "warning", DRAFT, message, fix)


def _text(token: Any) -> str | None:
    if isinstance(token, Mapping):
        value = token.get("content")
    else:
        value = token
    if isinstance(value, str):
        return value
    return None


def stop_ids(facts: ModelFacts) -> list[int]:
    """End-of-sequence ids that the engine stops at: generation_config.json, else config.json."""
    for value in (
        facts.generation_config.get("eos_token_id"),
        facts.text_config.get("eos_token_id"),
    ):
        if isinstance(value, list):
            ids = value
        else:
            ids = [value]
        if found := sorted({i for i in ids if type(i) is int}):
            return found
    return []


def _heterogeneous(
    target: ModelFacts, draft: ModelFacts, ours: Tokenizer, theirs: Tokenizer, floor: float
) -> Verdict:
    ratio, where = overlap_ratio(ours, theirs), "speculative_decoding.use_heterogeneous_vocab"
    found = []
    if ratio is not None and ratio < floor:
        message = (
            f"target and draft share {percent(ratio)} of the draft's tokens; "
            f"must be at least {percent(floor)}"
        )
        fix = (
            "use a draft of a closer family, or lower speculative_decoding.min_vocab_overlap_ratio"
        )
        found.append(Finding("vocab-overlap", "error", where, message, fix))
    elif ratio is not None and ratio < 0.9:
        message = (
            f"target and draft share {percent(ratio)} of the draft's "
            "tokens; the rest can never be drafted"
        )
        found.append(
            Finding(
                "vocab-overlap", "warning", where, message, "measure acceptance before rolling out"
            )
        )
    for facts, name in ((target, "target"), (draft, "draft")):
        if not any(_text(facts.tokenizer_config.get(role)) for role in ("unk_token", "eos_token")):
            message = (
                f"the {name}'s tokenizer_config.json names neither unk_token nor "
                "eos_token; vLLM needs one to map to"
            )
            found.append(
                Finding(
                    "vocab-no-fallback",
                    "error",
                    where,
                    message,
                    "add eos_token to tokenizer_config.json",
                )
            )
    return Verdict(tuple(found), overlap=ratio)
