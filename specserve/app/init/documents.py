"""YAML that describes containers: compose services, Kubernetes objects, values of charts.

Every scalar is a text here, as it was written: an argument ``0.90`` stays ``0.90``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import yaml
from pydantic import JsonValue

from specserve.app.init import template
from specserve.app.init.arguments import is_known
from specserve.app.init.found import Found, in_container, in_shell, mentions_a_server, server_of
from specserve.app.init.shell import split
from specserve.app.init.vllm import is_of_engine
from specserve.config.document import MAX_VALUES
from specserve.log import is_secret_name

Tree: TypeAlias = "str | list[Tree] | dict[str, Tree]"

_COMPOSE = re.compile(
    r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-?+])((?:[^{}]|\{[^{}]*\})*))?\})"
)
_KUBERNETES = re.compile(r"\$(?:(\$)\(|\(([A-Za-z_][\w.-]*)\))")
_MERGE = "tag:yaml.org,2002:merge"
_MORE_ARGUMENTS = "VLLM_ADDITIONAL_ARGS"
"""KServe's variable with arguments for vLLM."""
_MODEL_FIELDS = ("modelURL", "modelUri", "storageUri", "uri", "model")


class _ManifestLoader(yaml.SafeLoader):
    """Scalars as they are written; ``<<`` still merges. A file with more values than any manifest
    has is not read."""

    yaml_implicit_resolvers = {"<": [(_MERGE, re.compile(r"^(?:<<)$"))]}  # noqa: RUF012
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise yaml.YAMLError("more values than a manifest has")
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _as_text(loader: _ManifestLoader, _: str, node: yaml.Node) -> Tree:
    """A tag of somebody's own (``!reference``) is read as what it is attached to."""
    if isinstance(node, yaml.MappingNode):
        return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}
    if isinstance(node, yaml.SequenceNode):
        return list(loader.construct_sequence(node, deep=True))
    return str(node.value)


_ManifestLoader.add_multi_constructor("", _as_text)


def read_documents(text: str) -> list[dict[str, Tree]]:
    """The mappings of a YAML text, documents in order; none where it is not YAML."""
    try:
        found = list(yaml.load_all(text, Loader=_ManifestLoader))
    except (yaml.YAMLError, RecursionError, ValueError):
        return []
    sizes: dict[int, int] = {}
    return [
        document
        for document in found
        if isinstance(document, dict) and _size(document, sizes) <= MAX_VALUES
    ]


def _size(tree: Tree, sizes: dict[int, int]) -> int:
    """Values with every alias expanded: a few lines can stand for billions. Each is counted once;
    one that holds itself is too large."""
    if isinstance(tree, str):
        return 1
    if id(tree) not in sizes:
        sizes[id(tree)] = MAX_VALUES + 1
        if isinstance(tree, dict):
            inner = list(tree.values())
        else:
            inner = list(tree)
        sizes[id(tree)] = 1 + sum(_size(item, sizes) for item in inner)
    return sizes[id(tree)]


def in_documents(documents: list[dict[str, Tree]]) -> list[Found]:
    """Every server that the documents describe."""
    out: list[Found] = []
    for document in documents:
        services = document.get("services")
        if isinstance(services, dict):
            for name, service in services.items():
                if isinstance(service, dict):
                    out += _service(name, service)
        elif "image" in document and ("command" in document or "entrypoint" in document):
            out += _service("service", document)
        else:
            out += _objects(document)
    if not out:
        for text in _texts(list(documents)):
            out += in_shell(text)
    return out


def _texts(tree: Tree) -> Iterator[str]:
    """Scalars that may be a script: recipes and task files hold one as a text."""
    if isinstance(tree, str):
        if mentions_a_server(tree):
            yield tree
    elif isinstance(tree, list):
        for item in tree:
            yield from _texts(item)
    else:
        for item in tree.values():
            yield from _texts(item)


# --- compose --------------------------------------------------------------------------------


def _service(name: str, service: Mapping[str, Tree]) -> Iterator[Found]:
    """One service: variables are compose's, then the words are the container's."""
    env: dict[str, str] = {}
    for key, value in _compose_env(service.get("environment")):
        env[key] = value
    notes = []
    if "env_file" in service:
        notes.append("env_file: the file was not read")
    if "ports" in service:
        notes.append("ports: a matter of the container; server.port is the one inside it")
    if "volumes" in service:
        notes.append("volumes: paths are those in the container")
    if "deploy" in service or "runtime" in service or "gpus" in service:
        notes.append("GPU reservations (deploy, runtime, gpus): a matter of the container")
    if "extends" in service:
        notes.append("extends: the other service was not read")
    entrypoint = _compose_words(service.get("entrypoint"))
    command = _compose_words(service.get("command")) or []
    image = _compose_text(_text(service.get("image")))
    yield from in_container(image, entrypoint, command, env, f"service {name}", notes=notes)


def _compose_env(given: Tree | None) -> Iterator[tuple[str, str]]:
    """``environment`` as a map or as a list; a name without a value comes from the host."""
    if isinstance(given, dict):
        for name, value in given.items():
            text = _text(value)
            if text in ("", "null", "~") and not text:
                yield name, template.variable(name, "")
            else:
                yield name, _compose_text(text)
    elif isinstance(given, list):
        for entry in given:
            name, equals, value = _text(entry).partition("=")
            if equals:
                yield name, _compose_text(value)
            else:
                yield name, template.variable(name, "")


def _compose_words(given: Tree | None) -> list[str] | None:
    if isinstance(given, list):
        return [_compose_text(_text(word)) for word in given]
    if isinstance(given, str) and given not in ("null", "~"):
        return split(_compose_text(given))
    return None


def _compose_text(text: str) -> str:
    """Compose's own variables; ``$$`` is a dollar for the container's shell."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name, operator, other = match[2] or match[3], match[4] or "", match[5] or ""
        if operator.endswith("+"):
            return ""
        if operator.endswith("-"):
            return template.variable(name, _compose_text(other))
        return template.variable(name)

    return _COMPOSE.sub(value, text)


# --- Kubernetes -----------------------------------------------------------------------------


def _objects(tree: Tree, place: str = "", model: str = "") -> Iterator[Found]:
    """Containers at any depth: a Deployment, a Pod, an InferenceService, the values of a chart."""
    if isinstance(tree, list):
        for item in tree:
            yield from _objects(item, place, model)
        return
    if not isinstance(tree, dict):
        return
    kind, about = tree.get("kind"), tree.get("metadata")
    if isinstance(kind, str):
        name = ""
        if isinstance(about, dict):
            name = _text(about.get("name"))
        place = f"{kind} {name}".strip()
    if kind in ("ConfigMap", "Secret"):
        data = tree.get("data")
        if kind == "ConfigMap" and isinstance(data, dict):
            for script in data.values():
                if isinstance(script, str) and "\n" in script:
                    yield from (
                        replace(f, in_container=True) for f in in_shell(script, place=place)
                    )
        return
    if isinstance(tree.get("vllmConfig"), dict):
        yield from _chart_values(tree, place)
        return
    model = _model_beside(tree) or model
    own = [*_container(tree, place, model)]
    yield from own
    for key, inner in tree.items():
        if key not in ("env", "args", "command") and not (own and key == "model"):
            yield from _objects(inner, place, model)


def _model_beside(tree: dict[str, Tree]) -> str:
    """The model that KServe and charts name outside the arguments; empty where none is."""
    places: list[Tree | None] = [tree, tree.get("model"), tree.get("modelArtifacts")]
    for place in places:
        if isinstance(place, dict):
            for key in _MODEL_FIELDS:
                uri = place.get(key)
                if isinstance(uri, str) and uri:
                    return re.sub(r"^(hf|pvc|oci)://", "", uri)
    return ""


def _container(tree: Mapping[str, Tree], place: str, model: str) -> Iterator[Found]:
    """A mapping that has what a container has."""
    command, args = tree.get("command"), tree.get("args")
    env = dict(_kubernetes_env(tree.get("env")))
    more = split(env.pop(_MORE_ARGUMENTS, ""))
    is_silent = not isinstance(command, list) and not isinstance(args, list) and not more
    if is_silent and not (server_of(_text(tree.get("image"))) == "tgi" and "MODEL_ID" in env):
        return
    words = [*(_kubernetes_text(word, env) for word in _words(args)), *more]
    entrypoint = None
    if isinstance(command, list):
        entrypoint = [_kubernetes_text(word, env) for word in _words(command)]
    used = set(_KUBERNETES.findall(" ".join(_words(args) + _words(command))))
    named = {name for _, name in used}
    # What only fills in an argument is not the engine's.
    env = {name: value for name, value in env.items() if name not in named or is_of_engine(name)}
    image = _text(tree.get("image"))
    if isinstance(tree.get("name"), str) and place:
        place = f"{place}, container {tree['name']}"
    notes = []
    if "envFrom" in tree:
        notes.append("envFrom: its variables come from objects that were not read")
    found = in_container(image, entrypoint, words, env, place or "container", notes=notes)
    if not found and any(is_known(word) for word in words if word.startswith("--")):
        found = in_container("vllm", entrypoint, words, env, place, notes=notes)
    for one in found:
        yield _with_model(one, model)


def _with_model(found: Found, model: str) -> Found:
    """The model from outside, where the arguments name none."""
    has_model = found.words[:1] and not found.words[0].startswith("-")
    if has_model or any(word.split("=")[0] == "--model" for word in found.words):
        return found
    if model:
        return replace(found, words=(model, *found.words))
    return found


def _chart_values(tree: Mapping[str, Tree], place: str) -> Iterator[Found]:
    """vLLM's production stack: ``vllmConfig`` beside ``modelURL``."""
    config = tree["vllmConfig"]
    if not isinstance(config, dict):
        return
    words = [_text(tree.get("modelURL"))]
    for key, value in config.items():
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", key).lower()
        if key == "extraArgs":
            words += _words(value)
        elif value == "true":
            words.append(f"--{name}")
        elif value == "false":
            words.append(f"--no-{name}")
        elif isinstance(value, str):
            words.append(f"--{name}={value}")
        else:
            words += [f"--{name}", json.dumps(value)]
    env = dict(_kubernetes_env(tree.get("env")))
    where = f"{place} model {_text(tree.get('name'))}".strip()
    yield Found("vllm", tuple(words), env, place=where, in_container=True)


def _kubernetes_env(given: Tree | None) -> Iterator[tuple[str, str]]:
    """``env``: a value, or a reference to something that only the cluster knows."""
    if not isinstance(given, list):
        return
    for entry in given:
        if not isinstance(entry, dict):
            continue
        name, source = _text(entry.get("name")), entry.get("valueFrom")
        if isinstance(source, dict):
            reference = source.get("secretKeyRef") or source.get("configMapKeyRef")
            is_optional = isinstance(reference, dict) and reference.get("optional") == "true"
            if is_optional or ("fieldRef" in source and not is_secret_name(name)):
                yield name, template.variable(name, "")
            else:
                yield name, template.variable(name)
        elif name:
            yield name, _text(entry.get("value"))


def _kubernetes_text(text: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` of the container's own environment; ``$$(`` is no reference."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$("
        name = match[2]
        if name not in env:
            return match[0]
        if is_secret_name(name) and not template.variables_in(env[name]):
            return template.variable(name)
        return env[name]

    return _KUBERNETES.sub(value, text)


def _words(given: Tree | None) -> list[str]:
    if isinstance(given, list):
        return [_text(word) for word in given]
    if isinstance(given, str):
        return split(given)
    return []


def _text(value: Tree | None) -> str:
    """A scalar as text; a mapping in its place is JSON that was written without quotes."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(_typed(value))


def _typed(value: Tree) -> JsonValue:
    """Scalars of JSON that YAML took apart, as numbers and switches again."""
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if re.fullmatch(r"-?\d+(\.\d+)?|true|false|null", value):
        typed: JsonValue = json.loads(value)
        return typed
    return value
