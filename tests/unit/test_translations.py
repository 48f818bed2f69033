"""The Chinese pages: kept in step with the English ones, command by command and heading by heading."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = {
    ROOT / "README.md": ROOT / "README.zh-CN.md",
    **{ROOT / "docs" / path.name: path for path in (ROOT / "docs/zh-CN").glob("*.md")},
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`([^`]+)`")
HAN = re.compile(r"[\u4e00-\u9fff]")


def levels(text: str) -> list[int]:
    """The levels of all headings, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", FENCE.sub("", text), re.M)]


def blocks(text: str) -> list[str]:
    """All code, in order, without its comments."""
    return [re.sub(r" *#.*$", "", block, flags=re.M) for _, block in FENCE.findall(text)]


def inline(text: str) -> Counter[str]:
    """All code inside sentences."""
    return Counter(" ".join(part.split()) for part in INLINE.findall(FENCE.sub("", text)))


def numbers(text: str) -> list[str]:
    """Figures in tables, in order."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return re.findall(r"\d+\.\d+", " ".join(rows))


@pytest.fixture(params=PAIRS, ids=lambda path: path.name)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A page in English and in Chinese."""
    return request.param.read_text(), PAIRS[request.param].read_text()


def test_the_chapters_are_the_same(pair: tuple[str, str]) -> None:
    """A heading that one language has, the other has in the same place."""
    english, chinese = pair
    assert levels(chinese) == levels(english)


def test_the_code_is_the_same(pair: tuple[str, str]) -> None:
    """Commands, config and output; only comments are translated."""
    english, chinese = pair
    assert blocks(chinese) == blocks(english)


def test_headings_and_text_are_chinese(pair: tuple[str, str]) -> None:
    """Every heading but the name of the project."""
    _, chinese = pair
    for title in re.findall(r"^#+ (.*)$", FENCE.sub("", chinese), re.M):
        assert HAN.search(title) or title == "specserve"


@pytest.mark.parametrize("name", ["choose", "how-it-works", "troubleshoot"])
def test_code_in_sentences_and_figures_are_the_same(name: str) -> None:
    """Keys, commands, messages and numbers of the guides: none is lost, none is added."""
    english = (ROOT / f"docs/{name}.md").read_text()
    chinese = (ROOT / f"docs/zh-CN/{name}.md").read_text()
    assert inline(chinese) == inline(english)
    assert numbers(chinese) == numbers(english)


def test_both_readmes_lead_to_each_other() -> None:
    """Whoever lands on one finds the other."""
    assert "(README.zh-CN.md)" in (ROOT / "README.md").read_text()
    assert "(README.md)" in (ROOT / "README.zh-CN.md").read_text()
