"""``specserve init --from`` on text in the forms that people have it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from pydantic import JsonValue

from specserve import cli
from specserve.app.init.run import Wishes, Written, from_text
from specserve.config.load import load
from specserve.errors import ConfigError
from tests.unit.init_forms import FORMS, Form


def read(text: str) -> Written:
    return from_text(text, "stdin", Wishes())


def value(written: Written, key: str) -> JsonValue:
    """A dotted key of the file as YAML has it; slashes part keys that have dots."""
    here: JsonValue = yaml.safe_load(written.text)
    for part in key.split("."):
        if not isinstance(here, dict):
            return None
        here = here.get(part)
    return here


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_is_read(form: Form, tmp_path: Path) -> None:
    """Each form gives the keys, the notes and the variables that it should, and a config that loads."""
    written = read(form.text)
    assert {key: value(written, key) for key in form.keys} == form.keys
    notes = "\n".join([*written.left, *written.said])
    assert [said for said in form.said if said not in notes] == []
    assert [absent for absent in form.absent if absent in written.text] == []
    file = tmp_path / "config.yaml"
    file.write_text(written.text)
    environ = dict.fromkeys(written.variables, "7")
    load(file, environ=environ)
    assert read(written.text).text == written.text


def test_there_are_at_least_forty_forms() -> None:
    """As many inputs as text as were asked for."""
    assert len(FORMS) >= 40


def test_nothing_to_read_is_said() -> None:
    """A text without a server is an error that says what was looked for."""
    with pytest.raises(ConfigError, match="no command that starts a server"):
        read("echo hello\n")


def test_reading_never_executes(tmp_path: Path) -> None:
    """A command substitution is named and not run."""
    mark = tmp_path / "ran"
    written = read(f"vllm serve m -tp $(touch {mark}; echo 2) --seed `touch {mark}`\n")
    assert not mark.exists()
    assert "touch" in "\n".join(written.left)


def test_a_secret_is_never_written() -> None:
    """Keys and tokens, wherever they stand, become variables."""
    text = """export HF_TOKEN=hf_abcdefghijklmnopqrst
    MY_PASSWORD=swordfish vllm serve m --api-key sk-1234567890abcdef --some-token topsecret \\
      --otlp-traces-endpoint https://me:hunter2@h/ --kv-transfer-config '{"kv_connector": "X", "auth_token": "zzz"}'
    """
    written = read(text)
    shown = written.text + "\n".join([*written.left, *written.said])
    for secret in ("hf_abc", "swordfish", "sk-123", "topsecret", "hunter2", "zzz"):
        assert secret not in shown
    assert {"VLLM_API_KEY", "HF_TOKEN", "MY_PASSWORD"} <= set(written.variables)


def test_the_command_writes_a_file_and_says_what_comes_next(tmp_path: Path) -> None:
    """``--out`` writes the file; notes go to stderr; a file made by hand is not replaced."""
    source, out = tmp_path / "start.sh", tmp_path / "config.yaml"
    source.write_text("vllm serve m --swap-space 4\n")
    arguments = ["init", "--from", str(source), "--out", str(out)]
    for _ in range(2):
        result = CliRunner().invoke(cli.program, arguments)
        assert result.exit_code == 0, result.output
        assert f"Next: specserve check {out}" in result.stderr
        assert "Not carried over: --swap-space 4" in result.stderr
    out.write_text("models: {}\n")
    result = CliRunner().invoke(cli.program, arguments)
    assert isinstance(result.exception, ConfigError)
    assert out.read_text() == "models: {}\n"


def test_json_has_the_file_and_the_notes(tmp_path: Path) -> None:
    """``--format json`` is one document with the config in it."""
    result = CliRunner().invoke(
        cli.program,
        ["init", "--from", "-", "--format", "json"],
        input="vllm serve m --swap-space 4",
    )
    document = yaml.safe_load(result.stdout)
    assert document["ok"] is True
    assert document["config"].startswith("# Written by specserve init")
    assert "--swap-space 4" in document["not_carried"][0]


def test_wishes_of_the_command_line_win() -> None:
    """``--target``, ``--draft`` and ``--gpu`` are laid over what was read."""
    written = from_text(
        'vllm serve m --speculative-config \'{"model": "d", "num_speculative_tokens": 2}\'',
        "stdin",
        Wishes("t", "e", "NVIDIA L4"),
    )
    assert value(written, "models.target_model.path") == "t"
    assert value(written, "models.draft_model.path") == "e"
    assert value(written, "hardware.gpu_name") == "NVIDIA L4"


def test_a_config_of_ours_comes_back_to_the_byte() -> None:
    """Also one that a person wrote, with its comments and line ends."""
    text = "# mine\r\nmodels:\r\n  target_model: {path: m}\r\n"
    assert read(text).text == text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_text_that_is_cut_off_never_raises(form: Form) -> None:
    """A form that ends anywhere gives a config or an error that says what is missing."""
    for part in range(1, 12):
        text = form.text[: len(form.text) * part // 12]
        with contextlib.suppress(ConfigError):
            written = read(text)
            assert isinstance(yaml.safe_load(written.text), dict)


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve " + "${a:-" * 5000,
        "a: &a [x, x, x]\n"
        + "".join(
            f"{c}: &{c} [*{p}, *{p}, *{p}]\n"
            for p, c in zip("abcdefghijklmno", "bcdefghijklmnop", strict=True)
        ),
        "a: &a [*a]\n",
        "vllm serve m \0 \ue000X\ue001 --seed 1",
        "[" * 100_000,
        "vllm serve m " + "--x " * 20_000,
    ],
    ids=["nesting", "aliases", "an alias in itself", "marks", "brackets", "many flags"],
)
def test_a_hostile_text_ends_in_a_config_or_an_error(text: str) -> None:
    """Neither depth, aliases nor characters that stand for something inside bring it down."""
    with contextlib.suppress(ConfigError):
        assert "\ue000" not in read(text).text
