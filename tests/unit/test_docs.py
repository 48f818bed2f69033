"""The pages: links lead somewhere, and the commands they show exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from specserve import cli

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "helm/specserve/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
BLOCK = re.compile(r"^```\n(.*?)^```", re.M | re.S)
COMMAND = re.compile(r"^(?:\$ )?(specserve [^#\n&]*)", re.M)


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, as GitHub makes it."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that is there and a heading that it has."""
    for target, anchor in LINK.findall(page.read_text()):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """Every command that a page shows is one of ours, with options it has."""
    text = page.read_text()
    shown = [line for block in BLOCK.findall(text) for line in COMMAND.findall(block)]
    for line in [*shown, *re.findall(r"`(specserve [^`]*)`", text)]:
        _, *words = shlex.split(line.replace("\\|", " "))
        command: click.Command = cli.program
        while words and isinstance(command, click.Group):
            known = [
                command.commands[name] for name in words[0].split("|") if name in command.commands
            ]
            assert known, line
            command = known[0]
            words = words[1:]
        options = {name for param in command.params for name in param.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, line
