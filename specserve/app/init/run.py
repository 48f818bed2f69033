"""``specserve init``: read or look, and write a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from specserve.app.init.others import as_vllm
from specserve.app.init.sheet import Sheet
from specserve.app.init.source import is_own_config, servers_in
from specserve.app.init.vllm import translate, variables_needed
from specserve.app.init.write import render
from specserve.errors import ConfigError

_OF_EVERY_SERVER = ("HF_", "HUGGING", "CUDA_")
_SPECULATION_FROM = {
    "sglang": "SGLang",
    "tgi": "TGI",
    "llama.cpp": "llama.cpp",
    "vllm": "vLLM",
}


@dataclass(frozen=True)
class Written:
    """A config file, and what to tell about it."""

    text: str
    left: tuple[str, ...] = ()
    """What was not carried over, and why."""
    said: tuple[str, ...] = ()
    """What differs from the original."""
    variables: tuple[str, ...] = ()
    """What the file needs in its environment."""

    def as_dict(self) -> dict[str, JsonValue]:
        """As JSON."""
        return {
            "config": self.text,
            "not_carried": list(self.left),
            "notes": list(self.said),
            "variables": list(self.variables),
        }


@dataclass(frozen=True)
class Wishes:
    """What the command line adds to what was read."""

    target: str | None = None
    draft: str | None = None
    gpu: str | None = None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return any((self.target, self.draft, self.gpu))


def from_text(text: str, name: str, wishes: Wishes) -> Written:
    """The config for what a text describes. Raises ConfigError where there is no server in it."""
    if is_own_config(text):
        if wishes.any:
            raise ConfigError(
                "is a specserve config already; --target, --draft and --gpu have nothing to add",
                where=name,
                fix="edit the keys in the file",
            )
        return Written(text)
    try:
        found = servers_in(text)
    except RecursionError:
        raise ConfigError("is nested too deeply to read", where=name) from None
    if not found:
        raise ConfigError(
            "no command that starts a server was found; must have a 'vllm serve', a 'docker run', "
            "a compose service, a Kubernetes container, or a server of SGLang, TGI or llama.cpp",
            where=name,
            fix="give the command itself: specserve init --from - and paste it",
        )
    chosen = next((one for one in found if one.speculates), found[0])
    sheet = Sheet()
    for other in found:
        if other is not chosen:
            sheet.leave(
                f"the server at {other.place or 'another place'}",
                "one config is one server",
            )
    for note in chosen.notes:
        sheet.say(note)
    words = as_vllm(chosen, sheet)
    env: Mapping[str, str] = chosen.env
    if chosen.server != "vllm":
        sheet.say(
            f"read from a command of {_SPECULATION_FROM[chosen.server]}: "
            "the same words need not mean the same speed"
        )
        env = {key: value for key, value in chosen.env.items() if key.startswith(_OF_EVERY_SERVER)}
    translate(
        sheet,
        words,
        env,
        chosen.exported,
        in_container=chosen.in_container,
        of_vllm=chosen.server == "vllm",
    )
    _add_wishes(sheet, wishes)
    if "models.target_model.path" not in sheet.values:
        raise ConfigError(
            "the command names no model",
            where=name,
            fix="add --target PATH to specserve init",
        )
    source = name
    if chosen.place:
        source = f"{name}, {chosen.place}"
    return Written(
        render(sheet, source),
        tuple(sheet.left),
        tuple(sheet.said),
        tuple(variables_needed(sheet.values.values())),
    )


def proposed(wishes: Wishes, environ: Mapping[str, str]) -> Written:
    """The config for checkpoints and hardware alone. Raises ConfigError without a target."""
    # Needs readers of checkpoints, which text does not.
    from specserve.app.init.propose import propose

    if wishes.target is None:
        raise ConfigError(
            "neither --from nor --target is given; must have something to start from",
            fix="specserve init --target PATH, or specserve init --from FILE",
        )
    sheet = Sheet()
    propose(sheet, wishes.target, wishes.draft, wishes.gpu, environ)
    return Written(render(sheet, "the checkpoints and GPUs"), tuple(sheet.left), tuple(sheet.said))


def _add_wishes(sheet: Sheet, wishes: Wishes) -> None:
    for key, value in (
        ("models.target_model.path", wishes.target),
        ("models.draft_model.path", wishes.draft),
        ("hardware.gpu_name", wishes.gpu),
    ):
        if value is not None:
            sheet.put(key, value.replace("$", "$$"), "given to init")
