"""The plain manifests: they follow from the chart, kustomize builds them, the application takes their configs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from specserve.config.load import load
from tests.chart.rendering import ROOT

K8S = ROOT / "k8s"
KUBECTL = ROOT / ".cache" / "tools" / "kubectl"
PROFILES = [path.stem for path in sorted((K8S / "profiles").glob("*.yaml"))]
CONTAINERS = sorted((K8S / "containers").iterdir())


def documents(profile: str) -> list[dict[str, Any]]:
    out = subprocess.run(
        [str(KUBECTL), "kustomize", str(K8S / profile)], capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr
    return list(yaml.safe_load_all(out.stdout))


def test_manifests_are_fresh() -> None:
    """They are what the chart renders today."""
    argv = [sys.executable, str(ROOT / "scripts" / "render-k8s"), "--check"]
    out = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout + out.stderr


def test_three_profiles() -> None:
    """One GPU, eight GPUs, two machines."""
    assert PROFILES == ["eight-gpus", "single-gpu", "two-nodes"]


@pytest.mark.parametrize("profile", PROFILES)
def test_kustomize_builds_valid_objects(profile: str) -> None:
    """Everything is in the namespace, of the pinned image, valid, and carries nothing of helm's."""
    text = ""
    for document in documents(profile):
        assert document["metadata"]["namespace"] == "specserve"
        if document["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(document, "1.29", strict=True)
        text += yaml.safe_dump(document)
    assert "helm.sh" not in text
    assert set(re.findall(r"image: (\S+)", text)) == {"registry.example/specserve-engine:0.1.0"}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_config_in_it_loads(profile: str, tmp_path: Path) -> None:
    """The application accepts the ConfigMap's file with the pod's variables, as in the pod."""
    found = documents(profile)
    (text,) = [d["data"]["config.yaml"] for d in found if d["kind"] == "ConfigMap"]
    (tmp_path / "config.yaml").write_text(text)
    (workload,) = [d for d in found if d["kind"] in ("Deployment", "LeaderWorkerSet")]
    spec = workload["spec"]
    pod = (
        spec["leaderWorkerTemplate"]["leaderTemplate"]
        if "leaderWorkerTemplate" in spec
        else spec["template"]
    )["spec"]
    secret = tmp_path / "key"
    secret.write_text("k")
    environ = {
        e["name"]: str(secret) if e["name"].endswith("_FILE") else e["value"]
        for e in pod["containers"][0]["env"]
    }
    environ = {k: {"$(LWS_WORKER_INDEX)": "0"}.get(v, v) for k, v in environ.items()}
    settings = load(tmp_path / "config.yaml", environ=environ).settings
    assert settings.server.host == "0.0.0.0"
    assert settings.engine.node_count == (2 if profile == "two-nodes" else 1)


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda p: p.name)
def test_container_files(path: Path) -> None:
    """A base with a version, a user that is not root, and only files that exist."""
    text = path.read_text()
    (base,) = re.findall(r"^FROM (\S+)$", text, re.M)
    assert re.search(r":v?\d+\.\d+", base)
    assert re.search(r"^USER [1-9]\d*$", text, re.M)
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source
