"""The pages: links lead somewhere, and the commands they show exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
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


def run_docs(script: Path, *options: str) -> tuple[int, str]:
    """`scripts/docs` of one tree: its exit code and what it says."""
    argv = [sys.executable, str(script), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_what_is_made_from_the_code_is_fresh() -> None:
    """Pages and schemas follow from the tables, the settings and values.yaml as they are now."""
    assert run_docs(ROOT / "scripts/docs", "--check") == (0, "")


def test_a_stale_page_is_named_and_written_again(tmp_path: Path) -> None:
    """`scripts/docs --check` names what does not follow from the code, and the command that mends it."""
    for folder in ("docs", "helm/specserve"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "scripts").mkdir()
    script = Path(shutil.copy(ROOT / "scripts/docs", tmp_path / "scripts"))
    page = tmp_path / "docs/metrics.md"
    page.write_text(page.read_text() + "by hand\n")
    (tmp_path / "helm/specserve/values.schema.json").unlink()
    stale = ["docs/metrics.md", "helm/specserve/values.schema.json"]
    says = "".join(f"{name} is stale; run scripts/docs\n" for name in stale)
    assert run_docs(script, "--check") == (1, says)
    assert run_docs(script) == (0, "".join(f"wrote {name}\n" for name in stale))
    for name in stale:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
