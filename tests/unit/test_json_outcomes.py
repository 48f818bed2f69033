"""``--format json``: one JSON document for every outcome, on every command that prints results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from specserve import cli

WITHOUT_FORMAT = {
    "completion",  # a script for a shell
    "config schema",  # is JSON
    "alerts rules",  # writes a rule file
    "alerts inhibit",  # writes a piece of a configuration
    "sidecar",  # watches until it is stopped
    "init",  # writes a config file
}


def commands(group: click.Group, *words: str) -> Iterator[tuple[str, click.Command]]:
    """Every command under its full name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *words, name)
        else:
            yield " ".join([*words, name]), command


WITH_FORMAT = [
    name for name, c in commands(cli.program) if any(p.name == "output" for p in c.params)
]


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """Exit code, the one document on stdout, and stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    said = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(said.out), said.err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config that has two mistakes, and files that are not what they should be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("models: {target_modell: {path: /m}}\nserver: {port: x}\n")
    (tmp_path / "torn.yaml").write_text("models: [")
    (tmp_path / "ok.yaml").write_text(
        "models: {target_model: {path: ./m}}\nspeculative_decoding: {method: ngram}\n"
    )
    return tmp_path


def test_every_command_that_prints_results_has_it():
    """A new command has --format, or a reason to have none."""
    without = {name for name, _ in commands(cli.program)} - set(WITH_FORMAT)
    assert without <= WITHOUT_FORMAT


@pytest.mark.parametrize("name", WITH_FORMAT)
def test_a_command_line_that_click_refuses(name, here, capsys):
    """An unknown option is one document with the place and what to type, on every command."""
    code, body, err = typed(f"{name} --no-such-option --format json", capsys)
    assert (code, err, body["ok"]) == (2, "", False)
    (error,) = body["errors"]
    assert error["where"] == f"specserve {name}"
    assert "--no-such-option" in error["problem"]
    assert error["fix"] == f"specserve {name} --help"


CONFIG_FIRST = [
    name
    for name, c in commands(cli.program)
    if name in WITH_FORMAT and any(p.name == "config" for p in c.params)
]


@pytest.mark.parametrize("name", CONFIG_FIRST)
@pytest.mark.parametrize("file", ["bad.yaml", "torn.yaml", "missing.yaml"])
def test_a_config_that_cannot_be_read(name, file, here, capsys):
    """A bad, torn or missing file is a document with every problem and its place; the exit code is 2."""
    code, body, _ = typed(f"{name} --format json {file}", capsys)
    assert (code, body["ok"]) == (2, False)
    assert all(error["where"].startswith(file) and error["problem"] for error in body["errors"])
    if file == "bad.yaml":
        assert len(body["errors"]) > 1


def test_a_checkpoint_that_is_not_there(here, capsys):
    """A refusal carries the code of its finding; a missing checkpoint is no bug and no empty stdout."""
    code, body, _ = typed("plan ok.yaml --format=json", capsys)
    assert (code, body["ok"]) == (3, False)
    assert [error["code"] for error in body["errors"]] == ["checkpoint-missing"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("status --url http://127.0.0.1:9 --format json", 5),
        ("probe live --url http://127.0.0.1:9 --format json", 1),
        ("verify --url http://127.0.0.1:9 --format json", 6),
        ("models verify ok.yaml --format json", 3),
        ("report ok.yaml --format json", 2),
        ("trace redact missing.jsonl out --format json", 2),
        ("alerts lint bad.yaml --format json", 2),
        ("nonsense --format json", 2),
    ],
)
def test_other_failures(line, code, here, capsys):
    """No server, no manifest, no such command: one document, with the exit code of the text form."""
    got, body, _ = typed(line, capsys)
    assert (got, body["ok"]) == (code, False)


def test_the_format_is_that_of_the_command_not_of_a_value(here, capsys):
    """Words behind `--` and other formats do not ask for JSON."""
    with pytest.raises(SystemExit):
        cli.main(["check", "--format", "text", "--", "--format=json"])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Error: ")


def test_success_says_so(here, capsys):
    """A command that went well has ``ok: true`` where it has no other contract."""
    code, body, _ = typed("alerts metrics --format json", capsys)
    assert (code, body["ok"]) == (0, True)
    assert body["metrics"]
