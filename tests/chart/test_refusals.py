"""What cannot work is refused by `helm install` with a sentence, before a pod exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.chart.matrix import CASES
from tests.chart.rendering import CHART, ROOT, Values, complete, refusal, run_helm

CONFIGS = sorted((ROOT / "tests" / "data" / "configs" / "bad").glob("*.yaml"))
NOT_SEEN = {
    "duplicate-key": "helm's parser keeps the last of two equal keys",
    "open-to-the-network": "the pod listens on every address, behind auth.existingSecret or the NetworkPolicy",
    "variable-not-set": "the variable is the pod's",
    "yaml-tag": "helm drops the tag, and what is left is a plain value",
    "draft-is-target": "two paths that are equal",
    "lookup-min-above-max": "two numbers in the wrong order",
    "max-batch-above-seqs": "two numbers in the wrong order",
    "resolve-below-fire": "two numbers in the wrong order",
    "schedule-gap": "a number that must follow another",
    "schedule-overlap": "a number that must follow another",
}
"""Bad configs that the chart accepts, and why: a schema cannot compare two values of a config.

`specserve launch` refuses what is left of them when the pod starts, with exit code 2.
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_bad_configs_never_reach_a_pod(path: Path, tmp_path: Path) -> None:
    """Every config that the application refuses is refused by helm, where a schema can say it."""
    values = tmp_path / "values.yaml"
    lines = ["config:", *(f"  {line}" for line in path.read_text().splitlines())]
    values.write_text("\n".join(lines) + "\n")
    out = run_helm("template", "chat", str(CHART), "--values", str(values))
    if path.stem in NOT_SEEN:
        assert out.returncode == 0, out.stderr
    else:
        assert out.returncode != 0
        assert re.search(r"config|yaml|YAML", out.stderr), out.stderr


def test_a_file_below_a_variable_is_left_to_the_pod() -> None:
    """What ``${KEYS}`` is, the pod knows; docs/config.md allows it in every value."""
    out = run_helm(
        "template",
        "chat",
        str(CHART),
        values=complete({"config": {"server": {"api_key_file": "${KEYS}/k"}}}),
    )
    assert out.returncode == 0, out.stderr


def test_the_guides_own_config_is_taken_as_it_is() -> None:
    """Nothing of the chart's is merged into a config: a draft model without a method stays one."""
    config = yaml.safe_load((ROOT / "configs" / "field-guide.yaml").read_text())
    out = run_helm("template", "chat", str(CHART), values={"config": config})
    assert out.returncode == 0, out.stderr
    (text,) = [
        d["data"]["config.yaml"]
        for d in yaml.safe_load_all(out.stdout)
        if d and d["kind"] == "ConfigMap"
    ]
    assert yaml.safe_load(text) == config


TWO_GPUS = {"models": {"target_model": {"path": "/models/t", "tensor_parallel_size": 2}}}
BAD: dict[str, tuple[Values, str]] = {
    "gpu-count": (
        {"gpu": {"count": 3}},
        "gpu.count is 3 on 1 node(s), but the config asks for 1 GPUs",
    ),
    "latest": ({"image": {"tag": "latest"}}, "image.tag is 'latest'; name a version"),
    "open": ({"networkPolicy": {"enabled": False}}, "anyone in the cluster could use the model"),
    "grace": (
        {"shutdown": {"gracePeriodSeconds": 60}},
        "preStop and draining take 75 s: running requests would be killed",
    ),
    "pull-locked-in": (
        {"models": {"size": "1Gi", "pull": True}},
        "models.pull must reach something outside, but networkPolicy.egress lets out DNS alone",
    ),
    "hub-locked-in": (
        {"config": {"models": {"target_model": {"path": "Qwen/Qwen3-8B"}}}},
        "config.models.target_model.path, a Hub id, must reach something outside",
    ),
    "alerts-locked-in": (
        {"config": {"alerts": {"notify": [{"type": "alertmanager", "url": "http://am:9093"}]}}},
        "config.alerts.notify must reach something outside",
    ),
    "shared-memory": (
        {"sharedMemory": "32Gi"},
        "resources.limits.memory is 32Gi, and /dev/shm, which counts toward it, may take 32Gi; give more",
    ),
    "shared-memory-units": (
        {"sharedMemory": "1500Mi", "resources": {"limits": {"memory": "1.5G"}}},
        "resources.limits.memory is 1.5G, and /dev/shm, which counts toward it, may take 1500Mi",
    ),
    "liveness": (
        {"probes": {"liveness": {"failureThreshold": 1}}},
        "must be at least 3, or one slow answer restarts",
    ),
    "keda-address": (
        {"autoscaling": {"keda": {"enabled": True}}},
        "autoscaling.keda needs prometheusAddress",
    ),
    "keda-asleep": (
        {
            "autoscaling": {
                "keda": {"enabled": True, "prometheusAddress": "http://p", "minReplicas": 0}
            }
        },
        "pods that are not there report no waiting requests, so nothing would wake them",
    ),
    "two-autoscalers": (
        {
            "autoscaling": {
                "keda": {"enabled": True, "prometheusAddress": "http://p"},
                "hpa": {"enabled": True},
            }
        },
        "two autoscalers of one Deployment fight, keep one",
    ),
    "nodes-uneven": (
        {"leaderWorkerSet": {"enabled": True, "size": 3}, "models": {"existingClaim": "m"}},
        "tensor x pipeline parallelism is 1, which 3 nodes cannot share evenly",
    ),
    "nodes-in-config": (
        {"config": {"engine": {"node_count": 2}}},
        "config.engine.node_count is 2, but 1 node(s) are deployed; set leaderWorkerSet.enabled",
    ),
    "nodes-scaled": (
        {
            "leaderWorkerSet": {"enabled": True},
            "autoscaling": {"hpa": {"enabled": True}},
            "config": TWO_GPUS,
        },
        "autoscaling works on the Deployment; leaderWorkerSet has none",
    ),
    "nodes-canary": (
        {"leaderWorkerSet": {"enabled": True}, "canary": {"enabled": True}, "config": TWO_GPUS}
        | CASES["http-route"],
        "canary.enabled runs one more pod, but the model needs several",
    ),
    "pool-alone": (
        {"inferencePool": {"enabled": True}},
        "inferencePool.enabled needs httpRoute.enabled",
    ),
    "source-elsewhere": (
        {"models": {"size": "1Gi", "pull": True, "sources": {"target": "s3://bucket/llm/big"}}},
        "models.sources.target is copied to /models/llm--big, but config.models.target_model.path is '/models/target'",
    ),
    "source-without-pull": (
        {"models": {"size": "1Gi", "sources": {"target": "s3://bucket/llm/big"}}},
        "models.sources.target is set, but models.pull is not",
    ),
    "two-monitors": (
        {"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}},
        "every sample would be counted twice, keep one",
    ),
    "sidecar-off": (
        {"config": {"sidecar": {"enabled": False}}},
        "config.sidecar.enabled is false, but the pod's probes ask the sidecar",
    ),
    "sidecar-off-by-variable": (
        {"extraEnv": [{"name": "SPECSERVE_SIDECAR__ENABLED", "value": "off"}]},
        "config.sidecar.enabled is false, but the pod's probes ask the sidecar",
    ),
    "service-port": (
        {"service": {"port": 9400}},
        "service.port is 9400, and so is config.sidecar.port",
    ),
    "service-port-of-metrics": (
        {"config": {"server": {"port": 9000}, "sidecar": {"port": 8000}}},
        "service.port is 8000, and so is config.sidecar.port",
    ),
    "port-unknown": (
        {"config": {"server": {"port": "${PORT}"}}},
        "config.server.port is '${PORT}', and the pod's description needs the number",
    ),
    "ranks-unknown": (
        {"config": {"engine": {"extra_args": {"data-parallel-size": "${RANKS}"}}}},
        "config.engine.extra_args has data-parallel-size ${RANKS}, and the pod's GPUs depend on it",
    ),
    "ranks-without-gpus": (
        {"config": {"engine": {"extra_args": {"data-parallel-size": 2}}}, "gpu": {"count": 1}},
        "gpu.count is 1 on 1 node(s), but the config asks for 2 GPUs",
    ),
    "env-of-the-chart": (
        CASES["canary"]
        | {"extraEnv": [{"name": "SPECSERVE_SPECULATIVE_DECODING__ENABLED", "value": "true"}]},
        "extraEnv sets SPECSERVE_SPECULATIVE_DECODING__ENABLED, which differs from pod to pod",
    ),
    "keda-min-above-max": (
        {
            "autoscaling": {
                "keda": {"enabled": True, "prometheusAddress": "http://p", "minReplicas": 5}
            }
        },
        "autoscaling.keda.minReplicas is 5; must be at most maxReplicas (4)",
    ),
    "hpa-min-above-max": (
        {"autoscaling": {"hpa": {"enabled": True, "minReplicas": 3, "maxReplicas": 2}}},
        "autoscaling.hpa.minReplicas is 3; must be at most maxReplicas (2)",
    ),
    "cron-nowhere": (
        {
            "autoscaling": {
                "keda": {"cron": [{"start": "0 6 * * *", "end": "0 20 * * *", "replicas": 2}]}
            }
        },
        "at '/autoscaling/keda/cron/0': missing property 'timezone'",
    ),
    "canary-of-nothing": (
        CASES["canary"] | {"config": {"speculative_decoding": {"enabled": False}}},
        "canary.enabled compares with and without speculation, but config.speculative_decoding.enabled is false",
    ),
    "mount-over-the-pod": (
        {"models": {"existingClaim": "m", "mountPath": "/cache/"}},
        "models.mountPath is /cache/",
    ),
    "route-timeout": (
        {"httpRoute": {"timeouts": {"request": "90"}}},
        "at '/httpRoute/timeouts/request'",
    ),
    "name-is-no-label": ({"nameOverride": "my model!"}, "at '/nameOverride'"),
    "key-by-variable-in-clear": (
        {"config": {"server": {"api_key": "${KEY:-abc}"}}},
        "config.server.api_key holds a secret in clear text",
    ),
    "key-in-clear": (
        {"config": {"server": {"api_key": "abc"}}},
        "config.server.api_key holds a secret in clear text",
    ),
    "token-in-clear": (
        {"extraEnv": [{"name": "T", "value": "hf_abcdefghijklmn"}]},
        "the values hold a Hub token in clear text",
    ),
    "rwo-replicas": (
        {"models": {"size": "1Gi"}, "replicas": 2},
        "models.accessModes is ReadWriteOnce, but more than one pod",
    ),
    "rwo-rolling": (
        {"models": {"size": "1Gi"}, "strategy": {"type": "RollingUpdate"}},
        "models.accessModes is ReadWriteOnce",
    ),
    "pull-nowhere": ({"models": {"pull": True}}, "models.pull needs somewhere to put them"),
    "canary-alone": (
        {"canary": {"enabled": True}},
        "canary.enabled splits traffic by weight, which needs httpRoute.enabled",
    ),
    "ingress-host": ({"ingress": {"enabled": True}}, "ingress.enabled needs ingress.host"),
    "route-gateway": (
        {"httpRoute": {"enabled": True}},
        "httpRoute.enabled needs httpRoute.parentRefs",
    ),
    "typo-chart": ({"replcas": 2}, "additional properties 'replcas' not allowed"),
    "typo-config": (
        {"config": {"models": {"target_model": {"path": "/m", "tensor_parallel_sise": 2}}}},
        "at '/config/models/target_model': additional properties 'tensor_parallel_sise' not allowed",
    ),
    "config-type": (
        {"config": {"server": {"port": "http"}}},
        "at '/config/server/port': 'http' does not match pattern",
    ),
    "config-range": (
        {"config": {"server": {"port": 70000}}},
        "at '/config/server/port': maximum: got 70,000, want 65,535",
    ),
    "config-method": (
        {"config": {"speculative_decoding": {"method": "eagle-3"}}},
        "'/config/speculative_decoding/method'",
    ),
    "size": ({"models": {"size": "much"}}, "at '/models/size'"),
    "pull-policy": ({"image": {"pullPolicy": "Sometimes"}}, "at '/image/pullPolicy'"),
    "release": ({}, "a release named 'vllm' makes Kubernetes set VLLM_PORT"),
    "name-of-a-service": (
        {"fullnameOverride": "7b.chat"},
        "objects would be named '7b.chat', and a Service may not",
    ),
    "gpus-twice": (
        {"resources": {"limits": {"nvidia.com/gpu": 4}}},
        "resources.limits asks for 4 of nvidia.com/gpu; GPUs follow from the config (1 here)",
    ),
    "secret-file": (
        {"config": {"alerts": {"notify": [{"type": "slack", "url_file": "/run/slack"}]}}},
        "config has url_file: /run/slack, which no volume brings into the pod",
    ),
    "rules-cut-off": (
        {"metrics": {"prometheusRule": {"rules": "groups: ["}}},
        "prometheusRule.rules is no rule file",
    ),
    "rules-of-a-list": (
        {"metrics": {"prometheusRule": {"rules": "- a"}}},
        "prometheusRule.rules is no rule file",
    ),
    "suffix-key": (
        {
            "config": {
                "speculative_decoding": {"method": "ngram", "suffix_decoding_max_tree_depth": 4}
            }
        },
        "at '/config/speculative_decoding/suffix_decoding_max_tree_depth': got number, want null",
    ),
}


def test_what_the_environment_may_mend_is_left_to_the_pod() -> None:
    """A variable that lies over the file is seen by the pod alone, so the file by itself is not judged."""
    out = run_helm(
        "template",
        "chat",
        str(CHART),
        values=complete(
            {
                "config": {"speculative_decoding": {"method": "eagle3"}},
                "extraEnv": [
                    {"name": "SPECSERVE_MODELS__DRAFT_MODEL__PATH", "value": "/models/head"}
                ],
            }
        ),
    )
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_refused(name: str) -> None:
    """Bad values fail at install with a sentence that names the value."""
    values, sentence = BAD[name]
    said = refusal(values, release="vllm" if name == "release" else "chat")
    assert sentence in re.sub(r"\s+", " ", said)


@pytest.mark.parametrize(("written", "taken"), [('"0.30"', True), ("0.30", False)])
def test_the_version_of_vllm_is_text(tmp_path: Path, written: str, taken: bool) -> None:
    """Helm reads a bare 0.30 as the number 0.3, so a number is refused; quoted, it reaches the pod as it is."""
    values = tmp_path / "values.yaml"
    values.write_text(
        yaml.safe_dump(complete({"config": {"engine": {"max_num_seqs": 8}}})).replace(
            "max_num_seqs: 8", f"version: {written}"
        )
    )
    out = run_helm("template", "chat", str(CHART), "--values", str(values))
    assert (out.returncode == 0) is taken, out.stderr
    if taken:
        assert re.search(r"""version["']?: ["']0\.30["']""", out.stdout)
    else:
        assert "version" in out.stderr
