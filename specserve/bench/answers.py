"""Are the answers the same? Greedy texts of both arms; the target itself scores what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from pydantic import JsonValue

from specserve.bench.result import Answers, Block
from specserve.engine.canary.corruption import CLEAR_GAP_NATS

Scorer = Callable[[str, str], list[float] | None]
"""(prompt id, text) -> distance of each token to the target's best one, in nats; None if
unknown."""

MAX_CLEAR_SHARE = 0.05
"""Scored text is tokenized anew, which may move a few tokens: a larger share of clear gaps is
corruption."""
MAX_SCORED = 24
EARLY = 0.1
"""An answer that differs within this share of its length differs at once: near-ties are seldom so
early."""
EXCERPT = 80


def common_prefix(a: str, b: str) -> int:
    """Characters that two texts share from the start.

    >>> common_prefix("the cat", "the car")
    6
    """
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def texts(blocks: Sequence[Block]) -> dict[str, str]:
    """Prompt -> answer, from the first block that has one."""
    found: dict[str, str] = {}
    for block in blocks:
        for sample in block.samples:
            if sample.text is not None:
                found.setdefault(sample.prompt_id, sample.text)
    return found


def is_divergent(gaps: Sequence[float]) -> bool:
    """Whether a text is not one that the target would have written greedily, near-ties aside.

    >>> is_divergent([0.0] * 40 + [0.3, 0.1]), is_divergent([0.0, 8.1, 7.5, 0.2])
    (False, True)
    """
    clear = sum(g > CLEAR_GAP_NATS for g in gaps)
    return clear >= 2 and clear > MAX_CLEAR_SHARE * len(gaps)


def compare(
    workload: str, baseline: Sequence[Block], other: Sequence[Block], score: Scorer
) -> Answers | None:
    """Compare the arms' greedy answers at the lowest concurrency; None when no text was kept.

    Strings that differ prove nothing: two right runs part at the first near-tie (vllm-
    project/vllm#7627). So a different answer is scored: a text whose tokens are all (nearly) the
    target's best is a near-tie, one with clear gaps is divergent.
    """
    lowest = min((b.concurrency for b in [*baseline, *other]), default=0)
    first = [b for b in baseline if b.concurrency == lowest]
    theirs = texts([b for b in other if b.concurrency == lowest])
    found = _compare(workload, texts(first), theirs, score, _repeat(first))
    if found is None:
        return None
    return found.model_copy(update={"arm": other[0].arm})


def compare_streaming(
    workload: str, arm: str, whole: Mapping[str, str], streamed: Mapping[str, str], score: Scorer
) -> Answers | None:
    """Compare an arm's streamed answers with its own in one piece; the arm scores what differs."""
    found = _compare(workload, whole, streamed, score, repeated=0)
    if found is None:
        return None
    return found.model_copy(update={"arm": arm, "is_streaming": True, "repeat_differs": None})


def _compare(
    workload: str,
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    score: Scorer,
    repeated: int | None,
) -> Answers | None:
    prompts = sorted(ours.keys() & theirs.keys())
    if not prompts:
        return None
    different = [p for p in prompts if ours[p] != theirs[p]]
    near = divergent = unjudged = 0
    examples: list[dict[str, JsonValue]] = []
    unscored: list[str] = []
    for prompt in different:
        gaps = None
        if near + divergent + unjudged < MAX_SCORED:
            gaps = score(prompt, theirs[prompt])
        if gaps is None:
            unscored.append(prompt)
        elif not is_divergent(gaps):
            near += 1
        elif is_divergent(score(prompt, ours[prompt]) or ()):
            # The trusted text fails as well: not all that was generated is in it (no thoughts).
            unjudged += 1
        else:
            divergent += 1
            examples.append(_example(prompt, ours[prompt], theirs[prompt], gaps))
    early = [p for p in unscored if common_prefix(ours[p], theirs[p]) <= EARLY * len(ours[p])]
    if not near + divergent and _is_widespread(len(early), len(prompts), repeated):
        divergent, unscored = len(early), [p for p in unscored if p not in early]
        examples += [_example(p, ours[p], theirs[p], ()) for p in early]
    shares = [common_prefix(ours[p], theirs[p]) / max(len(ours[p]), 1) for p in different]
    parted = None
    if shares:
        parted = median(shares)
    return Answers(
        workload=workload,
        compared=len(prompts),
        identical=len(prompts) - len(different),
        near_ties=near,
        divergent=divergent,
        unscored=len(unscored) + unjudged,
        repeat_differs=repeated,
        common_prefix_ratio=parted,
        examples=examples[:5],
    )


def _is_widespread(early: int, compared: int, repeated: int | None) -> bool:
    """Without scores: most answers part at once, although the baseline agrees with itself.

    >>> _is_widespread(9, 10, 0), _is_widespread(9, 10, 8), _is_widespread(2, 10, 0)
    (True, False, False)
    """
    return early > compared / 2 and repeated is not None and repeated < compared / 10


def _example(prompt: str, ours: str, theirs: str, gaps: Sequence[float]) -> dict[str, JsonValue]:
    at = common_prefix(ours, theirs)
    return {
        "prompt_id": prompt,
        "common_prefix_characters": at,
        "baseline": ours[at : at + EXCERPT],
        "other": theirs[at : at + EXCERPT],
        "clear_gaps": sum(g > CLEAR_GAP_NATS for g in gaps),
        "tokens": len(gaps),
    }


def _repeat(blocks: Sequence[Block]) -> int | None:
    """Answers of the baseline that differ between its first and last block; None with one block."""
    if len(blocks) < 2:
        return None
    first, last = texts(blocks[:1]), texts(blocks[-1:])
    return sum(first[p] != last[p] for p in first.keys() & last.keys())
