"""What ``init --from`` is given, told apart: a config of ours, shell text, compose, Kubernetes, a
systemd unit, a Containerfile, Markdown with any of these in code fences, a list of arguments."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace

from specserve.app.init import template
from specserve.app.init.arguments import is_known
from specserve.app.init.documents import Tree, in_documents, read_documents
from specserve.app.init.found import Found, documents_in_shell, in_container, in_shell
from specserve.app.init.shell import first_command, split

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that no config can hold."""
_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(
    r"^([ \t]*)(?:\$|PS[^>\n]*>|\w+@[\w.-]+:[^\n$#]*[$#])[ \t]+(?=\S)", re.MULTILINE
)
_UNIT = re.compile(r"^\[Service\]\s*$", re.MULTILINE)
_UNIT_LINE = re.compile(r"^(ExecStart|Environment)\s*=\s*[-@:+!]*((?:.*\\\n)*.*)", re.MULTILINE)
_COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:sudo )?"
    r"(?:vllm serve|python3? -m (?:vllm|sglang)|(?:docker|podman) run|sglang serve|llama-server )"
)
_IMAGE_FILE = re.compile(r"^FROM\s+(\S+)", re.MULTILINE | re.IGNORECASE)
_IMAGE_LINE = re.compile(r"^(ENV|CMD|ENTRYPOINT)\s+((?:.*\\\n)*.*)$", re.MULTILINE | re.IGNORECASE)


def is_own_config(text: str) -> bool:
    """Whether the text is a config of specserve's already."""
    for document in read_documents(text)[:1]:
        models = document.get("models")
        if isinstance(models, dict) and isinstance(models.get("target_model"), dict):
            return True
    return False


def servers_in(raw: str) -> list[Found]:
    """Every server that a text describes, in order."""
    text = template.without_marks(raw.removeprefix("\ufeff"))
    text = _CONTROLS.sub("?", text)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    fences = [match[2] for match in _FENCE.finditer(text)]
    if fences:
        found = [one for fence in fences for one in _one(fence)]
        if found:
            return found
    return _one(text)


def _one(text: str) -> list[Found]:
    """A text without Markdown around it."""
    readers = (
        _words,
        _manifests,
        _flag_file,
        _unit,
        _image_file,
        _shell,
        _excerpts,
        _bare,
    )
    for reader in readers:
        found = list(reader(text))
        if found:
            return found
    return []


def _words(text: str) -> Iterator[Found]:
    """A JSON list of words, as in a ``command``."""
    if not text.lstrip().startswith("["):
        return
    words: list[str] = []
    with contextlib.suppress(ValueError, RecursionError):
        read = json.loads(text)
        words = [str(word) for word in read]
    if words:
        found = in_container("", None, words, {}, "list")
        if not found:
            found = [Found("vllm", tuple(words), place="list")]
        yield from (replace(one, in_container=False) for one in found)


def _manifests(text: str) -> Iterator[Found]:
    yield from in_documents(read_documents(text))


def _flag_file(text: str) -> Iterator[Found]:
    """The file of ``vllm serve --config``: flags as keys."""
    documents = read_documents(text)
    if len(documents) != 1:
        return
    keys = [key for key in documents[0] if is_known(f"--{key}")]
    if "model" not in documents[0] or len(keys) < max(2, len(documents[0]) // 2):
        return
    words: list[str] = []
    for key, value in documents[0].items():
        words += _flag(key, value)
    yield Found("vllm", tuple(words), place="vLLM's config file")


def _flag(key: str, value: Tree) -> list[str]:
    if value in ("true", "True"):
        return [f"--{key}"]
    if value in ("false", "False"):
        return [f"--no-{key}"]
    if isinstance(value, str):
        return [f"--{key}={value}"]
    if isinstance(value, list):
        return [f"--{key}", *(str(item) for item in value)]
    return [f"--{key}", json.dumps(value)]


def _unit(text: str) -> Iterator[Found]:
    """A systemd unit: ``Environment=`` and ``ExecStart=``."""
    if not _UNIT.search(text):
        return
    lines = []
    for key, value in _UNIT_LINE.findall(text):
        if key == "Environment":
            lines.append(f"export {value}")
        else:
            lines.append(value)
    yield from (replace(one, place="systemd unit") for one in in_shell("\n".join(lines)))


def _image_file(text: str) -> Iterator[Found]:
    """A Containerfile: ENV, ENTRYPOINT and CMD."""
    image = _IMAGE_FILE.search(text)
    if image is None:
        return
    env: dict[str, str] = {}
    entrypoint: list[str] | None = None
    command: list[str] = []
    for instruction, value in _IMAGE_LINE.findall(text):
        words = _instruction(value)
        match instruction.upper():
            case "ENV":
                pairs = split(value)
                if pairs and "=" not in pairs[0]:
                    env[pairs[0]] = " ".join(pairs[1:])
                else:
                    env |= dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            case "ENTRYPOINT":
                entrypoint = words
            case _:
                command = words
    yield from in_container(image[1], entrypoint, command, env, "Containerfile")


def _instruction(value: str) -> list[str]:
    with contextlib.suppress(ValueError):
        words = json.loads(value.replace("\\\n", " "))
        if isinstance(words, list):
            return [str(word) for word in words]
    return split(value)


def _shell(text: str) -> Iterator[Found]:
    found = in_shell(_PROMPT.sub(r"\1", text))
    yield from found
    if not found:
        for document in documents_in_shell(text):
            yield from _one(document)


def _excerpts(text: str) -> Iterator[Found]:
    """Commands inside prose, where an apostrophe is no quote; also behind a comment sign."""
    for match in _COMMAND.finditer(text):
        rest = text[match.start() :]
        if text[: match.start()].endswith("`"):
            rest = rest.partition("`")[0]
        found = in_shell(first_command(rest))
        yield from found


def _bare(text: str) -> Iterator[Found]:
    """Arguments alone, from a README or a form."""
    words = split(" ".join(text.replace("\\\n", " ").split("\n")))
    if any(is_known(word) for word in words if word.startswith("--")):
        yield Found("vllm", tuple(words), place="arguments")
