"""What a vLLM supports, read from the texts of its modules (and of Transformers') without running them.

Answers the questions of ``specserve/engine/inside/probe_vllm.py`` in the same shape, for versions that are not installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.python_reading import (
    Class,
    Function,
    Literal,
    Member,
    Outside,
    Raised,
    Reader,
)

CLI = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
"""Where the server's parser has been, the newest first."""
FOLDERS = ("config", "engine", "entrypoints", "model_executor/models", "platforms", "tool_parsers", "reasoning", "renderers",
           "transformers_utils", "utils", "v1/attention/backends", "v1/spec_decode")  # fmt: skip
"""Folders of vLLM that are read, besides the modules on top."""
KINDS = {"store_true": "switch", "BooleanOptionalAction": "toggle", "append": "repeat"}
JSON_KINDS = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "list": "array", "tuple": "array",
              "set": "array", "dict": "object", "counter": "object", "None": "null", "Path": "string"}  # fmt: skip
ROOTS = ("Module", "Protocol", "Generic", "ABC", "object")


class Texts(dict[str, str]):
    """Dotted module name -> text; ``packages`` are those that were an ``__init__.py``."""

    packages: set[str]

    def __init__(self) -> None:
        super().__init__()
        self.packages = set()

    def add(self, path: str, text: str) -> None:
        """A file, by its path below site-packages."""
        name = path.removesuffix(".py").replace("/", ".")
        if name.endswith(".__init__"):
            name = name.removesuffix(".__init__")
            self.packages.add(name)
        self[name] = text


def wanted(path: str) -> bool:
    """Whether a file of a wheel is read here."""
    if not path.endswith(".py"):
        return False
    if path.startswith("vllm/"):
        rest = path.removeprefix("vllm/")
        return "/" not in rest or rest.startswith(tuple(f"{f}/" for f in FOLDERS))
    return bool(
        re.fullmatch(
            r"transformers/models/(auto/\w*auto\w*|\w+/modeling_\w+|\w+/modular_\w+)\.py", path
        )
    )


def installed_texts(site_packages: Path) -> Texts:
    """The texts of the vLLM and the Transformers in a folder of packages."""
    texts = Texts()
    for package in ("vllm", "transformers"):
        for path in sorted((site_packages / package).rglob("*.py")):
            name = path.relative_to(site_packages).as_posix()
            if wanted(name):
                texts.add(name, path.read_text(encoding="utf-8"))
    return texts


@dataclass(frozen=True)
class Converter:
    """What turns the text of an argument into a value."""

    name: str
    nullable: bool = False
    of: Any = None
    """The class that JSON becomes."""


class _Config:
    """A Hugging Face config with every attribute that vLLM's MTP override asks for; see the probe's own."""

    def __init__(self, model_type: str, architecture: str) -> None:
        self.model_type = model_type
        self.architectures = [architecture]
        self.quantization_config = None
        self.mtp_layer_types = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "text_config":
            return self
        if name == "get_text_config":
            return lambda: self
        return {"layer_types": [], "mtp_config": {"num_nextn_predict_layers": 1}}.get(name, 1)

    def update(self, values: dict[str, Any]) -> None:
        vars(self).update(values)


class _Plain:
    """A config of vLLM's with nothing switched on."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("is_", "_is_", "uses_", "use_", "has_", "_dflash_", "_get_")):
            return lambda *_: False
        return None


class _Parser:
    """Collects what would become flags."""

    def __init__(self) -> None:
        self.flags: dict[str, dict[str, Any]] = {}
        self.converters: dict[str, Converter | None] = {}

    def add_argument_group(self, *_: Any, **__: Any) -> _Parser:
        return self

    add_mutually_exclusive_group = add_argument_group

    def add_argument(self, *names: str, **given: Any) -> None:
        if not names or not names[0].startswith("-"):
            return
        action = given.get("action")
        action = getattr(action, "name", action)
        options = list(names)
        if action == "BooleanOptionalAction":
            options = [one for name in names for one in (name, *_negation(name))]
        kind = "list" if given.get("nargs") in ("+", "*") else "value"
        converter = _converter(given.get("type"))
        choices = given.get("choices")
        self.converters[names[0]] = converter
        self.flags[names[0]] = {
            "options": options,
            "kind": KINDS.get(str(action), kind),
            "optional_value": given.get("nargs") == "?",
            "choices": [str(c) for c in choices] if choices else None,
            "type": converter and converter.name,
            "nullable": bool(converter and converter.nullable),
            "default": plain(given.get("default", False if action == "store_true" else None)),
        }


def _negation(name: str) -> tuple[str, ...]:
    if name.startswith("--"):
        return (f"--no-{name[2:]}",)
    return ()


def _converter(value: Any) -> Converter | None:
    if value is None or isinstance(value, Converter):
        return value
    return Converter(getattr(value, "name", "unknown"))


def plain(value: Any) -> Any:
    """A default as JSON; None where it is none, or no plain value."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, Member):
        return plain(value.value)
    if isinstance(value, list | tuple) and all(
        isinstance(v, bool | int | float | str) for v in value
    ):
        return list(value)
    if isinstance(value, dict) and all(
        isinstance(v, bool | int | float | str) for v in value.values()
    ):
        return dict(value)
    return None


def _json_kinds(hints: list[_Hint]) -> list[str] | None:
    """``object`` or ``array``; None where the type does not tell. The probe looks one level down as well."""
    parts = list(hints)
    if len(parts) == 1:
        parts += parts[0].of if isinstance(parts[0].of, tuple) else ()
    kinds = {JSON_KINDS[h.name] for h in parts if h.name in ("dict", "list", "tuple", "set")}
    return sorted(kinds) if len(kinds) == 1 else None


@dataclass(frozen=True)
class _Hint:
    """One member of a union of types."""

    name: str
    of: Any = None


class EngineReader:
    """The questions, each answered from the texts."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self._parser: _Parser | None = None
        self.read = Reader(texts, {
            "get_kwargs": self._kwargs,
            "get_field": self._field_default,
            "optional_type": lambda inner: replace(_converter(inner) or Converter("unknown"), nullable=True),
            "parse_type": lambda inner: _converter(inner) or Converter("unknown"),
            "load_general_plugins": lambda: None,
            "list_registered": lambda *_: [],
            "OrderedDict": dict,
            "LazyConfigDict": dict,
            "getenv": lambda *_: None,
        })  # fmt: skip

    def answers(self) -> dict[str, Any]:
        """Everything that the sources tell; lists are sorted."""
        return {
            "flags": self.flags(),
            "json_flags": self.json_flags(),
            "speculative_keys": self.speculative_keys(),
            "methods": sorted(self.methods()),
            "mtp_model_types": sorted(self.mtp_model_types()),
            "mtp_sources": self.mtp_sources(),
            "model_types": self.model_types(),
            "architectures": sorted(self.models()),
            "without_eagle3": self.without_eagle3(),
            "transformers_architectures": self.transformers_architectures(),
            "environment_names": self.environment_names(),
            "runner_refusals": self.runner_refusals(),
        }

    # Flags

    def parser(self) -> _Parser:
        """The server's own, after everything was added to it."""
        if self._parser is None:
            self._parser = _Parser()
            self.read.call(self.read.lookup(self._cli(), "make_arg_parser"), [self._parser], {})
        return self._parser

    def _cli(self) -> str:
        return next(name for name in CLI if "make_arg_parser" in self.read.names(name))

    def flags(self) -> dict[str, Any]:
        """Every flag of the server's parser."""
        return self.parser().flags

    def json_flags(self) -> dict[str, Any]:
        """What the flags that take JSON take."""
        hints: dict[str, list[_Hint]] = {}
        for module, name in (
            ("vllm.engine.arg_utils", "EngineArgs"),
            (self._cli(), "FrontendArgs"),
        ):
            for field, (one, node) in self.read.fields(self.read.lookup(module, name)).items():
                hints[field] = list(self.hints(node.annotation, one.module))
        out: dict[str, Any] = {}
        for option, converter in self.parser().converters.items():
            if converter is None or converter.name not in (
                "loads",
                "parse_dataclass",
                "union_dict_and_str",
            ):
                continue
            described = {
                "text": converter.name == "union_dict_and_str",
                "optional": converter.nullable,
            }
            if converter.name == "parse_dataclass":
                described |= self._config(converter.of)
            else:
                described["kinds"] = _json_kinds(
                    hints.get(option.lstrip("-").replace("-", "_"), [])
                )
            out[option] = described
        return out

    def _config(self, cls: Class) -> dict[str, Any]:
        """The fields of a config, as its JSON Schema has them."""
        opened, closed = (
            set(),
            any(ast.unparse(d).startswith("config") for d in cls.node.decorator_list),
        )
        for one in self.read.family(cls):
            for method in one.node.body:
                for decorator in getattr(method, "decorator_list", ()):
                    text = ast.unparse(decorator)
                    if (
                        "'after'" in text
                        or "validator" not in text
                        or not isinstance(decorator, ast.Call)
                    ):
                        continue
                    if text.startswith("model_validator"):
                        closed = False
                    elif "mode=" in text:
                        opened |= {a.value for a in decorator.args if isinstance(a, ast.Constant)}
        fields = {}
        for name, (one, node) in self.read.fields(cls).items():
            kinds, choices = self._schema(list(self.hints(node.annotation, one.module)))
            if {name, "*"} & opened:
                kinds = choices = None
            fields[name] = {"kinds": kinds, "choices": choices}
        return {"kinds": ["object"], "fields": fields, "closed": closed}

    def _schema(self, hints: list[_Hint]) -> tuple[list[str] | None, list[str] | None]:
        """Kinds and values of a field; None where the type does not tell."""
        kinds: set[str] = set()
        closed: list[list[str] | None] = []
        for hint in hints:
            values: list[str] | None = None
            if hint.name == "Literal":
                types = {type(v) for v in hint.of}
                if len(types) != 1:
                    return None, None
                kind = JSON_KINDS[types.pop().__name__]
                values = list(hint.of) if kind == "string" else None
            elif hint.name == "class" and self.read.is_enum(hint.of):
                found = [self.read.attribute(hint.of, m).value for m in self.read.members(hint.of)]
                if len({type(v) for v in found}) != 1 or type(found[0]).__name__ not in JSON_KINDS:
                    return None, None
                kind = JSON_KINDS[type(found[0]).__name__]
                values = found if kind == "string" else None
            elif hint.name == "class" and self.read.is_dataclass(hint.of):
                kind = "object"
            elif hint.name in JSON_KINDS:
                kind = JSON_KINDS[hint.name]
            else:
                return None, None
            kinds.add(kind)
            if kind != "null":
                closed.append(values)
        if closed and all(closed):
            return sorted(kinds), sorted({v for values in closed for v in values or ()})
        return sorted(kinds), None

    def _field_default(self, cls: Class, name: str) -> Any:
        return self.read.default(cls, name)

    def _kwargs(self, cls: Class) -> dict[str, dict[str, Any]]:
        """vLLM's ``get_kwargs``: a dataclass's fields as arguments for argparse."""
        return {
            name: self._argument(cls, name, one, node)
            for name, (one, node) in self.read.fields(cls).items()
        }

    def _argument(self, cls: Class, name: str, one: Class, node: ast.AnnAssign) -> dict[str, Any]:
        hints = list(self.hints(node.annotation, one.module))
        names = {h.name for h in hints}
        given: dict[str, Any] = {"default": self.read.default(cls, name), "help": ""}
        classes = [h.of for h in hints if h.name == "class"]
        literals = [v for h in hints if h.name == "Literal" for v in h.of]
        if any(self.read.is_dataclass(c) for c in classes):
            found = next(c for c in classes if self.read.is_dataclass(c))
            given["type"] = Converter("parse_dataclass", of=found)
        elif names == {"bool", "str", "None"}:
            given |= {"type": Converter("str"), "nargs": "?", "const": True}
        elif "bool" in names:
            given["action"] = Outside("BooleanOptionalAction")
        elif literals:
            given["type"] = Converter(type(literals[0]).__name__)
            if "str" not in names:
                given["choices"] = sorted(literals)
        elif "tuple" in names or "list" in names or "set" in names:
            given |= self._collection(hints)
        elif "int" in names:
            given["type"] = Converter(self._int(name))
        elif "float" in names:
            given["type"] = Converter("float")
        elif "dict" in names and ("str" in names or names - {"dict", "None", "int"}):
            given["type"] = Converter("union_dict_and_str")
        elif "dict" in names:
            given["type"] = Converter("loads")
        else:
            given["type"] = Converter("str")
        if "None" in names and "bool" not in names:
            given["type"] = replace(given["type"], nullable=True)
            if given.get("choices"):
                given["choices"].append(None)
        return given

    def _collection(self, hints: list[_Hint]) -> dict[str, Any]:
        elements = next(h.of for kind in ("tuple", "list", "set") for h in hints if h.name == kind)
        values = [v for h in elements if h.name == "Literal" for v in h.of]
        if values:
            return {
                "type": Converter(type(values[0]).__name__),
                "choices": sorted(values),
                "nargs": "+",
            }
        names = {h.name for h in elements}
        if len(names) == 1 and names <= {"int", "float", "str"}:
            return {"type": Converter(min(names)), "nargs": "+"}
        return {"type": Converter("str" if "str" in names else "unknown"), "nargs": "+"}

    def _int(self, name: str) -> str:
        """vLLM lists the fields that also take 1K and the like."""
        if name == "max_model_len":
            return "human_readable_int_or_auto"
        module = "vllm.engine.arg_utils"
        function = self.read.names(module)["_compute_kwargs"]
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "human_readable_int_args"
            ):
                return (
                    "human_readable_int" if name in self.read.value(node.value, module) else "int"
                )
        return "int"

    def hints(self, node: ast.expr, module: str) -> Iterator[_Hint]:
        """The members of a type hint, aliases resolved."""
        match node:
            case ast.Constant(value=None):
                yield _Hint("None")
            case ast.Constant(value=str(text)):
                yield from self.hints(ast.parse(text, mode="eval").body, module)
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                yield from self.hints(left, module)
                yield from self.hints(right, module)
            case ast.Subscript(value=of, slice=index):
                name = ast.unparse(of).rpartition(".")[2]
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                if name in ("Optional", "Union", "Annotated", "SkipValidation"):
                    for part in parts[:1] if name == "Annotated" else parts:
                        yield from self.hints(part, module)
                    if name == "Optional":
                        yield _Hint("None")
                elif name == "Literal":
                    yield _Hint("Literal", self.read.value(node, module).values)
                else:
                    yield _Hint(
                        name.lower(), tuple(h for part in parts for h in self.hints(part, module))
                    )
            case ast.Name() | ast.Attribute():
                yield from self._named_hints(node, module)

    def _named_hints(self, node: ast.Name | ast.Attribute, module: str) -> Iterator[_Hint]:
        defined, home = None, module
        if isinstance(node, ast.Name):
            home, defined = self._definition(module, node.id)
        if isinstance(defined, ast.ClassDef):
            cls = Class(home, defined, defined.name)
            if any(
                ast.unparse(b).startswith("dict")
                for c in self.read.family(cls)
                for b in c.node.bases
            ):
                yield _Hint("dict")
            else:
                yield _Hint("class", cls)
        elif isinstance(defined, ast.expr):
            yield from self.hints(defined, home)
        else:
            yield _Hint(ast.unparse(node).rpartition(".")[2])

    def _definition(self, module: str, name: str) -> tuple[str, ast.AST | None]:
        node = self.read.names(module).get(name)
        if isinstance(node, ast.ImportFrom) and self.read.has(home := self.read.home(module, node)):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            return self._definition(home, alias.name)
        return module, node

    # Speculation

    def speculative_keys(self) -> dict[str, list[str] | None]:
        """Fields of SpeculativeConfig, with the values of closed sets."""
        cls = self.read.lookup("vllm.config.speculative", "SpeculativeConfig")
        return {name: self._choices(list(self.hints(node.annotation, one.module)))
                for name, (one, node) in self.read.fields(cls).items()}  # fmt: skip

    def _choices(self, hints: list[_Hint]) -> list[str] | None:
        found = [h for h in hints if h.name != "None"]
        if len(found) != 1:
            return None
        if found[0].name == "Literal":
            return [str(v) for v in found[0].of]
        if found[0].name == "class" and self.read.is_enum(found[0].of):
            return self.read.members(found[0].of)
        return None

    def _literal(self, name: str) -> list[str]:
        found = self.read.lookup("vllm.config.speculative", name)
        assert isinstance(found, Literal)
        return list(found.values)

    def methods(self) -> list[str]:
        """Values of ``method``."""
        return self._literal("SpeculativeMethod")

    def mtp_model_types(self) -> list[str]:
        """Draft model types that make the method ``mtp``."""
        return self._literal("MTPModelTypes")

    def mtp_sources(self) -> dict[str, str]:
        """``model_type`` and architecture of targets -> the MTP type that vLLM makes of them."""
        cls = self.read.lookup("vllm.config.speculative", "SpeculativeConfig")
        override = self.read.attribute(cls, "hf_config_override")
        known, out = set(self.mtp_model_types()), {}
        for name in sorted({*self.model_types(), *self.models()}):
            is_class = name[:1].isupper()
            config = _Config("-" if is_class else name, name if is_class else "-")
            try:
                result = self.read.call(override, [config], {})
            except Raised:
                continue
            if getattr(result, "model_type", None) in known:
                out[name] = result.model_type
        return out

    def runner_refusals(self) -> dict[str, dict[str, list[str]]]:
        """Method -> what Model Runner V1 and V2 each say they do not support."""
        cls = self.read.lookup("vllm.config.vllm", "VllmConfig")
        out: dict[str, dict[str, list[str]]] = {}
        for method in self.methods():
            spec = _Plain(method=method, parallel_drafting=method in ("dflash", "dspark"),
                          use_heterogeneous_vocab=False, enable_adaptive_verification=False)  # fmt: skip
            parallel = _Plain(pipeline_parallel_size=1, prefill_context_parallel_size=1, decode_context_parallel_size=1,
                              use_ubatching=False)  # fmt: skip
            config = _Plain(speculative_config=spec, parallel_config=parallel,
                            scheduler_config=_Plain(async_scheduling=False), compilation_config=_Plain())  # fmt: skip
            out[method] = {}
            for runner in ("v1", "v2"):
                rule = self.read.attribute(cls, f"_get_{runner}_model_runner_unsupported_features")
                if isinstance(rule, Function):
                    out[method][runner] = [str(x) for x in self.read.call(rule, [config], {}) or ()]
        return out

    # Models

    def models(self) -> dict[str, tuple[str, str]]:
        """Architecture -> module and class."""
        found = self.read.lookup("vllm.model_executor.models.registry", "_VLLM_MODELS")
        return {name: tuple(entry) for name, entry in found.items()}

    def model_types(self) -> list[str]:
        """``model_type`` of every config.json that can be parsed without code of its own."""
        own = self.read.lookup("vllm.transformers_utils.config", "_CONFIG_REGISTRY")
        return sorted({*own, *self._transformers_types()})

    def _transformers_types(self) -> set[str]:
        module = "transformers.models.auto.configuration_auto"
        scope: dict[str, Any] = {}
        for node in ast.parse(self.texts.get(module, "")).body:
            # In their order: the table is made, added to and made again.
            if "CONFIG_MAPPING_NAMES" in ast.unparse(node)[:400] and not isinstance(
                node, ast.FunctionDef | ast.ClassDef
            ):
                self.read.follow([node], module, scope, None)
        return set(scope.get("CONFIG_MAPPING_NAMES") or ())

    def without_eagle3(self) -> list[str]:
        """Architectures whose class surely lacks the interface of EAGLE3 and DFlash; as the probe finds them."""
        prefix, homes = "vllm.model_executor.models", set()
        bases: dict[str, set[str]] = {name: set() for name in ROOTS}
        for module, text in self.texts.items():
            if not module.startswith(prefix):
                continue
            for name, listed in re.findall(r"^class (\w+)(?:\(([^)]*)\))?:", text, re.MULTILINE):
                bases.setdefault(name, set()).update(
                    re.findall(r"(\w+)\s*(?:\[[^\]]*\])?\s*(?:,|$)", listed)
                )
                homes.add((module, name))

        def family(name: str, seen: set[str]) -> set[str]:
            if name not in seen:
                seen.add(name)
                for base in bases.get(name, ()):
                    family(base, seen)
            return seen

        out = []
        for architecture, (module, name) in self.models().items():
            home = module if module.startswith("vllm.") else f"{prefix}.{module}"
            if (home, name) in homes:
                names = family(name, set())
                if "SupportsEagle3" not in names and names <= bases.keys():
                    out.append(architecture)
        return sorted(out)

    def transformers_architectures(self) -> list[str]:
        """Model classes of Transformers, by what its modules export."""
        found: set[str] = {"AutoModelForCausalLM"}
        for module, text in self.texts.items():
            if module.startswith("transformers.models.") and ".modeling_" in module:
                exported = re.search(
                    r"^__all__\s*=\s*[\[(](.*?)[\])]", text, re.MULTILINE | re.DOTALL
                )
                if exported:
                    found |= set(re.findall(r"[\"'](\w+)[\"']", exported[1]))
        return sorted(n for n in found if n.endswith(("ForCausalLM", "ForConditionalGeneration")))

    def environment_names(self) -> list[str]:
        """The variables that it reads."""
        node = self.read.names("vllm.envs")["environment_variables"]
        assert isinstance(node, ast.Dict)
        return sorted(str(key.value) for key in node.keys if isinstance(key, ast.Constant))


def answers(texts: Texts) -> dict[str, Any]:
    """What the sources of one vLLM answer."""
    return EngineReader(texts).answers()
