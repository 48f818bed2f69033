"""The pages: what they show exists, and what is made from the code is fresh."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml

from specserve import __version__, cli
from specserve.config.schema import Settings

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    ROOT / "helm/specserve/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMANDS = "|".join(cli.program.commands)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
COMMAND = re.compile(
    r"""(?: ^\s* (?:\$\ )? (?:[A-Z_]+=\S*\ )* | \|\ | &&\ | ;\ | \ --\ | \$\( )
        (specserve\ [^#\n&;)]*)""",
    re.M | re.X,
)
MENTION = re.compile(rf"\bspecserve (?:{COMMANDS})\b")
PATH = re.compile(
    r"(?<![\w./:-])(?:\.github|configs|docs|helm|k8s|scripts|specserve|tests)/[\w./-]*\w"
)


class Found(NamedTuple):
    """Something that a page shows."""

    page: Path
    text: str


def found(find: Callable[[str], Iterable[str]]) -> list[object]:
    """A parameter for everything that is found on any page."""
    out = []
    for page in PAGES:
        for text in dict.fromkeys(find(page.read_text())):
            name = f"{page.relative_to(ROOT)}: {text[:60]}"
            out.append(pytest.param(Found(page, text), id=name))
    return out


def code(text: str) -> list[str]:
    """Every block of code of a page, whatever its language, and all code inside sentences."""
    blocks = [block for _, _, block in FENCE.findall(text)]
    inline = INLINE.findall(FENCE.sub("", text))
    return [*blocks, *(" ".join(part.split()) for part in inline)]


def commands(text: str) -> list[str]:
    """Every command line of ours on a page, lines that go on behind a backslash as one."""
    shown = []
    for part in code(text):
        for line in COMMAND.findall(part.replace("\\\n", " ")):
            shown.append(line.replace("\\|", "|").strip())
    return shown


def links(text: str) -> list[str]:
    """Every link of a page that stays in this repository."""
    return [f"{target}#{anchor}".removesuffix("#") for target, anchor in LINK.findall(text)]


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, as GitHub makes it."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


SAMPLE = """
Run `specserve check a.yaml` or, over two
lines, `specserve plan
a.yaml`, [or](#not-here) see [that](other.md#there) and [this](https://example.org).

```bash
A=1 specserve launch a.yaml &   # ours
kubectl exec pod -c engine -- specserve status
curl -s url | specserve report - \\
  --format html
```

1. Indented:

   ```
   $ specserve probe ready
   kubectl -n specserve get pods
   ```
"""


def test_what_a_page_shows_is_found() -> None:
    """In sentences, over lines, in blocks with a language, indented, behind a prompt, a pipe or a program."""
    assert sorted(commands(SAMPLE)) == [
        "specserve check a.yaml",
        "specserve launch a.yaml",
        "specserve plan a.yaml",
        "specserve probe ready",
        "specserve report -    --format html",
        "specserve status",
    ]
    assert links(SAMPLE) == ["#not-here", "other.md#there"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_is_overlooked(page: Path) -> None:
    """Whatever looks like a command of ours in the code of a page is taken for one."""
    text = page.read_text()
    mentioned = sum(len(MENTION.findall(part)) for part in code(text))
    looked_at = sum(len(MENTION.findall(line)) for line in commands(text))
    assert looked_at == mentioned


@pytest.mark.parametrize("link", found(links))
def test_links_lead_somewhere(link: Found) -> None:
    """A relative link names a file that is there and a heading that it has."""
    target, _, anchor = link.text.partition("#")
    path = link.page
    if target:
        path = (link.page.parent / target).resolve()
    assert path.exists()
    if anchor:
        assert anchor in anchors(path)


@pytest.mark.parametrize("path", found(PATH.findall))
def test_paths_exist(path: Found) -> None:
    """A file or folder of this repository that a page names is there."""
    near = [ROOT / path.text, path.page.parent / path.text]
    assert any(each.exists() for each in near)


def config_fragments(text: str) -> list[str]:
    """Every block of YAML that shows keys of the config, by themselves or as the chart's `config`."""
    fragments = []
    for _, language, block in FENCE.findall(text):
        if language == "yaml":
            shown = yaml.safe_load(block)
            if isinstance(shown, dict):
                shown = shown.get("config", shown)
                if shown.keys() <= Settings.model_fields.keys():
                    fragments.append(yaml.safe_dump(shown))
    return fragments


@pytest.mark.parametrize("fragment", found(config_fragments))
def test_config_on_pages_is_valid(fragment: Found) -> None:
    """YAML that people copy has only keys and values of the config."""
    models = {"target_model": {"path": "/models/target"}}
    Settings.model_validate({"models": models} | yaml.safe_load(fragment.text))


@pytest.mark.parametrize("shown", found(commands))
def test_commands_exist(shown: Found) -> None:
    """A command that a page shows is one of ours, with options it has."""
    _, *words = shlex.split(shown.text)
    command: click.Command = cli.program
    while words and isinstance(command, click.Group):
        known = [command.commands[name] for name in words[0].split("|") if name in command.commands]
        assert known, words[0]
        command = known[0]
        words = words[1:]
    options = {name for param in command.params for name in param.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


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
    shutil.copy(ROOT / "scripts/drawings.py", tmp_path / "scripts")
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


def fits(version: str, changelog: str) -> bool:
    """Whether the newest release of a changelog is this version, or, with unreleased changes, an older one.

    Releases stand newest first, each with its date.
    """
    headings = re.findall(r"^## (.*)$", changelog, re.M)
    unreleased = headings[:1] == ["[Unreleased]"]
    dated = [
        re.fullmatch(r"\[([\d.]+)\] - \d{4}-\d\d-\d\d", text) for text in headings[unreleased:]
    ]
    if not all(dated):
        return False
    releases = [tuple(map(int, match[1].split("."))) for match in dated if match]
    if releases != sorted(set(releases), reverse=True):
        return False
    mine = tuple(map(int, version.split(".")))
    if unreleased:
        return releases == [] or mine > releases[0]
    return releases[:1] == [mine]


@pytest.mark.parametrize(
    ("headings", "good"),
    [
        (["[Unreleased]"], True),
        (["[Unreleased]", "[0.1.9] - 2026-01-02"], True),
        (["[0.2.0] - 2026-02-01", "[0.1.9] - 2026-01-02"], True),
        ([], False),
        (["[Unreleased]", "[0.2.0] - 2026-02-01"], False),
        (["[0.3.0] - 2026-02-01"], False),
        (["[0.1.9] - 2026-01-02"], False),
        (["[0.2.0]"], False),
        (["[0.1.9] - 2026-01-02", "[0.2.0] - 2026-02-01"], False),
        (["[0.2.0] - 2026-02-01", "[Unreleased]"], False),
    ],
)
def test_a_wrong_changelog_is_found(headings: list[str], good: bool) -> None:
    """A release without its date, out of order, or of another version than 0.2.0 does not fit."""
    assert fits("0.2.0", "".join(f"## {heading}\n" for heading in headings)) == good


def test_changelog_is_of_this_version() -> None:
    """The changelog's newest release is the package, or the package is newer and changes wait for a release."""
    assert fits(__version__, (ROOT / "CHANGELOG.md").read_text())
