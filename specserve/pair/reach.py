"""What a head with a pruned vocabulary can draft at all: its share of the target's tokens, and of a
text's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from specserve.checkpoint import tokenizer as tokenizer_files
from specserve.checkpoint.facts import ModelFacts
from specserve.checkpoint.safetensors import Corrupt
from specserve.checkpoint.tokenizer import MissingLibrary, NotEncodable
from specserve.files import read_small
from specserve.findings import Finding
from specserve.pair import d2t
from specserve.pair.head_shapes import head_of
from specserve.pair.vocabulary import vocab_size
from specserve.units import percent

DRAFT = "models.draft_model.path"
_ENOUGH = 0.9
"""Below this share of a text's tokens a head is better replaced: each other one ends a draft."""


def rows_of(head: ModelFacts) -> int | None:
    """Tokens that a head drafts from; None where it states no vocabulary of its own."""
    return head_of(head).number("draft_vocab_size", "truncated_vocab_size")


def check(target: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    """The head's share of the target's vocabulary, wherever it is not all of it."""
    rows, ours = rows_of(draft), vocab_size(target)
    if rows is None or ours is None or not 0 < rows < ours:
        return
    message = (
        f"the head drafts from {rows:,} of the target's {ours:,} tokens ({percent(rows / ours)}); "
        "a draft ends before any other token"
    )
    fix = "specserve check CONFIG --sample FILE counts those in a text like yours"
    yield Finding("head-reach", "info", DRAFT, message, fix)


def of_sample(target: ModelFacts, draft: ModelFacts, path: Path) -> Iterator[Finding]:
    """The share of a text's tokens that the head can draft."""
    try:
        text = read_small(path)
    except (OSError, UnicodeDecodeError) as e:
        message = f"the sample was not counted: it cannot be read as UTF-8 text ({e})"
        yield Finding("head-sample", "warning", str(path), message)
        return
    rows, ours = rows_of(draft), vocab_size(target)
    if rows is None or ours is None or rows >= ours:
        message = "the draft has the target's whole vocabulary; every token can be drafted"
        yield Finding("head-sample", "info", str(path), message)
        return
    reached = d2t.targets(draft)
    try:
        tokenizer = tokenizer_files.load(target)
        if reached is None or tokenizer is None:
            what = "the head's d2t table"
            if reached is not None:
                what = "the target's tokenizer"
            raise NotEncodable(f"{what} cannot be read")
        ids = tokenizer_files.encoder(tokenizer)(text)
    except (Corrupt, MissingLibrary, NotEncodable) as e:
        yield Finding("head-sample", "warning", str(path), f"the sample was not counted: {e}")
        return
    if not ids:
        yield Finding("head-sample", "warning", str(path), "the sample holds no token")
        return
    share = sum(i in reached for i in ids) / len(ids)
    message = f"{percent(share)} of its {len(ids):,} tokens are within the head's reach"
    if share >= _ENOUGH:
        yield Finding("head-sample", "info", str(path), message)
        return
    message += f"; about every {max(1, round(1 / (1 - share)))}. token ends a draft"
    fix = "use a head with a larger vocabulary, or one that was pruned for this language"
    yield Finding("head-sample", "warning", str(path), message, fix)
