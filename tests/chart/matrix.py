"""Values that turn on each optional object, alone and together."""

from __future__ import annotations

import copy
from typing import Any

OUT = {"egress": [{"ports": [{"port": 443, "protocol": "TCP"}]}]}
GATEWAY = {
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gw"}], "hostnames": ["a.example"]}
}

TOGGLES: dict[str, dict[str, Any]] = {
    "auth": {"auth": {"existingSecret": "key"}},
    "tls": {"tls": {"existingSecret": "cert"}},
    "hub": {"hub": {"existingSecret": "hub"}},
    "models-claim": {"models": {"existingClaim": "models"}},
    "models-size": {"models": {"size": "100Gi"}},
    "models-pull": {
        "models": {"size": "100Gi", "pull": True},
        "hub": {"existingSecret": "hub"},
        "networkPolicy": OUT,
    },
    "models-store": {
        "models": {"size": "100Gi", "pull": True, "sources": {"target": "s3://bucket/llm/big"}},
        "config": {"models": {"target_model": {"path": "/models/llm--big"}}},
        "networkPolicy": OUT,
    },
    "several-nodes": {
        "leaderWorkerSet": {"enabled": True},
        "models": {"existingClaim": "models"},
        "config": {
            "models": {
                "target_model": {
                    "path": "/models/t",
                    "tensor_parallel_size": 8,
                    "pipeline_parallel_size": 2,
                }
            }
        },
    },
    "inference-pool": {**GATEWAY, "inferencePool": {"enabled": True, "endpointPicker": "picker"}},
    "cache-claim": {"cache": {"existingClaim": "cache"}},
    "pdb": {"podDisruptionBudget": {"enabled": True}},
    "no-network-policy": {"networkPolicy": {"enabled": False}, "auth": {"existingSecret": "key"}},
    "network-peers": {
        "networkPolicy": {
            "apiFrom": [{"namespaceSelector": {"matchLabels": {"name": "gateway"}}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "egress": [
                {
                    "to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}],
                    "ports": [{"port": 443, "protocol": "TCP"}],
                }
            ],
        }
    },
    "service-monitor": {
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}
    },
    "pod-monitor": {"metrics": {"podMonitor": {"enabled": True}}},
    "prometheus-rule": {"metrics": {"prometheusRule": {"enabled": True}}},
    "metrics-token": {
        "metrics": {"token": {"existingSecret": "readers"}, "serviceMonitor": {"enabled": True}}
    },
    "metrics-token-of-pods": {
        "metrics": {"token": {"existingSecret": "readers"}, "podMonitor": {"enabled": True}}
    },
    "dashboards": {"metrics": {"dashboards": {"enabled": True}}},
    "ingress": {
        "ingress": {"enabled": True, "host": "a.example", "className": "nginx", "tlsSecret": "cert"}
    },
    "http-route": GATEWAY,
    "canary": {**GATEWAY, "canary": {"enabled": True, "weight": 10}},
    "keda": {
        "metrics": {"podMonitor": {"enabled": True}},
        "autoscaling": {
            "keda": {
                "enabled": True,
                "prometheusAddress": "http://prometheus:9090",
                "tokensPerSecond": 1500,
                "cron": [
                    {"timezone": "UTC", "start": "0 6 * * *", "end": "0 20 * * *", "replicas": 2}
                ],
            }
        },
    },
    "hpa": {"autoscaling": {"hpa": {"enabled": True}}},
    "load-balancer": {
        "auth": {"existingSecret": "key"},
        "service": {
            "type": "LoadBalancer",
            "annotations": {"networking.gke.io/load-balancer-type": "Internal"},
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
        },
        "networkPolicy": {"apiFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    },
    "arguments": {"launch": {"extraArgs": ["--skip", "known-bad-schedule"]}},
    "digest": {"image": {"tag": "latest", "digest": f"sha256:{'0' * 64}"}},
    "hub-download": {
        "config": {"models": {"target_model": {"path": "Qwen/Qwen3-8B"}}},
        "models": {"download": True},
        "cache": {"sizeLimit": "60Gi"},
        "networkPolicy": OUT,
    },
    "both-families": {"config": {"server": {"host": "::"}}},
    "ranks-on-nodes": {
        "leaderWorkerSet": {"enabled": True},
        "models": {"existingClaim": "models"},
        "config": {
            "models": {"target_model": {"path": "/models/t"}},
            "engine": {"extra_args": {"data-parallel-size": 16, "enable-expert-parallel": True}},
        },
    },
    "rolling": {
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    },
    "no-gpu": {"gpu": {"resource": ""}},
    "scheduling": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "imagePullSecrets": [{"name": "registry"}],
    },
    "extras": {
        "extraEnv": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "podLabels": {"team": "nlp"},
        "podAnnotations": {"note": "a: b"},
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-more"},
            }
        ],
    },
    "eight-gpus": {
        "config": {"models": {"target_model": {"path": "/models/t", "tensor_parallel_size": 8}}}
    },
}

TOGETHER = [
    [
        "auth",
        "tls",
        "hub",
        "models-pull",
        "pdb",
        "service-monitor",
        "prometheus-rule",
        "dashboards",
        "canary",
    ],
    [
        "auth",
        "models-claim",
        "cache-claim",
        "keda",
        "ingress",
        "scheduling",
        "extras",
        "network-peers",
    ],
    ["hpa", "http-route", "pod-monitor", "rolling", "eight-gpus", "models-claim"],
]


def merged(names: list[str]) -> dict[str, Any]:
    """The values of several toggles."""
    out: dict[str, Any] = {}
    for name in names:
        _into(out, copy.deepcopy(TOGGLES[name]))
    if "canary" in names and "models-pull" in names:
        out["models"]["accessModes"] = ["ReadWriteMany"]
    return out


def _into(out: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            _into(out[key], value)
        else:
            out[key] = value


CASES = (
    {"defaults": {}}
    | TOGGLES
    | {f"together-{i}": merged(names) for i, names in enumerate(TOGETHER)}
)
