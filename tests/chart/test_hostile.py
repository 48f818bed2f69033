"""Each value empty, of a wrong type, too large or at odds with another: refused, or harmless in every object."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Iterator
from functools import cache

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import JsonValue

from tests.chart.matrix import CASES, merged
from tests.chart.rendering import CHART, Values, complete, run_helm
from tests.chart.test_chart import CORE, pod_templates

Path = tuple[str, ...]
HOSTILE: dict[str, JsonValue] = {
    "empty": "",
    "blank": "a b: {c}",
    "long": "x" * 70_000,
    "newline": "a\nb: c",
    "template": "{{ .Values }}",
    "negative": -1,
    "zero": 0,
    "fraction": 1.5,
    "huge": 10**15,
    "true": True,
    "list": ["a"],
    "list of nothing": [{}],
    "mapping": {"a": "b"},
    "mapping of lists": {"a": [1]},
}
ALL_ON = merged(
    [
        "auth",
        "hub",
        "models-claim",
        "pdb",
        "service-monitor",
        "prometheus-rule",
        "dashboards",
        "ingress",
        "http-route",
        "keda",
        "extras",
    ]
)
ALL_ON["metrics"]["podMonitor"] = {"enabled": False}
SENTENCE = re.compile(r"execution error at \(specserve/templates/[^)]*\): \S|- at '[^']*': \S")
"""What we or the schema say; anything else is a template's stack."""


def leaves(node: JsonValue, path: Path = ()) -> Iterator[Path]:
    """Places of values.yaml that hold no mapping of ours."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def put(values: Values, path: Path, value: JsonValue) -> Values:
    """The values with another one at a place."""
    first, *rest = path
    if not rest:
        return {**values, first: value}
    below = values.get(first)
    if not isinstance(below, dict):
        below = {}
    return {**values, first: put(below, tuple(rest), value)}


DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
SECTIONS = [name for name in DEFAULTS if name != "config"]
LEAVES = [path for path in leaves(DEFAULTS) if path[0] != "config"]


def over(base: Values, given: Values) -> Values:
    """Values as helm lays them over the chart's own."""
    out = dict(base)
    for key, value in given.items():
        known = out.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            out[key] = over(known, value)
        else:
            out[key] = value
    return out


@cache
def schema() -> jsonschema.Draft202012Validator:
    """The chart's schema."""
    return jsonschema.Draft202012Validator(json.loads((CHART / "values.schema.json").read_text()))


def accepted(section: str) -> Iterator[tuple[str, Values]]:
    """(name, values) of everything hostile below a section that the schema lets through."""
    rules = schema().evolve(schema=schema().schema["properties"][section])
    for path in LEAVES:
        if path[0] != section:
            continue
        for kind, value in HOSTILE.items():
            values = put(ALL_ON, path, value)
            if rules.is_valid(over(DEFAULTS, values)[section]):
                yield f"{'.'.join(path)} {kind}", values


@cache
def unfit(text: str) -> str | None:
    """Why Kubernetes would not take an object; most are the same in many cases."""
    document = yaml.safe_load(text)
    try:
        if document["apiVersion"] in CORE:
            kubernetes_validate.validate(document, "1.29", strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)[:300]
    return None


def problems(name: str, values: Values) -> str | None:
    """Why it is neither refused by a sentence nor harmless."""
    out = run_helm("template", "chat", str(CHART), values=complete(values))
    if out.returncode:
        return None if SENTENCE.search(out.stderr) else f"{name}: {out.stderr[-300:]}"
    for text in out.stdout.split("\n---\n"):
        try:
            said = unfit(text) if yaml.safe_load(text) else None
        except yaml.YAMLError as error:
            said = str(error)
        if said:
            return f"{name}: {said}"
    return None


@pytest.mark.parametrize("section", SECTIONS)
def test_hostile_values_are_refused_or_harmless(section: str) -> None:
    """What the schema lets through helm refuses with a sentence, or renders as valid objects."""
    found = [problems(name, values) for name, values in accepted(section)]
    assert [said for said in found if said] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_values_that_are_taken_out(section: str) -> None:
    """Null takes a value out of the chart: nothing then is a template's stack."""
    values = ALL_ON
    for path in LEAVES:
        if path[0] == section:
            values = put(values, path, None)
    assert problems(section, values) is None


def test_the_chart_by_itself_rolls_nothing(tmp_path: pathlib.Path) -> None:
    """Another version of the chart leaves every pod as it is; so do replicas, and what is not the pod's."""
    other = tmp_path / "specserve"
    shutil.copytree(CHART, other)
    text = (other / "Chart.yaml").read_text()
    (other / "Chart.yaml").write_text(
        text.replace("\nversion: 0.1.0", "\nversion: 0.1.1").replace(
            "appVersion: 0.1.0", "appVersion: 0.1.9"
        )
    )
    pinned = {"image": {"tag": "0.1.0"}}
    calm: dict[str, Values] = {
        "replicas": {"replicas": 3},
        "service": CASES["load-balancer"]["service"]
        | {"type": "ClusterIP", "loadBalancerSourceRanges": []},
        "monitor": CASES["service-monitor"],
        "rules": CASES["prometheus-rule"],
        "budget": CASES["pdb"],
        "thresholds": {"config": {"alerts": {"acceptance_rate": {"fire_below": 0.2}}}},
    }
    calm["service"] = {"service": calm["service"]}
    before = pods_of(CHART, pinned)
    assert pods_of(other, pinned) == before
    for name, values in calm.items():
        assert pods_of(CHART, pinned | values) == before, name
    for values in ({"config": {"server": {"port": 8001}}}, {"image": {"tag": "0.2.0"}}):
        assert pods_of(CHART, pinned | values) != before


def pods_of(chart: pathlib.Path, values: Values) -> list[Values]:
    """The pod templates of a chart's workloads, which a controller compares."""
    out = run_helm("template", "chat", str(chart), values=complete(values))
    assert out.returncode == 0, out.stderr
    documents = [d for d in yaml.safe_load_all(out.stdout) if d]
    return [template for document in documents for template in pod_templates(document)]
