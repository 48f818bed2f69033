"""Are two arms' answers the same? Near-ties are told from corruption by what the target thinks of them."""

from __future__ import annotations

import pytest

from specserve.bench import answers
from specserve.bench.result import Block, Sample


def block(
    texts: dict[str, str], *, arm: str = "off", index: int = 0, concurrency: int = 1
) -> Block:
    samples = [Sample(prompt_id=p, ok=True, output_tokens=8, text=t) for p, t in texts.items()]
    return Block(
        index=index,
        arm=arm,
        workload="w",
        concurrency=concurrency,
        started_seconds=0,
        duration_seconds=1,
        samples=samples,
    )


def prompts(text: str, count: int = 10) -> dict[str, str]:
    return {f"p{i}": text for i in range(count)}


def test_equal_answers_are_identical() -> None:
    """Nothing is scored where nothing differs."""

    def never(prompt: str, text: str) -> list[float] | None:
        pytest.fail("scored")

    found = answers.compare(
        "w", [block(prompts("same"))], [block(prompts("same"), arm="on")], never
    )
    assert found is not None
    assert (found.compared, found.identical, found.divergent) == (10, 10, 0)


@pytest.mark.parametrize(
    ("gaps", "near", "divergent"), [([0.0] * 30 + [0.4], 10, 0), ([9.0] * 20, 0, 10)]
)
def test_a_different_answer_is_scored(gaps: list[float], near: int, divergent: int) -> None:
    """Tokens that the target nearly chose make a near-tie; tokens that it would never choose make corruption."""
    found = answers.compare(
        "w",
        [block(prompts("a b"))],
        [block(prompts("a c"), arm="on")],
        lambda p, t: gaps if t == "a c" else [0.0],
    )
    assert found is not None
    assert (found.near_ties, found.divergent, found.unscored) == (near, divergent, 0)


def test_without_scores_answers_that_part_at_once_are_divergent() -> None:
    """Nonsense in every prompt, while the baseline agrees with itself, needs no scores to be seen."""
    base = [block(prompts("the cat sat")), block(prompts("the cat sat"), index=3)]
    found = answers.compare(
        "w", base, [block(prompts("\u25a1\u25a1"), arm="on")], lambda p, t: None
    )
    assert found is not None
    assert (found.divergent, found.unscored, found.repeat_differs) == (10, 0, 0)
    assert found.examples[0]["common_prefix_characters"] == 0


def test_without_scores_late_differences_are_unknown() -> None:
    """An answer that parts late is neither right nor wrong until somebody scores it."""
    base = [
        block(prompts("a long answer that goes on")),
        block(prompts("a long answer that goes on"), index=3),
    ]
    found = answers.compare(
        "w", base, [block(prompts("a long answer that ends"), arm="on")], lambda p, t: None
    )
    assert found is not None
    assert (found.divergent, found.unscored) == (0, 10)


def test_a_baseline_that_differs_from_itself_proves_nothing() -> None:
    """When the baseline's own blocks part as often, the other arm is not blamed."""
    base = [block(prompts("one")), block(prompts("two"), index=3)]
    found = answers.compare("w", base, [block(prompts("six"), arm="on")], lambda p, t: None)
    assert found is not None
    assert (found.divergent, found.unscored, found.repeat_differs) == (0, 10, 10)


def test_only_the_lowest_concurrency_counts() -> None:
    """Batches of other sizes flip near-ties; answers are compared where the batch is smallest."""
    base = [block(prompts("x")), block(prompts("y"), concurrency=16)]
    on = [block(prompts("x"), arm="on"), block(prompts("z"), arm="on", concurrency=16)]
    found = answers.compare("w", base, on, lambda p, t: [9.0] * 9)
    assert found is not None
    assert (found.identical, found.divergent) == (10, 0)


def test_without_texts_there_is_no_comparison() -> None:
    """A sampled workload keeps no answers, and nothing is claimed."""
    empty = block({}).model_copy(update={"samples": [Sample(prompt_id="p", ok=True)]})
    assert answers.compare("w", [empty], [empty], lambda p, t: None) is None


def test_streamed_answers_are_compared_with_the_same_in_one_piece() -> None:
    """An arm that streams other texts than it gives in one piece is divergent, whatever the other arm does."""
    whole = {f"p{i}": "the cat sat" for i in range(4)}
    found = answers.compare_streaming(
        "w", "on", whole, dict.fromkeys(whole, "\u25a1\u25a1"), lambda p, t: None
    )
    assert found is not None
    assert (found.arm, found.compared, found.divergent, found.common_prefix_ratio) == (
        "on",
        4,
        4,
        0.0,
    )
    same = answers.compare_streaming("w", "on", whole, whole, lambda p, t: None)
    assert same is not None
    assert (same.identical, same.divergent, same.common_prefix_ratio) == (4, 0, None)


def test_a_scorer_that_condemns_the_baseline_too_judges_nobody() -> None:
    """Where a text is not all that was generated (a reasoning model), even the target's own fails: nothing is said."""
    base = [block(prompts("four")), block(prompts("four"), index=3)]
    found = answers.compare("w", base, [block(prompts("five"), arm="on")], lambda p, t: [9.0] * 9)
    assert found is not None
    assert (found.near_ties, found.divergent, found.unscored) == (0, 0, 10)
