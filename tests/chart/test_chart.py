"""The chart with the real helm: every toggle renders valid objects, and what cannot work is refused by a sentence."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests import needed
from tests.chart.matrix import CASES, GATEWAY, OUT, merged
from tests.chart.rendering import CHART, HELM, ROOT, Rendered, Values, complete, run_helm, template

PROBES = {"startupProbe", "readinessProbe", "livenessProbe"}
VERSIONS = ("1.29.0", "1.32.0", "1.35.0")
MONITORED = {"metrics": CASES["prometheus-rule"]["metrics"] | {"serviceMonitor": {"enabled": True}}}
CORE = {"apps/v1", "v1", "policy/v1", "networking.k8s.io/v1", "autoscaling/v2"}


@pytest.fixture(scope="module", params=CASES, ids=str)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """Each combination of toggles, rendered once."""
    return template(CASES[request.param])


def test_lint_is_clean() -> None:
    """helm lint --strict finds nothing in the defaults and in every ci file."""
    for path in [None, *sorted((CHART / "ci").glob("*-values.yaml"))]:
        values = yaml.safe_load(path.read_text()) if path else None
        out = run_helm("lint", "--strict", str(CHART), values=values)
        assert out.returncode == 0, f"{path}: {out.stdout}"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_supported_version_renders(version: str) -> None:
    """The chart renders for the oldest and the newest Kubernetes that it names."""
    assert template(None, "--kube-version", version).documents


def test_an_old_kubernetes_is_refused() -> None:
    """A cluster that is too old is told so."""
    out = run_helm("template", "chat", str(CHART), "--kube-version", "1.28.0")
    assert "incompatible with Kubernetes" in out.stderr


def test_objects_are_valid(rendered: Rendered) -> None:
    """Every core object passes strict validation: no unknown field, no wrong type."""
    for document in rendered.documents:
        if document["apiVersion"] in CORE:
            kubernetes_validate.validate(document, "1.29", strict=True)
        for template_ in pod_templates(document):
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "x"} | template_["metadata"],
            }
            kubernetes_validate.validate(pod | {"spec": template_["spec"]}, "1.29", strict=True)


def test_custom_objects_are_valid(rendered: Rendered) -> None:
    """Objects of the Prometheus operator and of KEDA fit the models published for them, every field of theirs."""
    from cloudcoil.models.keda import v1alpha1
    from cloudcoil.models.prometheus_operator import v1

    models = {
        "ServiceMonitor": v1.ServiceMonitor,
        "PodMonitor": v1.PodMonitor,
        "PrometheusRule": v1.PrometheusRule,
    }
    models["ScaledObject"] = v1alpha1.ScaledObject
    for document in rendered.documents:
        if (model := models.get(document["kind"])) is not None:
            understood = model.model_validate(document).model_dump(
                by_alias=True, exclude_unset=True, mode="json"
            )
            for spec in (understood["spec"], document["spec"]):
                spec.get("fallback", {}).pop(
                    "behavior", None
                )  # the models of KEDA 2.16 do not have it yet
            assert understood["spec"] == document["spec"]


HTTP_ROUTE = """
import { readFileSync } from "node:fs";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1";
new HTTPRoute(JSON.parse(readFileSync(0, "utf8"))).validate();
"""


@pytest.mark.needs("node")
@pytest.mark.parametrize("case", ["http-route", "canary", "inference-pool"])
def test_http_routes_are_valid(case: str) -> None:
    """HTTPRoutes fit the published model of the Gateway API; it checks types, not unknown fields."""
    folder = HELM.parent
    if not (folder / "node_modules").exists():
        needed.missing("the models of the Gateway API cannot be had (scripts/chart-tools)")
    route = template(CASES[case]).of("HTTPRoute")
    argv = ["node", "--input-type=module", "--eval", HTTP_ROUTE]
    out = subprocess.run(
        argv, cwd=folder, input=json.dumps(route), text=True, capture_output=True, check=False
    )
    assert out.returncode == 0, out.stderr


def pods(rendered: Rendered) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(workload, pod spec) of everything that runs pods."""
    for document in rendered.documents:
        for template_ in pod_templates(document):
            yield document, template_["spec"]


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a workload; none for everything else."""
    if document["kind"] == "Deployment":
        return [document["spec"]["template"]]
    if document["kind"] == "LeaderWorkerSet":
        group = document["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return []


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_selectors_find_their_pods(rendered: Rendered) -> None:
    """Workloads, Services, budgets, policies and monitors select labels that pods have, and never version labels."""
    labels = [t["metadata"]["labels"] for d in rendered.documents for t in pod_templates(d)]
    for document in rendered.documents:
        spec = document.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector") or {}
        wanted = selector.get("matchLabels", selector)
        if document["kind"] in (
            "Deployment",
            "Service",
            "PodDisruptionBudget",
            "NetworkPolicy",
            "PodMonitor",
        ):
            assert any(wanted.items() <= have.items() for have in labels), document["metadata"][
                "name"
            ]
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(wanted)


def test_named_ports_exist(rendered: Rendered) -> None:
    """Every port named by a probe, or by a Service that selects the pod, is a port of the container."""
    services = [d for d in rendered.documents if d["kind"] == "Service"]
    for template_ in [t for d in rendered.documents for t in pod_templates(d)]:
        (container,) = template_["spec"]["containers"]
        names = {p["name"] for p in container.get("ports", [])}
        assert {container[probe]["httpGet"]["port"] for probe in PROBES & set(container)} <= names
        for service in services:
            if service["spec"]["selector"].items() <= template_["metadata"]["labels"].items():
                assert {p["targetPort"] for p in service["spec"]["ports"]} <= names


def test_probes_have_one_handler(rendered: Rendered) -> None:
    """A probe asks in exactly one way; liveness never kills before three failures."""
    for _, pod in pods(rendered):
        for container in pod["containers"]:
            assert PROBES & set(container) in (PROBES, set())
            for name in PROBES & set(container):
                assert len({"httpGet", "exec", "tcpSocket", "grpc"} & set(container[name])) == 1
            assert container.get("livenessProbe", {"failureThreshold": 3})["failureThreshold"] >= 3


def test_names_and_quantities(rendered: Rendered) -> None:
    """Names are DNS labels, quantities are quantities."""
    for document in rendered.documents:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", document["metadata"]["name"])
        assert len(document["metadata"]["name"]) <= 63
    for _, pod in pods(rendered):
        for container in containers(pod):
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", container["name"])
            for amounts in container["resources"].values():
                for amount in amounts.values():
                    assert re.fullmatch(r"[0-9.]+(m|[KMGTPE]i?)?", str(amount))


def test_mounts_have_volumes(rendered: Rendered) -> None:
    """Every mount names a volume of the pod, and every volume but extra ones is mounted."""
    for _, pod in pods(rendered):
        volumes = {v["name"] for v in pod["volumes"]}
        mounted = {m["name"] for c in containers(pod) for m in c["volumeMounts"]}
        assert mounted == volumes


def test_least_privilege(rendered: Rendered) -> None:
    """Non-root, read-only root where no GPU is asked for, no capabilities, no token, no service links, no Secret's content anywhere."""
    assert "Secret" not in rendered.kinds()
    assert not {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} & set(rendered.kinds())
    for _, pod in pods(rendered):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "hostNetwork" not in pod
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            asks = "nvidia.com/gpu" in container["resources"]["limits"]
            assert context["readOnlyRootFilesystem"] is not asks
            assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("case", ["metrics-token", "metrics-token-of-pods"])
def test_readers_of_metrics_send_the_token(case: str) -> None:
    """The sidecar asks for the token of a Secret, and the monitor takes it from the same one."""
    made = template(CASES[case])
    (engine,) = made.pod()["containers"]
    path = "/etc/specserve/secrets/metrics/token"
    assert {"name": "SPECSERVE_SIDECAR__TOKEN_FILE", "value": path} in engine["env"]
    (monitor,) = [d["spec"] for d in made.documents if d["kind"].endswith("Monitor")]
    (endpoint,) = monitor.get("endpoints") or monitor["podMetricsEndpoints"]
    assert endpoint["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "readers", "key": "token"},
    }


def test_off_means_no_document() -> None:
    """The defaults render what is needed and nothing else."""
    assert template().kinds() == [
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "Service",
        "Service",
        "ServiceAccount",
    ]


CONFIG = {
    "models": {"target_model": {"path": '/models/it\'s "quoted"', "revision": "0123"}},
    "server": {"max_concurrent_requests": 1000000, "served_model_name": "名前 {braces} $VAR"},
    "speculative_decoding": {"method": "ngram", "num_speculative_tokens": 4},
    "engine": {
        "extra_args": {
            "chat-template": "{% for m in messages %}\n{{ m }}\n{% endfor %}",
            "json": {"a": [1, 2.5, None, True]},
        },
        "env": {"X": "line one\nline two: yes", "HASH": "# no comment", "Z": "0x10"},
    },
}


def test_the_config_arrives_as_it_was_written() -> None:
    """Quotes, newlines, braces, Unicode and large numbers of the config survive the chart."""
    document = template({"config": CONFIG}).of("ConfigMap")
    assert yaml.safe_load(document["data"]["config.yaml"]) == CONFIG


def test_a_changed_config_rolls_the_pods() -> None:
    """The checksum annotation follows the config and nothing else."""

    def checksum(values: Values) -> str:
        template_ = template(values).of("Deployment")["spec"]["template"]
        return template_["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({"replicas": 2})
    assert checksum({}) != checksum({"config": {"server": {"port": 8001}}})


def test_every_repository_config_is_a_chart_config() -> None:
    """What is in configs/ can be pasted under `config:` unchanged."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        values: Values = {
            "config": config,
            "networkPolicy": OUT,
            "models": {"size": "1Ti", "pull": True},
        }
        assert yaml.safe_load(template(values).of("ConfigMap")["data"]["config.yaml"]) == config


def test_gpus_and_time_follow_from_the_config() -> None:
    """GPUs from TP x PP, grace from the drain time, startup from the start time-out, shared memory from the GPUs."""
    config: Values = {
        "models": {
            "target_model": {"path": "/m", "tensor_parallel_size": 4, "pipeline_parallel_size": 2}
        },
        "engine": {"drain_timeout_seconds": 120, "startup_timeout_seconds": 600},
    }
    pod = template({"config": config}).pod()
    (engine,) = pod["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert pod["terminationGracePeriodSeconds"] == 15 + 120 + 45
    assert (
        engine["startupProbe"]["failureThreshold"] * engine["startupProbe"]["periodSeconds"]
        == 600 + 120
    )
    assert {v["name"]: v for v in pod["volumes"]}["shm"]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "10Gi",
    }
    config["models"]["target_model"]["sha256"] = (
        "0" * 64
    )  # preflight hashes the checkpoint before the engine starts
    (engine,) = template({"config": config}).pod()["containers"]
    assert (
        engine["startupProbe"]["failureThreshold"] * engine["startupProbe"]["periodSeconds"]
        == 600 + 1800
    )
    (engine,) = template({"config": config, "probes": {"startup": {"extraSeconds": 60}}}).pod()[
        "containers"
    ]
    assert (
        engine["startupProbe"]["failureThreshold"] * engine["startupProbe"]["periodSeconds"]
        == 600 + 60
    )


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ({"data-parallel-size": 2}, "4"),
        ({"--data_parallel_size": "4"}, "8"),
        ({"dp": 3}, "6"),
        ({"data-parallel-size": 8, "data-parallel-size-local": 2}, "4"),
        ({"data-parallel-size": 8, "data-parallel-rank": 1}, "2"),
        ({"data-parallel-size": None}, "2"),
    ],
)
def test_every_data_parallel_rank_has_gpus(flags: Values, gpus: str) -> None:
    """The pod asks for TP x PP of each rank that its engine runs; gpu.count is compared with that."""
    config = {
        "models": {"target_model": {"path": "/m", "tensor_parallel_size": 2}},
        "engine": {"extra_args": flags},
    }
    (engine,) = template({"config": config, "gpu": {"count": int(gpus)}}).pod()["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == gpus


def test_a_config_means_the_same_as_to_the_application() -> None:
    """Quoted numbers and references are taken; what the pod's description needs of them comes from extraEnv."""
    config = {
        "models": {"target_model": {"path": "${MODEL}", "tensor_parallel_size": "2"}},
        "server": {"port": "${PORT}", "api_key": "${KEY}"},
        "sidecar": {
            "port": "${METRICS:-9500}",
            "enabled": "true",
            "canary_timeout_seconds": "${T}",
        },
        "engine": {"startup_timeout_seconds": "1000", "max_num_seqs": "${SEQS}"},
        "speculative_decoding": {"enabled": "yes", "method": "${METHOD}", "max_batch_size": 32},
    }
    key = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    env = [
        {"name": "PORT", "value": "8100"},
        {"name": "SPECSERVE_ENGINE__DRAIN_TIMEOUT_SECONDS", "value": "30"},
        key,
    ]
    values: Values = {"config": config, "extraEnv": env, "networkPolicy": {"enabled": False}}
    rendered = template(values)
    assert yaml.safe_load(rendered.of("ConfigMap")["data"]["config.yaml"]) == config
    (engine,) = rendered.pod()["containers"]
    assert [p["containerPort"] for p in engine["ports"]] == [8100, 9500]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "SPECSERVE_SERVER__ALLOW_UNAUTHENTICATED" not in [e["name"] for e in engine["env"]]
    assert rendered.pod()["terminationGracePeriodSeconds"] == 15 + 30 + 45


def test_no_variable_stands_twice() -> None:
    """What extraEnv says takes the place of what the chart says, in every container."""
    own = [{"name": "HF_HOME", "value": "/models/hf"}, {"name": "HF_HUB_OFFLINE", "value": "0"}]
    pod = template(CASES["models-pull"] | {"extraEnv": own}).pod()
    for container in containers(pod):
        names = [e["name"] for e in container["env"]]
        assert len(names) == len(set(names))
        assert all(variable in container["env"] for variable in own)


def test_quantities_that_kubernetes_takes() -> None:
    """Shares, fractions and large units are no typing errors."""
    values: Values = {
        "podDisruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
        "autoscaling": {"hpa": {"enabled": True, "waitingRequests": "500m"}},
        "resources": {"limits": {"memory": "1Pi"}},
        "models": {"size": "1Ei", "accessModes": ["ReadWriteMany"]},
    }
    rendered = template(values)
    assert rendered.of("PodDisruptionBudget")["spec"]["maxUnavailable"] == "50%"
    (metric,) = rendered.of("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "500m"
    assert template({"autoscaling": {"hpa": {"enabled": True, "waitingRequests": 0.5}}}).documents


def test_long_names_stay_labels() -> None:
    """A label has 63 characters at most, and a trailing slash is no part of a folder's name."""
    source = {
        "size": "1Gi",
        "pull": True,
        "mountPath": "/models/",
        "sources": {"target": "s3://b/llm/big"},
    }
    values: Values = {"nameOverride": "a" * 70, "models": source, "networkPolicy": OUT}
    values["config"] = {"models": {"target_model": {"path": "/models/llm--big"}}}
    rendered = template(values)
    for document in rendered.documents:
        assert all(len(value) <= 63 for value in document["metadata"]["labels"].values())
    mounts = [
        m["mountPath"]
        for c in containers(rendered.pod())
        for m in c["volumeMounts"]
        if m["name"] == "models"
    ]
    assert mounts == ["/models", "/models"]


def test_a_budget_counts_no_canary() -> None:
    """The canary's pod is no replica: losing it must not use up the budget, nor stand in for one."""
    selector = template(CASES["pdb"]).of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert selector["app.kubernetes.io/component"] == "engine"
    group = template(CASES["several-nodes"] | CASES["pdb"]).of("PodDisruptionBudget")["spec"][
        "selector"
    ]["matchLabels"]
    assert "app.kubernetes.io/component" not in group


def test_two_releases_have_their_own_dashboards() -> None:
    """Grafana's sidecar writes each key into one folder; two releases must not write the same file."""
    keys = [
        key
        for release in ("one", "two")
        for d in template(CASES["dashboards"], release=release).documents
        if d["kind"] == "ConfigMap"
        for key in d["data"]
        if key.endswith(".json")
    ]
    assert len(set(keys)) == len(keys) == 6


def test_without_a_key_the_policy_guards() -> None:
    """Without a key the pod says so to the application; with one, the key comes from a mounted Secret."""

    def env(values: Values) -> dict[str, str]:
        return {
            e["name"]: e.get("value", "") for e in template(values).pod()["containers"][0]["env"]
        }

    assert env({})["SPECSERVE_SERVER__ALLOW_UNAUTHENTICATED"] == "true"
    keyed = env({"auth": {"existingSecret": "s", "key": "k"}})
    assert keyed["SPECSERVE_SERVER__API_KEY_FILE"] == "/etc/specserve/secrets/api/k"
    assert "SPECSERVE_SERVER__ALLOW_UNAUTHENTICATED" not in keyed


def test_the_canary_differs_in_speculation_alone() -> None:
    """The canary is the same pod with speculation off, behind its share of the traffic."""
    rendered = template(CASES["canary"])
    main, canary = rendered.pod(name="chat-specserve"), rendered.pod(name="chat-specserve-canary")
    off = {"name": "SPECSERVE_SPECULATIVE_DECODING__ENABLED", "value": "false"}
    assert off in canary["containers"][0]["env"]
    canary["containers"][0]["env"].remove(off)
    assert canary == main
    (rule,) = rendered.of("HTTPRoute")["spec"]["rules"]
    assert [(b["name"], b["weight"]) for b in rule["backendRefs"]] == [
        ("chat-specserve", 90),
        ("chat-specserve-canary", 10),
    ]


def test_several_nodes_are_one_group() -> None:
    """The leader alone has probes and ports; a worker is told its rank, takes its part of the GPUs and leaves last."""
    group = template(CASES["several-nodes"]).of("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    (leader,), (worker,) = (
        group[f"{role}Template"]["spec"]["containers"] for role in ("leader", "worker")
    )
    assert not (PROBES | {"ports"}) & set(worker)
    own = PROBES | {"ports", "lifecycle"}
    assert {k: v for k, v in leader.items() if k not in own} == {
        k: v for k, v in worker.items() if k not in own
    }
    env = {
        e["name"]: e["value"] for e in worker["env"] if "NODE" in e["name"] or "LEADER" in e["name"]
    }
    assert env == {
        "SPECSERVE_ENGINE__NODE_COUNT": "2",
        "SPECSERVE_ENGINE__NODE_RANK": "$(LWS_WORKER_INDEX)",
        "SPECSERVE_ENGINE__LEADER_ADDRESS": "$(LWS_LEADER_ADDRESS)",
    }
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "8"
    sleeps = [c["lifecycle"]["preStop"]["exec"]["command"][1] for c in (leader, worker)]
    assert sleeps == ["15", "75"]


@pytest.mark.parametrize("release", ["chat", "r" * 53])
def test_the_leader_is_found_before_it_is_ready(release: str) -> None:
    """LWS makes the headless Service that publishes pods that are not ready only where its name is free."""
    rendered = template(CASES["several-nodes"], release=release)
    name = rendered.of("LeaderWorkerSet")["metadata"]["name"]
    services = [d["metadata"]["name"] for d in rendered.documents if d["kind"] == "Service"]
    assert not [service for service in services if re.fullmatch(rf"{name}(-\d+)?", service)]
    assert len(f"{name}-99-0123456789") <= 63  # the label of a StatefulSet's revision
    assert len(f"{name}-99-99") <= 63  # a pod's host name


def test_pulled_models_are_found_offline() -> None:
    """Hub ids go into a cache on the volume that the engine reads offline; object stores to the config's own path."""
    pod = template(CASES["models-pull"]).pod()
    (pull,), (engine,) = pod["initContainers"], pod["containers"]
    for container in (pull, engine):
        assert {"name": "HF_HUB_CACHE", "value": "/models/huggingface"} in container["env"]
        assert {
            "name": "SPECSERVE_MODELS__HUB_TOKEN_FILE",
            "value": "/etc/specserve/secrets/hub/token",
        } in container["env"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in engine["env"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} not in pull["env"]
    writable = [
        [m["readOnly"] for m in c["volumeMounts"] if m["name"] == "models"] for c in (pull, engine)
    ]
    assert writable == [[False], [True]]
    (pull,) = template(CASES["models-store"]).pod()["initContainers"]
    assert {"name": "SPECSERVE_MODELS__TARGET_MODEL__PATH", "value": "s3://bucket/llm/big"} in pull[
        "env"
    ]
    assert {"name": "SPECSERVE_MODELS__STORE", "value": "/models"} in pull["env"]


@pytest.mark.needs("promtool")
def test_speculation_that_does_not_pay_is_an_alert(tmp_path: Path) -> None:
    """With the canary pair, an alert fires after 15 minutes of slower tokens with speculation; none while it pays."""
    rule = template(CASES["canary"] | MONITORED, "--namespace", "llm").of(
        "PrometheusRule", "chat-specserve-canary"
    )
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    labels = 'namespace="llm", job="{2}", pod="{0}", instance="{0}", model_name="{1}"'
    series = []
    for model, slow, job in (
        ("pays", 0.01, "chat-specserve-metrics"),
        ("costs", 0.03, "llm/chat-specserve"),
        ("pays", 0.09, "other-specserve-metrics"),
    ):
        for pod, asks, seconds in ((f"{job}-on", 1, slow), (f"{job}-off", 0, 0.02)):
            own = labels.format(
                pod, model, job if asks or "/" in job else job.replace("metrics", "canary-metrics")
            )
            tpot = f'specserve_time_per_output_token_seconds{{{own}, window="5m", stat="mean"}}'
            series.append({"series": tpot, "values": f"{seconds}+0x30"})
            series.append(
                {"series": f"specserve_speculation_configured{{{own}}}", "values": f"{asks}+0x30"}
            )
    found = {
        "severity": "warning",
        "namespace": "llm",
        "job": "chat-specserve",
        "model_name": "costs",
    }
    (alert,) = [r for r in rule["spec"]["groups"][0]["rules"] if "alert" in r]
    said = alert["annotations"] | {
        "description": alert["annotations"]["description"]
        .replace("{{ $labels.model_name }}", "costs")
        .replace('{{ printf "%.3g" $value }}', "0.667")
    }
    wanted = [{"exp_labels": found, "exp_annotations": said}]
    asked = [
        {"eval_time": "14m", "alertname": "SpeculationDoesNotPay", "exp_alerts": []},
        {"eval_time": "20m", "alertname": "SpeculationDoesNotPay", "exp_alerts": wanted},
    ]
    case = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m"}
    case["tests"] = [{"interval": "1m", "input_series": series, "alert_rule_test": asked}]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(case))
    out = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.parametrize("case", ["defaults", "auth", "tls", "several-nodes"])
def test_notes_say_how_to_call_it(case: str) -> None:
    """After an install the user reads commands that fit what was installed."""
    out = run_helm("install", "chat", str(CHART), "--dry-run=client", values=complete(CASES[case]))
    assert out.returncode == 0, out.stderr
    notes = out.stdout.partition("NOTES:")[2]
    assert ("https://127.0.0.1:8000/v1/chat/completions" in notes) == (case == "tls")
    assert ("get secret key" in notes) == (case == "auth")
    assert ("leaderworkerset/chat-specserve-nodes" in notes) == (case == "several-nodes")
    assert "svc/chat-specserve-metrics 9400:metrics" in notes


def test_notes_warn_of_what_may_be_missing() -> None:
    """Paths without a volume, variables that nobody sets and thresholds that Prometheus does not get are named."""
    values: Values = {
        "config": {
            "models": {"target_model": {"path": "/elsewhere/${WHICH}"}},
            "server": {"served_model_name": "it's"},
            "alerts": {
                "acceptance_rate": {"fire_below": 0.3},
                "runbook_base_url": "https://wiki/rb/",
            },
        },
        "metrics": {"prometheusRule": {"enabled": True}},
    }
    out = run_helm("install", "chat", str(CHART), "--dry-run=client", values=complete(values))
    assert out.returncode == 0, out.stderr
    notes = out.stdout.partition("NOTES:")[2]
    assert (
        "config.models.target_model.path is /elsewhere/${WHICH}, where no volume is mounted"
        in notes
    )
    assert "config uses ${WHICH}, which extraEnv does not set" in notes
    assert "The PrometheusRule has the default thresholds" in notes
    assert """"model":"it'\\''s"}'""" in notes
    assert "runbook_url: https://wiki/rb/AcceptanceRateLow.md" in out.stdout


def test_the_config_takes_what_vllm_takes() -> None:
    """Several names, a length as text and an older method name pass; the notes use the first name."""
    values: Values = {
        "config": {
            "models": {"target_model": {"path": "/models/t"}},
            "server": {"served_model_name": ["qwen", "default"]},
            "engine": {"max_model_len": "256K", "max_num_batched_tokens": "8k"},
            "speculative_decoding": {"method": "qwen3_next_mtp"},
        },
    }
    out = run_helm("install", "chat", str(CHART), "--dry-run=client", values=complete(values))
    assert out.returncode == 0, out.stderr
    assert '"model":"qwen"' in out.stdout.partition("NOTES:")[2]


def test_own_rules_take_the_place_of_the_defaults() -> None:
    """Rules of one's own are installed, templates of descriptions included; our series are those of the release."""
    text = 'up / specserve_ready {a="b"} / on (job) model:specserve_x:sum / {__name__=~"specserve_y|specserve_z"}'
    own = {
        "groups": [
            {
                "name": "g",
                "rules": [{"alert": "A", "expr": text, "annotations": {"d": "{{ $value }}"}}],
            }
        ]
    }
    metrics = {"prometheusRule": {"enabled": True, "rules": yaml.safe_dump(own)}}
    monitored = metrics | {"serviceMonitor": {"enabled": True}}
    spec = template({"metrics": monitored}, "--namespace", "llm").of("PrometheusRule")["spec"]
    job = 'namespace="llm",job=~"chat-specserve-metrics|chat-specserve-canary-metrics|llm/chat-specserve",'
    rule = own["groups"][0]["rules"][0]
    rule["expr"] = text.replace(' {a="b"}', f'{{{job}a="b"}}').replace("sum", f"sum{{{job}}}")
    assert spec == own
    spec = template({"metrics": metrics}, "--namespace", "llm").of("PrometheusRule")["spec"]
    rule["expr"] = rule["expr"].replace(
        job, 'namespace="llm",'
    )  # whoever scrapes then names the job
    assert spec == own


def test_any_user_id_works() -> None:
    """Without runAsUser, as OpenShift wants it, no id is asked for; the user's name does not come from /etc/passwd."""
    pod = template({"podSecurityContext": {"runAsUser": None, "fsGroup": None}}).pod()
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    env = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
    assert (env["HOME"], env["USER"]) == ("/cache", "specserve")


def test_scaling_holds_without_metrics() -> None:
    """KEDA keeps the replicas it has when Prometheus has no answer, counts no canary, and shrinks slowly."""
    spec = template(CASES["keda"], "--namespace", "llm").of("ScaledObject")["spec"]
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicas"}
    first = spec["triggers"][0]["metadata"]
    assert first["ignoreNullValues"] == "false"
    assert first["query"] == (
        'sum(specserve_requests_waiting{namespace="llm",job=~"chat-specserve-metrics|llm/chat-specserve"'
        ',pod!~"chat-specserve-canary-.+"})'
    )
    assert [t["type"] for t in spec["triggers"]] == ["prometheus", "prometheus", "cron"]
    (shrink,) = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"][
        "policies"
    ]
    assert shrink == {"type": "Pods", "value": 1, "periodSeconds": 300}


def test_zero_replicas_only_after_the_work() -> None:
    """With minReplicas 0 running requests keep a replica, a failed query takes none, and the HPA's limit is kept."""
    values = merged(["keda"])
    values["autoscaling"]["keda"] |= {"minReplicas": 0, "cooldownSeconds": 7200}
    spec = template(values).of("ScaledObject")["spec"]
    assert (spec["minReplicaCount"], spec["fallback"]["replicas"], spec["cooldownPeriod"]) == (
        0,
        1,
        7200,
    )
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 3600
    (keeps,) = [
        t["metadata"]
        for t in spec["triggers"]
        if "requests_running" in t["metadata"].get("query", "")
    ]
    assert "requests_waiting" in keeps["query"]
    assert float(keeps["threshold"]) >= 1e6  # one replica at most


def test_gateways_do_not_cut_long_answers() -> None:
    """The route asks for no time-out unless told; null leaves it to the gateway."""
    (rule,) = template(CASES["http-route"]).of("HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    more = {"request": "10m", "backendRequest": "90s"}
    given = GATEWAY["httpRoute"] | {"timeouts": more}
    (rule,) = template({"httpRoute": given}).of("HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == more
    (rule,) = template({"httpRoute": given | {"timeouts": {"request": None}}}).of("HTTPRoute")[
        "spec"
    ]["rules"]
    assert "timeouts" not in rule


def test_only_v1_is_reachable_from_outside() -> None:
    """Ingress and HTTPRoute name /v1/ and nothing else."""
    (rule,) = template(CASES["ingress"]).of("Ingress")["spec"]["rules"]
    assert [p["path"] for p in rule["http"]["paths"]] == ["/v1/"]
    (rule,) = template(CASES["http-route"]).of("HTTPRoute")["spec"]["rules"]
    assert [m["path"]["value"] for m in rule["matches"]] == ["/v1/"]


def test_the_rules_are_those_of_the_sidecar() -> None:
    """The PrometheusRule holds the generated rule file, narrowed to the release and otherwise unchanged."""
    rule = template(MONITORED, "--namespace", "llm").of("PrometheusRule", "chat-specserve")
    own = 'namespace="llm",job=~"chat-specserve-metrics|chat-specserve-canary-metrics|llm/chat-specserve",'
    text = json.dumps(rule["spec"]).replace(json.dumps(own)[1:-1], "").replace("{}", "")
    assert json.loads(text) == yaml.safe_load(
        (CHART / "alerts" / "specserve.rules.yaml").read_text()
    )


@pytest.mark.needs("promtool")
def test_rules_are_of_one_release(tmp_path: Path) -> None:
    """Pods of another release raise none of these alerts, and hide no absence; with scale to zero absence is normal."""
    rule = template(MONITORED, "--namespace", "llm").of("PrometheusRule", "chat-specserve")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    other = 'namespace="llm", job="other-specserve", pod="p", instance="i", model_name="m"'
    series = [
        {"series": f"specserve_{name}{{{other}}}", "values": values}
        for name, values in (
            ("live", "1x30"),
            ("draft_tokens_total", "0+1000x30"),
            ("accepted_tokens_total", "0+100x30"),
        )
    ]
    firing = 'count by (alertname, namespace) (ALERTS{alertstate="firing"})'
    samples = [{"labels": '{alertname="SidecarAbsent", namespace="llm"}', "value": 1}]
    test = {"interval": "1m", "input_series": series}
    test["promql_expr_test"] = [{"expr": firing, "eval_time": "20m", "exp_samples": samples}]
    case = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(case))
    out = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    keda = {"keda": CASES["keda"]["autoscaling"]["keda"] | {"minReplicas": 0}}
    rule = template(MONITORED | {"autoscaling": keda}).of("PrometheusRule", "chat-specserve")
    assert "SidecarAbsent" not in [r.get("alert") for r in rule["spec"]["groups"][0]["rules"]]


def test_every_value_is_explained() -> None:
    """Each value has its one sentence, and the file stays short."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def undescribed(node: dict[str, Any], path: str) -> Iterator[str]:
        for key, value in node.get("properties", {}).items():
            if "properties" in value and value.get("additionalProperties") is False:
                yield from undescribed(value, f"{path}{key}.")
            elif "description" not in value:
                yield path + key

    assert [p for p in undescribed(schema, "") if not p.startswith(("config", "global"))] == []
    assert len((CHART / "values.yaml").read_text().splitlines()) <= 300
