"""Whether text made under speculation is the target's own. Pure: from tokens and scores to a
reason, or None.

The reference is the same server: a completion of one token is never drafted, so asking for one
token after each prefix of a text says what the target would have written there. Equality of strings
is no test: two correct runs part at the first near-tie (vllm-project/vllm#7627, #26679).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specserve.engine.http.transport import TokenScore

FALSE_ALARM = 1e-5
"""Probability with which a correct sampler is called corrupt."""
CLEAR_GAP_NATS = 2.0
"""A greedy token this far below the best one is no near-tie: bfloat16 moves a logit by tenths."""
CLEAR_GAPS = 3
"""So many clear gaps in one greedy text are no accident."""


@dataclass(frozen=True)
class Judged:
    """One text, token by token, against the same server without drafts."""

    drafted: tuple[int, ...]
    """The tokens made under speculation."""
    greedy: tuple[int, ...]
    """The target's first choice after the same prefix."""
    sampled: tuple[int, ...] = ()
    """A token sampled without drafts after the same prefix, with the same settings; empty for a
    greedy text.
    """


def disagreement(texts: Sequence[Judged]) -> float:
    """The probability that a correct sampler agrees with the first choices as rarely as the drafted
    texts do.

    After each prefix, drafted and undrafted token come from one distribution when the sampler is
    right, so where only one of the two is the first choice, it is a fair coin which (McNemar's
    exact test, one-sided). It needs no calibration: a model with flat distributions, however weak,
    gives a large value.

    >>> broken = Judged(drafted=(9,) * 20, greedy=(1,) * 20, sampled=(1,) * 20)
    >>> disagreement([broken]), disagreement([Judged((1,), (1,), (1,))])
    (9.5367431640625e-07, 1.0)
    """
    rows = [row for t in texts for row in zip(t.drafted, t.greedy, t.sampled, strict=True)]
    missed = sum(drafted != first == sampled for drafted, first, sampled in rows)
    hit = sum(drafted == first != sampled for drafted, first, sampled in rows)
    n = missed + hit
    return math.fsum(math.comb(n, k) / 2**n for k in range(missed, n + 1))


def sampled_reason(texts: Sequence[Judged]) -> str | None:
    """Why the sampled texts are corrupt; None when they may be right."""
    if disagreement(texts) >= FALSE_ALARM:
        return None
    drafted = sum(a == b for t in texts for a, b in zip(t.drafted, t.greedy, strict=True))
    alone = sum(a == b for t in texts for a, b in zip(t.sampled, t.greedy, strict=True))
    total = sum(len(t.drafted) for t in texts)
    return (
        f"sampled text is not the target's: {drafted} of {total} tokens are its first choice, "
        f"without drafts {alone} of {total}"
    )


def suspicious(text: Judged) -> bool:
    """Whether a greedy text leaves the target's first choices often enough to measure the gaps.

    >>> suspicious(Judged((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 9)))
    False
    """
    missed = sum(a != b for a, b in zip(text.drafted, text.greedy, strict=True))
    return missed >= CLEAR_GAPS and missed >= 0.1 * len(text.drafted)


def greedy_reason(gaps: Sequence[float]) -> str | None:
    """Why a greedy text is corrupt, from each token's distance to the best one in nats.

    >>> greedy_reason([0.0, 0.1, 0.0, 0.3]), greedy_reason([0.0, 7.5, 9.0, 8.1])
    (None, "greedy text is not the target's: 3 of 4 tokens are clearly not its first choice")
    """
    clear = sum(gap > CLEAR_GAP_NATS for gap in gaps)
    if clear < CLEAR_GAPS:
        return None
    return (
        f"greedy text is not the target's: {clear} of {len(gaps)} tokens "
        "are clearly not its first choice"
    )


def gaps(tokens: Sequence[int], scores: Sequence[Mapping[str, TokenScore] | None]) -> list[float]:
    """Distance of each token to the best one in nats, from vLLM's ``prompt_logprobs`` at the same
    places.
    """
    found = []
    for token, row in zip(tokens, scores, strict=True):
        if row and str(token) in row:
            best = max(score["logprob"] for score in row.values())
            found.append(best - row[str(token)]["logprob"])
    return found


def collapse_reason(
    greedy_position0: float | None, sampled_position0: float | None, sampled_drafts: float
) -> str | None:
    """Without tokens to compare: drafts that the greedy text accepts and a cool sampled text never
    does.

    >>> collapse_reason(0.9, 0.01, 40)
    'acceptance at position 0 falls from 90.0 % in greedy text to 1.0 % in sampled text'
    """
    if greedy_position0 is None or sampled_position0 is None or sampled_drafts < 10:
        return None
    if greedy_position0 < 0.3 or sampled_position0 > 0.1 * greedy_position0:
        return None
    return (
        f"acceptance at position 0 falls from {greedy_position0:.1%} in greedy text "
        f"to {sampled_position0:.1%} in sampled text"
    ).replace("%", " %")


def unprintable_reason(text: str) -> str | None:
    """Without tokens to compare: a text with more than a tenth of characters that nobody writes.

    >>> unprintable_reason("\\ufffd\\x07 }\\ufffd"), unprintable_reason("héllo 你好 🙂 done")
    ('3 of 5 characters are unprintable', None)
    """
    bad = sum(
        c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Cn", "Co") and c not in "\n\r\t")
        for c in text
    )
    if bad > 0.1 * len(text):
        return f"{bad} of {len(text)} characters are unprintable"
    return None


def looping(text: str) -> str | None:
    """The character or short piece that a whole text repeats, six times at least; None for a text
    that goes on.

    >>> (looping("!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!"), looping("one, two, three, four, five, six, "
    ...  "seven"))
    ('!', None)
    >>> looping("the the the the the the the")
    'the '
    """
    body = text.strip() + " "
    pieces = (body[:n] for n in range(1, 9) if len(body) >= max(24, 6 * n))
    return next((p for p in pieces if (p * len(body)).startswith(body.rstrip())), None)


def is_other_script(text: str) -> bool:
    """Whether most letters are not Latin ones, as they are in the answer to an English prompt.

    >>> (is_other_script(" four, five, six"), is_other_script("\u56db\uff0c\u4e94, six"),
    ...  is_other_script("4, 5"))
    (False, False, False)
    >>> is_other_script("\u56db\uff0c\u4e94\uff0c\u516d")
    True
    """
    letters = [c for c in text if c.isalpha()]
    return 2 * sum("LATIN" in unicodedata.name(c, "") for c in letters) < len(letters)
