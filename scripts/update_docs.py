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

`${VAR}` in a value is taken from the environment, `${VAR:-default}` where it may be missing, `$$` is a dollar sign.
A key that ends in `_file` names a file that holds the secret of the key without it. Unknown keys are refused.

This page is made from the schema by `scripts/update_docs.py`.
"""

TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}


def page() -> str:
    """The whole page."""
    schema = Settings.model_json_schema()
    out = [HEAD]
    for name, node in schema["properties"].items():
        section = resolved(node, schema)
        out += [f"## {name}", "", section["description"], "", "| key | type | default | meaning |", "|---|---|---|---|"]
        out += [row(key, value) for key, value in keys(section, schema, f"{name}.")] + [""]
    return "\n".join(out)


def resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The definition behind a reference; of an optional one, that of its section."""
    for option in [node, *node.get("anyOf", [])]:
        if "$ref" in option:
            return schema["$defs"][option["$ref"].rsplit("/", 1)[-1]]
    return node


def keys(section: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key below a section, nested ones by their dotted name."""
    for name, node in section.get("properties", {}).items():
        inner = resolved(node, schema)
        if "properties" in inner:
            yield from keys(inner, schema, f"{prefix}{name}.")
        else:
            yield prefix + name, node


def kind(node: dict[str, Any]) -> str:
    """A type as a person says it."""
    if "enum" in node:
        return ", ".join(f"`{v}`" for v in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    if "anyOf" in node or "oneOf" in node:
        return " or ".join(dict.fromkeys(kind(n) for n in node.get("anyOf", node.get("oneOf", []))))
    if "$ref" in node:
        return "section"
    return {"array": "list", "object": "mapping"}.get(node.get("type", ""), TYPES.get(node.get("type", ""), "any"))


def row(key: str, node: dict[str, Any]) -> str:
    """One line of the table."""
    default = "required" if "default" not in node else f"`{plain(node['default'])}`"
    meaning = node.get("description", "").replace("|", "\\|")
    return f"| `{key}` | {kind(node)} | {default} | {meaning} |"


def plain(value: Any) -> str:
    """A default as it is written in YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def result_schema() -> str:
    """The JSON Schema of a benchmark result."""
    return json.dumps(Result.model_json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    (DOCS / "config.md").write_text(page(), encoding="utf-8")
    (DOCS / "result.schema.json").write_text(result_schema(), encoding="utf-8")
