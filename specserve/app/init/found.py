"""The command that starts a server, among the words of any command: behind ``sudo``, ``nohup`` or
``numactl``, inside ``bash -c``, ``docker run`` or a container's entrypoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from specserve.app.init import template
from specserve.app.init.arguments import is_known
from specserve.app.init.shell import Script, read_script
from specserve.log import is_secret_name

ServerKind = Literal["vllm", "sglang", "tgi", "llama.cpp"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_MODULES: Mapping[str, ServerKind] = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm/entrypoints/openai/api_server.py": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "dynamo.vllm": "vllm",
    "sglang.launch_server": "sglang",
    "sglang/launch_server.py": "sglang",
    "llama_cpp.server": "llama.cpp",
}
_PROGRAMS: Mapping[str, ServerKind] = {
    "text-generation-launcher": "tgi",
    "llama-server": "llama.cpp",
    "llama-cli": "llama.cpp",
    "llama-speculative": "llama.cpp",
    "llama-speculative-simple": "llama.cpp",
}
_IMAGES: tuple[tuple[str, ServerKind], ...] = (
    ("sglang", "sglang"),
    ("text-generation-inference", "tgi"),
    ("llama.cpp", "llama.cpp"),
    ("llama-cpp", "llama.cpp"),
    ("vllm", "vllm"),
)
_HINT = re.compile(
    r"\bvllm\s+serve\b|vllm\.entrypoints|dynamo\.vllm|sglang[. ]|"
    r"text-generation-launcher|llama-server"
)
_CONTAINER_TOOLS = frozenset({"docker", "podman", "nerdctl", "nvidia-docker"})
_SWITCHES = frozenset(
    {
        "-d",
        "--detach",
        "-i",
        "--interactive",
        "-t",
        "--tty",
        "--rm",
        "--privileged",
        "--init",
        "--read-only",
        "-P",
        "--publish-all",
        "--no-healthcheck",
        "--oom-kill-disable",
        "-q",
        "--quiet",
        "--replace",
        "--sig-proxy",
        "--no-hosts",
        "--tls-verify",
        "--disable-content-trust",
        "--use-api-socket",
    }
)
"""Options of ``docker run`` and ``podman run`` without a value (docs.docker.com, 2026-12-01)."""
_MOST_NESTED = 8


@dataclass(frozen=True)
class Found:
    """One server's command: its arguments and what its environment is given."""

    server: ServerKind
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    exported: Mapping[str, str] = field(default_factory=dict)
    """Variables of the shell around it: some are meant for the server, some for the script."""
    place: str = ""
    in_container: bool = False
    notes: tuple[str, ...] = ()
    """What its surroundings say and a config cannot."""

    @property
    def speculates(self) -> bool:
        """Whether it looks as if it drafts."""
        words = " ".join(self.words)
        names = " ".join(self.env)
        marks = r"spec|draft|(^|\s)-md\b|-hfd|(^|\s)-sc\b"
        return re.search(marks, words) is not None or "SPECULATE" in names


def in_shell(text: str, *, place: str = "", depth: int = 0) -> list[Found]:
    """Every server that a shell text starts, in order."""
    script = read_script(text)
    return [
        found
        for command in script.commands
        for found in _in_words(
            command.words, command.env, script, place or f"line {command.line}", depth
        )
    ]


def mentions_a_server(text: str) -> bool:
    """Whether a text could hold a command that starts a server."""
    return _HINT.search(text) is not None


def documents_in_shell(text: str) -> list[str]:
    """Files that a shell text writes with here documents."""
    return read_script(text).documents


def in_container(
    image: str,
    entrypoint: Sequence[str] | None,
    command: Sequence[str],
    env: Mapping[str, str],
    place: str,
    *,
    notes: Sequence[str] = (),
    depth: int = 0,
) -> list[Found]:
    """What a container starts: its entrypoint with its command; without an entrypoint that of the
    image, as far as the image's name tells."""
    words = [*(entrypoint or ()), *command]
    out = list(_in_words(words, {}, Script(exported=dict(env)), place, depth))
    if not out:
        server = server_of(image)
        at_flags = [is_known(word) for word in command if word.startswith("-")]
        if server == "vllm" or (server is None and any(at_flags)):
            out = [Found("vllm", tuple(command), place=place)]
            if command[:1] == ["serve"]:
                out = [Found("vllm", tuple(command[1:]), place=place)]
        elif server in ("tgi", "llama.cpp"):
            out = [Found(server, tuple(command), place=place)]
    return [
        replace(
            found,
            env={**env, **found.env},
            exported={key: value for key, value in found.exported.items() if key not in env},
            in_container=True,
            notes=(*notes, *found.notes),
        )
        for found in out
    ]


def server_of(image: str) -> ServerKind | None:
    name = template.resolved(image).lower()
    for part, server in _IMAGES:
        if part in name:
            return server
    return None


def _in_words(
    words: Sequence[str], env: Mapping[str, str], script: Script, place: str, depth: int
) -> Iterator[Found]:
    """The servers that one command starts."""
    if depth > _MOST_NESTED or not words:
        return
    if words[0] == "eval":
        yield from _nested(" ".join(words[1:]), env, script, place, depth)
        return
    tool = _container_run(words)
    if tool is not None:
        inside = _docker_run(words[tool:], place, depth)
        for found in inside:
            yield replace(found, exported={**script.exported, **found.exported})
        return
    for at, word in enumerate(words):
        start = _start(words, at)
        if start is not None:
            server, arguments = start
            before = dict(_assignments(words[:at]))
            notes = []
            if script.has_conditions:
                notes.append("conditions of the script are not evaluated")
            yield Found(
                server,
                tuple(arguments),
                {**env, **before},
                dict(script.exported),
                place,
                notes=tuple(notes),
            )
            return
        if " " in word.strip() and _HINT.search(word):
            before = dict(_assignments(words[:at]))
            # Behind a script stand its name and its arguments.
            after = words[at + 2 :]
            yield from _nested(word, {**env, **before}, script, place, depth, positional=after)
            return


def _nested(
    text: str,
    env: Mapping[str, str],
    script: Script,
    place: str,
    depth: int,
    *,
    positional: Sequence[str] | None = None,
) -> Iterator[Found]:
    """The servers of a script inside a command. It sees the environment, but for secrets, which
    stay variables."""
    around = {**script.exported, **env}
    known = {name: value for name, value in around.items() if not is_secret_name(name)}
    inner = read_script(text, known, positional)
    inner.exported = {**script.exported, **inner.exported}
    inner.has_conditions = inner.has_conditions or script.has_conditions
    for command in inner.commands:
        yield from _in_words(command.words, {**env, **command.env}, inner, place, depth + 1)


def _assignments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match:
            yield match[1], match[2]


def _start(words: Sequence[str], at: int) -> tuple[ServerKind, Sequence[str]] | None:
    """The server that the word at ``at`` starts, with its arguments."""
    word, after = words[at], words[at + 1 :]
    program = word.replace("\\", "/").rpartition("/")[2].removesuffix(".exe")
    if program == "vllm" and after[:1] == ["serve"]:
        return "vllm", after[1:]
    if program == "sglang" and after[:1] == ["serve"]:
        return "sglang", after[1:]
    if program in _PROGRAMS:
        return _PROGRAMS[program], after
    for module, server in _MODULES.items():
        if word == module or word.endswith(f"/{module}"):
            if module.endswith("cli.main"):
                after = after[1:]
            return server, after
    return None


def _container_run(words: Sequence[str]) -> int | None:
    """Where the options of ``docker run`` begin; None where it is another command."""
    for at, word in enumerate(words):
        if word.rpartition("/")[2] not in _CONTAINER_TOOLS:
            continue
        for after in range(at + 1, min(at + 6, len(words))):
            if words[after] in ("run", "create"):
                return after + 1
        return None
    return None


def _docker_run(words: Sequence[str], place: str, depth: int) -> list[Found]:
    """``[OPTIONS] IMAGE [COMMAND] [ARGUMENT...]``."""
    env: dict[str, str] = {}
    notes: list[str] = []
    entrypoint: list[str] | None = None
    at = 0
    while at < len(words) and words[at].startswith("-"):
        option, equals, value = words[at].partition("=")
        at += 1
        if not equals and not _is_switch(option):
            if not option.startswith("--") and len(option) > 2:
                option, value = option[:2], option[2:]
            else:
                value = "".join(words[at : at + 1])
                at += 1
        match option:
            case "-e" | "--env":
                name, has_value, given = value.partition("=")
                env[name] = given
                if not has_value:
                    env[name] = template.variable(name, "")
            case "--env-file":
                notes.append(f"--env-file {template.shown(value)}: the file was not read")
            case "--entrypoint":
                entrypoint = [value]
            case "-p" | "--publish":
                notes.append(f"published port {template.shown(value)}: a matter of the container")
            case "-v" | "--volume" | "--mount":
                notes.append(f"volume {template.shown(value)}: paths are those in the container")
            case "--gpus" | "--device":
                notes.append(f"{option} {template.shown(value)}: a matter of the container")
            case _:
                pass
    image = "".join(words[at : at + 1])
    return in_container(
        image,
        entrypoint,
        list(words[at + 1 :]),
        env,
        place,
        notes=notes,
        depth=depth + 1,
    )


def _is_switch(option: str) -> bool:
    """Whether an option has no value: ``-it`` is ``-i -t``."""
    if option in _SWITCHES:
        return True
    return re.fullmatch(r"-[ditPq]{2,}", option) is not None
