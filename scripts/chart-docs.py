"""Write what follows from values.yaml and the application's schema: values.schema.json and the chart's README.

.venv/bin/python scripts/chart-docs.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from specserve.config.schema import Settings

CHART = Path(__file__).parent.parent / "helm" / "specserve"
VALUES = CHART / "values.yaml"

OPEN = {
    "nodeSelector", "affinity", "podAnnotations", "podLabels", "podSecurityContext", "securityContext", "annotations",
    "labels", "resources", "strategy",
}  # fmt: skip
"""Objects that Kubernetes defines: any key goes."""
LISTS_OF_OBJECTS = {
    "imagePullSecrets", "extraEnv", "extraVolumes", "extraVolumeMounts", "tolerations", "topologySpreadConstraints",
    "apiFrom", "metricsFrom", "egress", "parentRefs", "cron", "extraObjects",
}  # fmt: skip
NULLABLE = {
    "gpu.count": "integer",
    "probes.startup.extraSeconds": "integer",
    "sharedMemory": "string",
    "shutdown.gracePeriodSeconds": "integer",
    "autoscaling.keda.tokensPerSecond": "number",
}
QUANTITY = r"[0-9.]+([kMGTPE]|[KMGTPE]i)?"
DURATION = {
    "description": "E.g. 90s or 10m.",
    "type": "string",
    "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$",
}
"""Gateway API: GEP-2257."""
CRON = {"timezone": {"type": "string", "minLength": 1}, "start": {"type": "string", "minLength": 1}}
CRON |= {"end": CRON["start"], "replicas": {"type": "integer", "minimum": 1}}
BOUNDS: dict[str, dict[str, Any]] = {
    "replicas": {"minimum": 0},
    "nameOverride": {"pattern": "^$|^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.repository": {"minLength": 1},
    "strategy": {"properties": {"type": {"enum": ["Recreate", "RollingUpdate"]}}},
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "service.port": {"minimum": 1, "maximum": 65535},
    "models.mountPath": {"pattern": "^/"},
    "models.size": {"pattern": f"^$|^{QUANTITY}$"},
    "cache.sizeLimit": {"pattern": f"^{QUANTITY}$"},
    "sharedMemory": {"pattern": f"^{QUANTITY}$"},
    "models.accessModes": {
        "items": {"enum": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"]},
        "minItems": 1,
    },
    "probes.startup.periodSeconds": {"minimum": 1},
    "probes.startup.extraSeconds": {"minimum": 0},
    "probes.readiness.periodSeconds": {"minimum": 1},
    "probes.readiness.failureThreshold": {"minimum": 1},
    "probes.liveness.periodSeconds": {"minimum": 1},
    "shutdown.preStopSeconds": {"minimum": 0},
    "leaderWorkerSet.size": {"minimum": 2},
    "models.sources.target": {"pattern": "^$|^[a-z0-9+]+://"},
    "models.sources.draft": {"pattern": "^$|^[a-z0-9+]+://"},
    "inferencePool.endpointPickerPort": {"minimum": 1, "maximum": 65535},
    "canary.weight": {"minimum": 1, "maximum": 50},
    "gpu.count": {"minimum": 1},
    "autoscaling.keda.minReplicas": {"minimum": 0},
    "autoscaling.keda.maxReplicas": {"minimum": 1},
    "autoscaling.keda.waitingRequests": {"type": "number", "exclusiveMinimum": 0},
    "autoscaling.keda.cooldownSeconds": {"minimum": 0},
    "autoscaling.keda.cron": {
        "items": {
            "type": "object",
            "properties": CRON,
            "required": [*CRON],
            "additionalProperties": False,
        }
    },
    "autoscaling.hpa.minReplicas": {"minimum": 1},
    "autoscaling.hpa.maxReplicas": {"minimum": 1},
    "autoscaling.hpa.waitingRequests": {
        "type": ["number", "string"],
        "exclusiveMinimum": 0,
        "pattern": "^[0-9.]+(m|[kMGTPE])?$",
    },
    "podDisruptionBudget.maxUnavailable": {
        "type": ["integer", "string"],
        "minimum": 0,
        "pattern": "^[0-9]+%$",
    },
    "httpRoute.timeouts": {"properties": {"request": DURATION, "backendRequest": DURATION}},
}


def comments() -> dict[int, str]:
    """Line of a key -> the ``# --`` sentence above it."""
    out: dict[int, str] = {}
    above = ""
    for number, line in enumerate(VALUES.read_text().splitlines(), 1):
        text = line.strip()
        if text.startswith("# -- "):
            above = text[5:]
        elif text and not text.startswith("#"):
            if above:
                out[number] = above
            above = ""
    return out


def described(node: yaml.MappingNode, path: str = "") -> dict[str, str]:
    """Dotted key -> its sentence."""
    said, out = comments(), {}
    for key, value in node.value:
        here = f"{path}.{key.value}" if path else key.value
        if (line := key.start_mark.line + 1) in said:
            out[here] = said[line]
        if isinstance(value, yaml.MappingNode) and here != "config":
            out |= described(value, here)
    return out


def schema_of(value: Any, path: str, said: dict[str, str]) -> dict[str, Any]:
    """JSON Schema of one value: its type, closed unless Kubernetes defines what is in it."""
    name = path.rsplit(".", 1)[-1]
    out: dict[str, Any] = {"description": said[path]} if path in said else {}
    if path in NULLABLE:
        out["type"] = [NULLABLE[path], "null"]
    elif isinstance(value, bool):
        out["type"] = "boolean"
    elif isinstance(value, int):
        out["type"] = "integer"
    elif isinstance(value, float):
        out["type"] = "number"
    elif isinstance(value, str):
        out["type"] = "string"
    elif isinstance(value, list):
        out |= {
            "type": "array",
            "items": {"type": "object"} if name in LISTS_OF_OBJECTS else {"type": "string"},
        }
    elif name in OPEN:
        out["type"] = "object"
    else:
        out |= {"type": "object", "additionalProperties": False}
        out["properties"] = {
            k: schema_of(v, f"{path}.{k}" if path else k, said) for k, v in value.items()
        }
    return out | BOUNDS.get(path, {})


WRITTEN = {
    "integer": r"^ *[-+]?[0-9]+ *$",
    "number": r"^ *[-+]?[0-9.]+([eE][-+]?[0-9]+)? *$",
    "boolean": "^([Tt]rue|TRUE|[Ff]alse|FALSE|[Yy]es|[Nn]o|[Oo]n|[Oo]ff|[01])$",
}
"""What the application reads from text, as a quoted value is."""
REFERENCE = r"\$\{"


def as_written(node: Any) -> Any:
    """The application's schema with what stands for a value: text that it reads as one, and ${NAME}."""
    if isinstance(node, list):
        return [as_written(each) for each in node]
    if not isinstance(node, dict):
        return node
    out = {key: as_written(value) if key != "default" else value for key, value in node.items()}
    kind = node.get("type")
    if isinstance(kind, str) and kind in WRITTEN:
        out |= {"type": [kind, "string"], "pattern": f"{WRITTEN[kind]}|{REFERENCE}"}
    elif isinstance(node.get("enum"), list):
        rest = {key: out.pop(key) for key in ("enum", "type") if key in out}
        out["anyOf"] = [rest, {"type": "string", "pattern": REFERENCE}]
    return out


def values_schema() -> str:
    """The chart's schema, with the application's own for `config`."""
    values = yaml.safe_load(VALUES.read_text())
    node = yaml.compose(VALUES.read_text())
    assert isinstance(node, yaml.MappingNode)
    said = described(node)
    application = as_written(Settings.model_json_schema(ref_template="#/$defs/{model}"))
    definitions = application.pop("$defs")
    application.pop(
        "required"
    )  # an empty config has a sentence of its own, in templates/_config_checks.tpl
    values.pop("config")
    schema = schema_of(values, "", said)
    schema["properties"] = {
        "config": application,
        **schema["properties"],
        "global": {"type": "object"},
    }
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "$defs": definitions,
    }
    return json.dumps(whole, indent=2) + "\n"


def readme() -> str:
    """The chart's README: how to install it, and every value."""
    values = yaml.safe_load(VALUES.read_text())
    node = yaml.compose(VALUES.read_text())
    assert isinstance(node, yaml.MappingNode)
    rows = []
    for key, sentence in described(node).items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        is_section = key == "config" or (isinstance(value, dict) and bool(value))
        default = "see values.yaml" if is_section else json.dumps(value)
        rows.append(f"| `{key}` | {sentence} | `{default}` |")
    return (CHART / "README.md.in").read_text().replace("{{values}}", "\n".join(rows))


def main() -> int:
    """Write, or with --check tell what is stale."""
    stale = []
    for name, text in (("values.schema.json", values_schema()), ("README.md", readme())):
        path = CHART / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}; run scripts/chart-docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
