"""What cannot work is refused by `helm install` with a sentence, before a pod exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.chart.matrix import CASES, OUT
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
    "live-two-ranks": "a flag of vLLM's, which has many spellings",
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


TARGET: Values = {"target_model": {"path": "/models/target"}}
TWO_GPUS: Values = {"models": {"target_model": {"path": "/models/t", "tensor_parallel_size": 2}}}


def keda(**given: object) -> Values:
    """An autoscaler that works, but for what is given."""
    return CASES["keda"] | {
        "autoscaling": {"keda": CASES["keda"]["autoscaling"]["keda"] | given},
    }


def cron(**given: object) -> Values:
    """The same with times of which one part is given."""
    (known,) = CASES["keda"]["autoscaling"]["keda"]["cron"]
    return keda(cron=[known | given])


def notify(**receiver: str) -> Values:
    """A receiver of alerts that may be reached."""
    return {"config": {"alerts": {"notify": [receiver]}}, "networkPolicy": OUT}


def nodes(size: int, **flags: object) -> Values:
    """A model over several nodes with vLLM's flags."""
    return {
        "leaderWorkerSet": {"enabled": True, "size": size},
        "config": TWO_GPUS | {"engine": {"extra_args": flags}},
    }


BAD: dict[str, tuple[Values, str]] = {
    "hub-into-an-empty-folder": (
        {
            "config": {"models": {"target_model": {"path": "meta-llama/Llama-3.3-70B-Instruct"}}},
            "hub": {"existingSecret": "hf"},
            "networkPolicy": OUT,
        },
        "is the Hub id 'meta-llama/Llama-3.3-70B-Instruct', which every pod would download again",
    ),
    "draft-into-an-empty-folder": (
        {"config": {"models": {**TARGET, "draft_model": {"path": "a/b"}}}, "networkPolicy": OUT},
        "config.models.draft_model.path is the Hub id 'a/b', which every pod would download again",
    ),
    "public-without-a-key": (
        {"service": {"type": "LoadBalancer"}},
        "service.type is LoadBalancer, which lets callers in from outside the cluster",
    ),
    "node-port-without-a-key": (
        {"service": {"type": "NodePort"}},
        "service.type is NodePort, which lets callers in from outside the cluster",
    ),
    "public-and-shut": (
        CASES["load-balancer"] | {"networkPolicy": {}},
        "service.type is LoadBalancer, but networkPolicy lets pods of the namespace alone",
    ),
    "ranges-of-no-balancer": (
        {"service": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}},
        "service.loadBalancerSourceRanges is set, but service.type is ClusterIP",
    ),
    "local-ranks-of-another-world": (
        nodes(2, **{"data-parallel-size": 2, "data-parallel-size-local": 2}),
        "has data-parallel-size-local 2, but each of 2 nodes runs 1 rank(s)",
    ),
    "gpus-of-a-node": (
        nodes(2, dp=4) | {"gpu": {"count": 8}},
        (
            "gpu.count is 8 on 2 node(s), but the config asks for 8 GPUs in all "
            "(tensor_parallel_size x pipeline_parallel_size x data-parallel-size): 4 for each pod"
        ),
    ),
    "cron-in-words": (
        cron(start="6 am"),
        "autoscaling.keda.cron has the start '6 am'; must be minute, hour",
    ),
    "cron-of-hour-25": (cron(end="0 25 * * *"), "autoscaling.keda.cron has the end '0 25 * * *'"),
    "cron-of-six-fields": (
        cron(end="0 0 6 * * *"),
        "autoscaling.keda.cron has the end '0 0 6 * * *'",
    ),
    "cron-in-no-zone": (
        cron(timezone="Europe/Berlim"),
        "autoscaling.keda.cron has the timezone Europe/Berlim, which is unknown",
    ),
    "cron-above-the-most": (
        cron(replicas=9),
        "autoscaling.keda.cron asks for 9 replicas, and maxReplicas is 4",
    ),
    "address-without-scheme": (
        keda(prometheusAddress="prometheus:9090"),
        "at '/autoscaling/keda/prometheusAddress'",
    ),
    "interval-without-unit": (
        {"metrics": {"serviceMonitor": {"enabled": True, "interval": "15"}}},
        "at '/metrics/serviceMonitor/interval'",
    ),
    "budget-of-none": (
        {"podDisruptionBudget": {"enabled": True, "maxUnavailable": 0}},
        "at '/podDisruptionBudget/maxUnavailable'",
    ),
    "budget-of-no-share": (
        {"podDisruptionBudget": {"enabled": True, "maxUnavailable": "0%"}},
        "at '/podDisruptionBudget/maxUnavailable'",
    ),
    "rolling-by-nothing": (
        {
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"},
            }
        },
        "strategy.rollingUpdate has maxSurge 0 and maxUnavailable 0",
    ),
    "recreate-by-rolling": (
        {"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}},
        "strategy.rollingUpdate goes with type RollingUpdate alone",
    ),
    "requests-above-limits": (
        {"resources": {"requests": {"memory": "64Gi"}, "limits": {"memory": "32Gi"}}},
        "resources.requests.memory is 64Gi, and resources.limits.memory 32Gi",
    ),
    "requests-above-limits-of-cpu": (
        {"resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}}},
        "resources.requests.cpu is 1500m, and resources.limits.cpu 1",
    ),
    "cpu-in-words": ({"resources": {"requests": {"cpu": "four"}}}, "at '/resources/requests/cpu'"),
    "label-of-selectors": (
        {"podLabels": {"app.kubernetes.io/name": "evil"}},
        "podLabels sets app.kubernetes.io/name, by which Services",
    ),
    "annotation-of-rollouts": (
        {"podAnnotations": {"checksum/config": "x"}},
        "podAnnotations sets checksum/config, by which a changed config restarts",
    ),
    "volume-twice": (
        {"extraVolumes": [{"name": "cache", "emptyDir": {}}]},
        "extraVolumes has a volume named cache, and so has the pod",
    ),
    "mount-twice": (
        {
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/cache/"}],
        },
        "extraVolumeMounts mounts more at /cache/, which the pod needs for itself",
    ),
    "mount-of-no-volume": (
        {"extraVolumeMounts": [{"name": "more", "mountPath": "/more"}]},
        "extraVolumeMounts mounts more, which is no volume of the pod",
    ),
    "env-without-name": ({"extraEnv": [{"value": "x"}]}, "missing property 'name'"),
    "env-of-a-number": (
        {"extraEnv": [{"name": "A", "value": 1}]},
        "at '/extraEnv/0/value': got number, want string",
    ),
    "env-twice": (
        {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "extraEnv sets A twice",
    ),
    "sidecar-on-loopback": (
        {"extraEnv": [{"name": "SPECSERVE_SIDECAR__HOST", "value": "127.0.0.1"}]},
        "extraEnv sets SPECSERVE_SIDECAR__HOST to 127.0.0.1, where nobody outside the pod",
    ),
    "digest-in-the-repository": (
        {"image": {"repository": f"r.example/x@sha256:{'0' * 64}"}},
        "at '/image/repository'",
    ),
    "tag-in-the-repository": ({"image": {"repository": "r.example/x:1"}}, "at '/image/repository'"),
    "digest-cut-off": ({"image": {"digest": "sha256:abc"}}, "at '/image/digest'"),
    "tag-with-a-blank": ({"image": {"tag": "a b"}}, "at '/image/tag'"),
    "secret-of-no-name": ({"auth": {"existingSecret": "My Key"}}, "at '/auth/existingSecret'"),
    "claim-of-no-name": ({"models": {"existingClaim": "a/b"}}, "at '/models/existingClaim'"),
    "mount-over-the-system": (
        {"models": {"existingClaim": "m", "mountPath": "/usr"}},
        "models.mountPath is /usr, which the pod needs for itself",
    ),
    "pool-with-tls": (
        CASES["inference-pool"] | CASES["tls"],
        "inferencePool.enabled and tls.existingSecret: endpoint pickers read",
    ),
    "long-name": ({"fullnameOverride": "a" * 63}, "at '/fullnameOverride'"),
    "slack-in-clear": (
        notify(type="slack", url="https://hooks.slack.com/services/T0/B0/x"),
        "config.alerts.notify[0].url holds a secret in clear text",
    ),
    "parameter-in-clear": (
        notify(type="webhook", url="https://hook.example/?token=abc"),
        "config.alerts.notify[0].url holds a secret in clear text",
    ),
    "webhook-secret-in-clear": (
        notify(type="webhook", url="https://hook.example/", secret="abcdefgh"),
        "config.alerts.notify[0].secret holds a secret in clear text",
    ),
    "bearer-in-clear": (
        notify(type="alertmanager", url="https://am.example/", bearer_token="abcdefgh"),
        "config.alerts.notify[0].bearer_token holds a secret in clear text",
    ),
    "login-in-clear": (
        notify(type="alertmanager", url="https://me:word@am.example/"),
        "config.alerts.notify[0].url holds a secret in clear text",
    ),
    "engine-env-in-clear": (
        {"config": {"engine": {"env": {"MY_TOKEN": "abcdefgh"}}}},
        "config.engine.env.MY_TOKEN holds a secret in clear text",
    ),
    "extra-args-in-clear": (
        {
            "config": {
                "engine": {"extra_args": {"kv-transfer-config": '{"x": [{"secret_key": 1}]}'}}
            }
        },
        "config.engine.extra_args.kv-transfer-config.x[0].secret_key holds a secret",
    ),
    "env-in-clear": (
        {"extraEnv": [{"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}]},
        "extraEnv sets AWS_SECRET_ACCESS_KEY to a secret in clear text",
    ),
    "argument-in-clear": (
        {"launch": {"extraArgs": ["--set=models.hub_token=abc"]}},
        "launch.extraArgs sets models.hub_token to a secret in clear text",
    ),
    "object-in-clear": (
        {
            "extraObjects": [
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {"name": "k"},
                    "data": {"a": "Yg=="},
                }
            ]
        },
        "extraObjects has a Secret with its data",
    ),
    "login-of-prometheus-in-clear": (
        keda(prometheusAddress="http://me:word@prometheus:9090"),
        "autoscaling.keda.prometheusAddress holds a secret in clear text",
    ),
    "gpu-count": (
        {"gpu": {"count": 3}},
        "gpu.count is 3 on 1 node(s), but the config asks for 1 GPUs in all",
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
        CASES["hub-download"] | {"networkPolicy": {}},
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
        keda(prometheusAddress=""),
        "autoscaling.keda needs prometheusAddress",
    ),
    "keda-unwatched": (
        {"autoscaling": CASES["keda"]["autoscaling"]},
        "autoscaling.keda asks Prometheus for series by the job that a monitor of this chart names",
    ),
    "keda-asleep": (
        keda(minReplicas=0, cron=[]),
        "pods that are not there report no waiting requests, so nothing would wake them",
    ),
    "two-autoscalers": (
        keda() | {"autoscaling": keda()["autoscaling"] | CASES["hpa"]["autoscaling"]},
        "two autoscalers of one Deployment fight, keep one",
    ),
    "nodes-uneven": (
        {"leaderWorkerSet": {"enabled": True, "size": 3}, "models": {"existingClaim": "m"}},
        "the config asks for 1 GPUs (tensor x pipeline x data parallel size), which 3 nodes cannot share",
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
        keda(minReplicas=5),
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
        "extraEnv sets T to a secret in clear text; take it from a Secret",
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
