"""Write what follows from our schemas: docs/config.md and docs/result.schema.json.

.venv/bin/python scripts/update_docs.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specserve.bench.result import Result
from specserve.config.schema import Settings

DOCS = Path(__file__).parent.parent / "docs"

HEAD = """# The config file

One YAML file drives `check`, `plan`, `launch`, `bench`, the sidecar and the Helm chart. Precedence, lowest first:
defaults, the file, environment (`SPECSERVE_SERVER__PORT=9000`), `--set server.port=9000`. `specserve config show FILE`
prints what is in force and who said so.

`${VAR}` in a value, wherever that is given, is taken from the environment, `${VAR:-default}` where it may be missing,
`$$` is a dollar sign. A key that ends in `_file` names a file that holds the secret of the key without it, as it is.
Relative paths start at the working directory, `~` is the home folder. Variables and `--set` take YAML:
`--set speculative_decoding.schedule='[[1, 8, 4], [9, 64, 0]]'`. Names below `engine.env` keep their case:
`SPECSERVE_ENGINE__ENV__VLLM_LOGGING_LEVEL=DEBUG`. An item of a list in the file has its number: `--set
alerts.notify[0].url=...`, `SPECSERVE_ALERTS__NOTIFY__0__URL`. Unknown keys are refused.

This page is made from the schema by `scripts/update_docs.py`.
"""

TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def page() -> str:
    """The whole page."""
    schema = Settings.model_json_schema()
    out = [HEAD]
    for name, node in schema["properties"].items():
        section = resolved(node, schema)
        out += [
            f"## {name}",
            "",
            section["description"],
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        out += [row(key, value) for key, value in keys(section, schema, f"{name}.")] + [""]
    return "\n".join(out)


def resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The definition behind a reference; of an optional one, that of its section."""
    for option in [node, *node.get("anyOf", [])]:
        if "$ref" in option:
            return schema["$defs"][option["$ref"].rsplit("/", 1)[-1]]
    return node


def keys(
    section: dict[str, Any], schema: dict[str, Any], prefix: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key below a section, nested ones by their dotted name, those of a list's items behind ``[]``."""
    for name, node in section.get("properties", {}).items():
        inner = resolved(node, schema)
        key, missing = (
            prefix + name,
            {} if name in section.get("required", ()) else {"default": empty(node)},
        )
        if key == "alerts.rules":
            yield from rules(inner, schema)
        elif "properties" in inner:
            yield from keys(inner, schema, f"{key}.")
        else:
            yield key, missing | node
            items = node.get("items", {})
            merged: dict[str, dict[str, Any]] = {}
            for option in items.get("oneOf", [items]):
                for part, described in keys(resolved(option, schema), schema, f"{key}[]."):
                    merged[part] = joined(merged.get(part), described)
            yield from merged.items()


def empty(node: dict[str, Any]) -> Any:
    """What a list or a mapping is when nobody gives it."""
    return [] if node.get("type") == "array" else {}


def joined(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """A key that several kinds of receiver have: all its meanings, any of its fixed values."""
    if one is None:
        return other
    out = one | {
        "description": " / ".join(dict.fromkeys([one["description"], other["description"]]))
    }
    return out | ({"const": f"{one['const']}`, `{other['const']}"} if "const" in one else {})


def rules(section: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys of a built-in alert, once for all alerts: their defaults differ and are in docs/alerts.md."""
    seen = set()
    for node in section["properties"].values():
        for name, described in resolved(node, schema)["properties"].items():
            if name not in seen:
                yield f"alerts.rules.NAME.{name}", described | {"default": "[by alert](alerts.md)"}
            seen.add(name)


def kind(node: dict[str, Any]) -> str:
    """A type as a person says it, with its bounds."""
    if "enum" in node:
        return ", ".join(f"`{v}`" for v in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    if "anyOf" in node or "oneOf" in node:
        return " or ".join(dict.fromkeys(kind(n) for n in node.get("anyOf", node.get("oneOf", []))))
    if "$ref" in node:
        return "section"
    word = {"array": "list", "object": "mapping"}.get(
        node.get("type", ""), TYPES.get(node.get("type", ""), "any")
    )
    if "minimum" in node and "maximum" in node:
        return f"{word} {node['minimum']:g} to {node['maximum']:g}"
    return " ".join(
        [word, *(f"{sign} {node[bound]:g}" for bound, sign in BOUNDS.items() if bound in node)]
    )


def row(key: str, node: dict[str, Any]) -> str:
    """One line of the table."""
    default = "required" if "default" not in node else plain(node["default"])
    meaning = node.get("description", "").replace("|", "\\|")
    return f"| `{key}` | {kind(node)} | {default} | {meaning} |"


def plain(value: Any) -> str:
    """A default as it is written in YAML; a link stays one."""
    if isinstance(value, str) and value.startswith("["):
        return value
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def result_schema() -> str:
    """The JSON Schema of a benchmark result."""
    return json.dumps(Result.model_json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    (DOCS / "config.md").write_text(page(), encoding="utf-8")
    (DOCS / "result.schema.json").write_text(result_schema(), encoding="utf-8")
