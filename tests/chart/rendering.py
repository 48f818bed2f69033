"""The real helm over this chart, and what it renders as plain documents."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests import needed

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "specserve"
HELM = ROOT / ".cache" / "tools" / "helm"

Values = dict[str, Any]
CONFIG = {
    "models": {"target_model": {"path": "/models/target"}},
    "speculative_decoding": {"method": "ngram", "num_speculative_tokens": 4},
}
"""What tests serve unless they bring their own target."""


@dataclass(frozen=True)
class Rendered:
    """What `helm template` made."""

    documents: tuple[dict[str, Any], ...]
    text: str

    def of(self, kind: str, name: str | None = None) -> dict[str, Any]:
        """The one document of a kind (and name)."""
        (found,) = [
            d for d in self.documents if d["kind"] == kind and name in (None, d["metadata"]["name"])
        ]
        return found

    def kinds(self) -> list[str]:
        """Kinds of all documents, sorted."""
        return sorted(d["kind"] for d in self.documents)

    def pod(self, kind: str = "Deployment", name: str | None = None) -> dict[str, Any]:
        """The pod of a workload."""
        return self.of(kind, name)["spec"]["template"]["spec"]


def fetch_tools() -> None:
    """Fetch helm and what else comes with it; without it tests are skipped, or fail under scripts/test."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "chart-tools")], capture_output=True, text=True, check=False
    )
    if not HELM.exists():
        needed.missing(f"helm cannot be had (scripts/chart-tools): {done.stderr[-300:]}")


def run_helm(*arguments: str, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    """helm with values on its standard input."""
    given = yaml.safe_dump(values or {}, allow_unicode=True, sort_keys=False)
    argv = [str(HELM), *arguments, "--values", "-"]
    return subprocess.run(
        argv, input=given, capture_output=True, text=True, timeout=60, check=False
    )


def complete(values: Values | None) -> Values:
    """The values, with the sections of a config that theirs lacks."""
    given = dict(values or {})
    return given | {"config": CONFIG | given.get("config", {})}


def template(values: Values | None = None, *extra: str, release: str = "chat") -> Rendered:
    """Render, and fail with helm's own words when it refuses."""
    out = run_helm("template", release, str(CHART), *extra, values=complete(values))
    assert out.returncode == 0, out.stderr
    return Rendered(tuple(d for d in yaml.safe_load_all(out.stdout) if d), out.stdout)


def refusal(values: Values, *, release: str = "chat") -> str:
    """What helm says when it refuses these values."""
    out = run_helm("template", release, str(CHART), values=complete(values))
    assert out.returncode != 0, "helm accepted it"
    return out.stderr
