"""The guides: their commands run, and what they show follows from the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from scripts import drawings
from specserve import cli
from specserve.alert.builtin import definitions
from specserve.engine.output import failures
from tests import pairs
from tests.checkpoints import llama, small_llama

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = """
choose clients faq how-it-works migrate operate security several-nodes size troubleshoot tune
"""
GUIDES = [DOCS / f"{name}.md" for name in NAMES.split()]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
TYPED = re.compile(r"^- \*\*Type\*\* (.*?)(?=^- \*\*)", re.M | re.S)
NEEDS = re.compile(r"\bneeds (?:a GPU|a running server|a network|the checkpoints)\b")
HERE = re.compile(r"cat > (\S+) <<'COMMAND'\n(.*?)^COMMAND$", re.M | re.S)


class Step(NamedTuple):
    """A command that a guide tells people to type."""

    page: str
    line: str


def steps(page: Path) -> list[Step]:
    """What can be run here: every line of a block, and what an entry says to type, unless marked."""
    text = page.read_text()
    found = []
    for block in BLOCK.findall(text):
        for line in HERE.sub("", block).replace("\\\n", " ").splitlines():
            if line.startswith("specserve ") and not NEEDS.search(line):
                found.append(line.partition("#")[0].strip())
    for typed in TYPED.findall(text):
        flat = " ".join(typed.split())
        for command, mark in re.findall(r"`(specserve [^`]*)`( \([^)]*\))?", flat):
            if not NEEDS.search(mark):
                found.append(command)
    return [Step(page.name, line) for line in dict.fromkeys(found)]


STEPS = [step for page in GUIDES for step in steps(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the guides assume it: a pair, its config, recorded traffic, an old command."""
    here = tmp_path_factory.mktemp("guide")
    config = pairs.Pair("guide", target=llama(), draft=small_llama()).write(here)
    config["hardware"] = {"gpu_name": "H100", "gpu_count": 1}
    (here / "config.yaml").write_text(yaml.safe_dump(config))
    (here / "requests.jsonl").write_text('{"prompt": "Say hello.", "max_tokens": 4}\n' * 2)
    text = (DOCS / "migrate.md").read_text()
    for name, command in HERE.findall(text):
        (here / name).write_text(command)
    with pytest.raises(SystemExit) as ended:
        cli.main(["models", "lock", str(here / "config.yaml")])
    assert ended.value.code in (None, 0)
    return here


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.page}: {step.line}")
def test_a_command_of_a_guide_runs(
    step: Step,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends with 0 for a pair that fits, without a GPU and without a network."""
    monkeypatch.chdir(folder)
    if step.page == "migrate.md":
        monkeypatch.chdir(tmp_path)
        for name in HERE.findall((DOCS / step.page).read_text()):
            Path(name[0]).write_text(name[1])
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(step.line)[1:])
    said = capsys.readouterr()
    assert ended.value.code in (None, 0), said.out + said.err


def test_the_guides_have_commands_that_run() -> None:
    """The search finds them: a guide that tells what to type has some that need nothing."""
    assert {step.page for step in STEPS} >= {"choose.md", "migrate.md", "operate.md", "size.md"}
    assert len(STEPS) >= 20


@pytest.mark.parametrize("number", range(3), ids=["vllm", "sglang", "tgi"])
def test_old_commands_are_translated(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What migrate.md shows is what init writes, and each of its commands is read."""
    text = (DOCS / "migrate.md").read_text()
    old = tmp_path / "old-command.sh"
    old.write_text(HERE.findall(text)[number][1])
    with pytest.raises(SystemExit):
        cli.main(["init", "--from", str(old)])
    written = yaml.safe_load(capsys.readouterr().out)
    assert written["models"]["target_model"]["path"].startswith("Qwen/")
    if number == 0:
        assert written == yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.S)[0])
    if number == 1:
        assert written["speculative_decoding"]["num_speculative_tokens"] == 3
    if number == 2:
        assert written["speculative_decoding"]["method"] == "ngram"


def test_tokens_per_step_follow_from_the_formula() -> None:
    """Every number of the table in how-it-works.md."""
    text = (DOCS / "how-it-works.md").read_text()
    rows = re.findall(r"^\| (\d+) % \| (.*) \|$", text, re.M)
    assert len(rows) == 4
    for percent, cells in rows:
        expected = [drawings.tokens_per_step(int(percent) / 100, k) for k in (1, 2, 4, 8)]
        assert cells.split(" | ") == [f"{value:.2f}" for value in expected]


def test_causes_and_alerts_of_the_entries_exist() -> None:
    """Each `[name]` of troubleshoot.md is a cause that launch prints."""
    text = (DOCS / "troubleshoot.md").read_text()
    named = set(re.findall(r"`\[([a-z-]+)\]`", text))
    known = {sign.cause for sign in failures.signs()}
    known |= {"oom-load", "oom-profile", "oom-graphs", "oom-serving"}
    assert named <= known
    assert len(named) >= 20
    alerts = set(re.findall(r"\(runbooks/(\w+)\.md\)", text))
    assert alerts <= {each.name for each in definitions()}


def test_each_entry_has_four_lines() -> None:
    """What you see, why, what to type, and how to know that it is gone."""
    text = (DOCS / "troubleshoot.md").read_text()
    entries = re.split(r"^### ", text, flags=re.M)[1:]
    assert len(entries) >= 20
    for entry in entries:
        assert re.findall(r"^- \*\*(.*?)\*\*", entry, re.M) == [
            "You see",
            "Why",
            "Type",
            "Gone when",
        ], entry


class _Nav(yaml.SafeLoader):
    """mkdocs.yml without running what its tags name."""


_Nav.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_every_page_is_in_the_navigation() -> None:
    """A page that is not there is found by nobody; runbooks are listed in alerts.md."""
    shown = yaml.load((ROOT / "mkdocs.yml").read_text(), _Nav)["nav"]
    listed = re.findall(r"[\w./-]+\.md", yaml.safe_dump(shown))
    pages = [
        path.relative_to(ROOT).as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("zh-CN/*.md")]
    ]
    outside = [
        "README.md",
        "README.zh-CN.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "helm/specserve/README.md",
    ]
    assert sorted(listed) == sorted([*pages, *outside])
    alerts = (DOCS / "alerts.md").read_text()
    for runbook in (DOCS / "runbooks").glob("*.md"):
        assert f"(runbooks/{runbook.name})" in alerts


def test_the_website_builds_without_a_broken_link(tmp_path: Path) -> None:
    """MkDocs in strict mode, where it is installed; what it needs is said where it is not."""
    argv = [sys.executable, str(ROOT / "scripts/docs"), "--site", str(tmp_path / "site")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode == 3:
        assert done.stderr.endswith("Fix: pip install '.[docs]'\n")
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "site/docs/how-it-works/index.html").is_file()
