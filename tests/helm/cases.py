"""Values that the chart is rendered with: every example, every flag by itself, and a few together."""

import math
from collections.abc import Mapping
from typing import Any

from tests.helpers.helm import EXAMPLES, POOLS, SETTINGS, at, example, merged, settings_schema

Values = dict[str, Any]
MINIMAL: Values = {"model": {"uri": "hf://Qwen/Qwen3-8B"}}
GPU = {"accelerator": {"vendor": "nvidia"}}
RDMA = {"rdma": {"enabled": True}}
CUDA_IPC = {"hostIPC": True, "hostPID": True}
NO_PREFILL = {"prefill": {"enabled": False}}
NO_REDIS = {"redis": {"enabled": False}, "router": {"replicas": 1}, "gateway": {"allowAnonymous": True}}
OTHER_ROUTER = {
    "router": {"enabled": False, "externalAddresses": "other-tandem-router:7800"},
    "redis": {"enabled": False},
    "gateway": {"allowAnonymous": True},
    "clusterSecret": {"existingSecret": "other-tandem-secrets"},
    "tls": {"existingSecrets": {role: f"other-tandem-tls-{role}" for role in ("gateway", "router", "worker")}},
}
PROMETHEUS = "http://prometheus.monitoring:9090"
CLAIM = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}

# A value of each type of setting, written as in a values file; 1000000 is what Go would print as 1e+06.
_SETTINGS: dict[str, Values] = {
    "gateway": {"maxConcurrentRequests": 1024, "maxBodyMib": 16.5, "requestTimeoutS": 1000000},
    "router": {"policy": "least-loaded", "maxTtftS": 20, "maxBlockReplicas": 1000000},
    "prefill": {"maxModelLen": 1000000, "prefixCaching": False, "kvCacheGib": 0.5, "transport": "tcp", "leaseTtlS": 20},
    "decode": {"maxNumRunning": 128, "checksumShare": 1, "nativeKernels": False},
    "planner": {"intervalS": 5, "maxStepUp": 4},
}

FLAGS: dict[str, Values] = {
    "minimal": {},
    "model-host": at("model", {"uri": "host:///data/models/tandem-demo"}),
    "model-pvc": at("model", {"uri": "pvc://models/a/b", "version": "v2 (beta)"}),
    "model-pvc-root": at("model", {"uri": "pvc://models", "servedName": "mine"}),
    "model-image": at("model", {"uri": "/models/tandem-demo/"}),
    "model-token-and-cache": at(
        "model", {"authSecret": {"name": "hf", "key": "t"}, "cache": {"existingClaim": "cache", "sizeLimit": ""}}
    ),
    "model-cache-size": at("model.cache.sizeLimit", "80Gi"),
    "names": {"nameOverride": "llm", "commonLabels": {"team": "inference"}},
    "full-name": {"fullnameOverride": "a-very-long-name-that-is-cut-off-somewhere-in-the-middle"},
    "images": {
        "images": {
            "control": {"repository": "registry.example.com/tandem-control", "tag": "1.2.3", "pullPolicy": "Always"},
            "worker": {"digest": "sha256:" + "0" * 64},
        },
        "imagePullSecrets": [{"name": "pull"}],
        "decode": {"image": {"repository": "registry.example.com/tandem-worker-cuda"}},
    },
    "ipv6": {"ipFamily": "IPv6"},
    "logs-and-traces": {"log": {"level": "debug", "format": "text"}, "otlpEndpoint": "http://collector:4318"},
    "existing-secrets": {
        "clusterSecret": {"existingSecret": "cluster", "key": "k"},
        "redis": {"auth": {"existingSecret": "redis"}},
    },
    "plain-text": at("tls.enabled", False),
    "certificates-of-cert-manager": {
        "tls": {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}},
        "planner": {"enabled": True},
    },
    "certificates-given": at(
        "tls",
        {"existingSecrets": {"gateway": "a", "router": "b", "worker": "c"}, "deployment": "llm.example"},
    ),
    "certificates-given-to-redis": at(
        "tls.existingSecrets", {"gateway": "a", "router": "b", "worker": "c", "redis": "d"}
    ),
    "redis-claim": {
        "redis": {"persistence": {"existingClaim": "kept"}},
        "gateway": {"allowAnonymous": True, "responsesKey": {"existingSecret": "responses", "key": "k"}},
    },
    "redis-volume": at("redis.persistence", {"size": "8Gi", "storageClass": "fast"}),
    "redis-for-hints": {"redis": {"persistence": {"enabled": False}}, "gateway": {"allowAnonymous": True}},
    "redis-without-password": at("redis.auth.enabled", False),
    "redis-placed": at(
        "redis",
        {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "p"}
        | {"podLabels": {"x": "y"}, "podAnnotations": {"x": "y"}, "affinity": {"nodeAffinity": {}}},
    ),
    "external-redis-url": {
        "redis": {"enabled": False},
        "externalRedis": {"existingSecret": "redis", "urlKey": "url"},
    },
    "external-redis-plain": {"redis": {"enabled": False}, "externalRedis": {"host": "redis", "database": 3}},
    "external-redis-roles": {
        "redis": {"enabled": False},
        "externalRedis": {
            "existingSecret": "redis",
            "urlKey": "url",
            "gateway": {"urlKey": "gateway-url"},
            "accounts": {"existingSecret": "accounts", "urlKey": "accounts-url"},
        },
    },
    "announce": NO_REDIS,
    "hosts": {
        "prefill": {"ranks": {"tensor": 2, "hosts": 2}},
        "decode": {"ranks": {"tensor": 8, "hosts": 4}},
        "monitoring": {"enabled": True},
    },
    "hosts-stages": {
        "prefill": {"ranks": {"pipeline": 2, "context": 2, "hosts": 2}},
        "decode": {"ranks": {"tensor": 2, "pipeline": 2, "hosts": 2}},
    },
    "hosts-hpa": {
        "prefill": {"enabled": False},
        "decode": {"ranks": {"tensor": 2, "hosts": 2}, "autoscaling": {"hpa": {"enabled": True}}},
    },
    "hosts-keda": {
        "prefill": {"enabled": False},
        "decode": {
            "ranks": {"tensor": 2, "hosts": 2},
            "autoscaling": {"keda": {"enabled": True, "serverAddress": PROMETHEUS}},
        },
    },
    "discovery-kubernetes": {"discovery": {"mode": "kubernetes"}},
    "discovery-kubernetes-without-redis": merged(NO_REDIS, {"discovery": {"mode": "kubernetes"}}),
    "discovery-redis": {"discovery": {"mode": "redis"}},
    "decode-only": {"prefill": {"enabled": False}},
    "workers-of-another-release": {
        **OTHER_ROUTER,
        "gateway": {"enabled": False},
        "externalRedis": {
            "host": "other-tandem-redis",
            "username": "cluster",
            "existingSecret": "other-tandem-secrets",
        },
        "tests": {"enabled": False},
    },
    "other-router-at-an-address": merged(OTHER_ROUTER, at("router.externalAddresses", "[fd00::1]:7800")),
    "service-load-balancer": at(
        "gateway.service",
        {"type": "LoadBalancer", "port": 80, "loadBalancerClass": "x", "loadBalancerSourceRanges": ["10.0.0.0/8"]}
        | {"annotations": {"a": "b"}},
    ),
    "service-node-port": at("gateway.service", {"type": "NodePort", "nodePort": 30080}),
    "anonymous": {"gateway": {"allowAnonymous": True}, "gatewayApi": {"hostnames": ["llm.example.com"]}},
    "egress-everywhere": at("networkPolicy.egress", False),
    "egress-besides": {
        "networkPolicy": {"extraEgress": [{"ports": [{"port": 8443}]}]},
        "gateway": {"settings": {"accounts": "rediss://accounts.example:6380/0"}},
        "otlpEndpoint": "http://collector:4318",
    },
    "egress-to-sentinels": {
        "gateway": {"settings": {"accounts": "redis+sentinel://me:p@s1.example,s2.example:26380/keys/1"}},
    },
    "no-network-policy": at("networkPolicy.enabled", False),
    "network-policy-peers": {
        "networkPolicy": {"metricsFrom": [], "extraFrom": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
        "monitoring": {"enabled": True},
    },
    "monitoring": {"monitoring": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}}},
    "monitoring-but-one": {"monitoring": {"enabled": True}, "prefill": {"monitoring": {"enabled": False}}},
    "gateway-api": {
        "gatewayApi": {
            "enabled": True,
            "parentRefs": [{"name": "public"}],
            "weight": 9,
            "extraBackends": [{"name": "next-tandem-gateway", "port": 8000, "weight": 1}],
            "annotations": {"a": "b"},
            "inferencePoolLabels": {"inference.example.com/pool": "tandem"},
        }
    },
    "accounts-in-a-file": at(
        "gateway",
        {
            "replicas": 1,
            "rollout": {"maxSurge": 0, "maxUnavailable": 1},
            "settings": {"accounts": "/accounts/accounts.db"},
            "volumes": [{"name": "accounts", "persistentVolumeClaim": {"claimName": "accounts"}}],
            "volumeMounts": [{"name": "accounts", "mountPath": "/accounts"}],
        },
    ),
    "gateway-api-below-a-prefix": at(
        "gatewayApi", {"enabled": True, "parentRefs": [{"name": "public"}], "path": "/llm"}
    ),
    "planner-advises": {"planner": {"enabled": True}, "prefill": {"autoscaling": {"hpa": {"enabled": True}}}},
    "planner-acts": {
        "planner": {"enabled": True, "mode": "act", "maxAccelerators": 6},
        "prefill": {**GPU, **RDMA},
        "decode": {**GPU, **RDMA},
    },
    "load": at("load", {"enabled": True, "args": ["--figures", "/results"], "results": {"existingClaim": "results"}}),
    "load-elsewhere": at(
        "load",
        {"enabled": True, "url": "http://other:8000", "settings": {"rate": 2.5, "requests": 1000000}}
        | {"extraEnv": [{"name": "TANDEM_LOAD_API_KEY", "value": "x"}], "nodeSelector": {"a": "b"}}
        | {"volumes": [{"name": "traces", "configMap": {"name": "traces"}}], "tolerations": [{"operator": "Exists"}]}
        | {"volumeMounts": [{"name": "traces", "mountPath": "/traces"}]},
    ),
    "accounts": {
        "gateway": {"settings": {"accounts": "rediss://accounts.example:6380/0"}},
        "tests": {
            "extraEnv": [{"name": "TANDEM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "tests", "key": "api-key"}}}]
        },
    },
    "no-tests": at("tests.enabled", False),
    "extra-objects": {
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-a"},
                "data": {"a": "1"},
            },
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-b'}\n",
        ]
    },
    "accelerators": {**NO_PREFILL, **at("decode.accelerator", {"vendor": "nvidia", "count": 1})},
    "own-resource": {
        **NO_PREFILL,
        **at("decode.accelerator", {"vendor": "nvidia", "resource": "nvidia.com/mig-1g.10gb"}),
    },
    "own-vendor": {
        **NO_PREFILL,
        "acceleratorResources": {"acme": "acme.com/npu"},
        "decode": {"accelerator": {"vendor": "acme"}},
    },
    "rdma-ipc-lock": {**NO_PREFILL, **at("decode", {**GPU, "rdma": {"enabled": True, "ipcLock": True, "count": 2}})},
    "rdma-unasked": {pool: {**GPU, "rdma": {"enabled": True, "resource": ""}} for pool in ("prefill", "decode")},
    "run-as-root": at("decode", {"podSecurityContext": {"runAsUser": 0, "runAsNonRoot": False}}),
    "writable-root": at("decode.securityContext.readOnlyRootFilesystem", False),
}


def _pool_flags(pool: str) -> dict[str, Values]:
    """Every block of one pool that needs nothing else."""
    flags: dict[str, Values] = {
        "replicas": {"replicas": 1 if pool in ("router", "planner") else 3},
        "settings": {"settings": _SETTINGS[pool]},
        "container": {
            "args": ["--log-level", "debug"],
            "extraEnv": [{"name": "WHERE", "value": "{{ .Release.Namespace }}"}],
            "envFrom": [{"configMapRef": {"name": "more"}}],
            "resources": {"requests": {"cpu": 2, "memory": "1Gi"}, "limits": {"cpu": 4, "memory": "2Gi"}},
            "volumes": [{"name": "more", "configMap": {"name": "more"}}],
            "volumeMounts": [{"name": "more", "mountPath": "/more"}],
            "shm": {"sizeLimit": "2Gi"},
        },
        "devices": {
            **GPU,
            "rdma": {"enabled": True, "resource": "rdma/hca", "ucxTls": "rc", "ucxNetDevices": "mlx5_0:1"},
            **CUDA_IPC,
        },
        "placed": {
            "nodeSelector": {"a": "b"},
            "affinity": {"podAntiAffinity": {}},
            "tolerations": [{"operator": "Exists"}],
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "readinessGates": [{"conditionType": "example.com/gate"}],
        },
        "unspread": {"topologySpreadConstraints": []},
        "labelled": {
            "podLabels": {"x": "y"},
            "podAnnotations": {"x": "y"},
            "serviceAccount": {"name": "own", "annotations": {"iam.example.com/role": "r"}},
        },
        "default-account": {"serviceAccount": {"create": False}},
        "lifecycle": {
            "rollout": {"maxSurge": "25%", "maxUnavailable": 1},
            "termination": {"preStopSeconds": 7, "drainSeconds": 30, "gracePeriodSeconds": 42},
            "probes": {"startupSeconds": 61, "periodSeconds": 2, "timeoutSeconds": 1, "failureThreshold": 5},
        },
        "pdb-off": {"pdb": {"enabled": False}},
        "pdb-least": {"pdb": {"minAvailable": "50%"}},
    }
    if pool != "planner":
        flags["hpa"] = {"autoscaling": {"hpa": {"enabled": True}}}
        flags["keda"] = {"autoscaling": {"keda": {"enabled": True, "serverAddress": PROMETHEUS}}}
        flags["keda-triggers"] = {
            "autoscaling": {
                "keda": {
                    "enabled": True,
                    "triggers": [{"type": "cron", "metadata": {"start": "0 8 * * *", "timezone": "UTC"}}],
                }
            }
        }
    on = {"enabled": True} if pool == "planner" else {}
    found = {f"{pool}-{name}": at(pool, {**on, **values}) for name, values in flags.items()}
    if pool in ("prefill", "decode"):
        other = "decode" if pool == "prefill" else "prefill"
        found[f"{pool}-devices"] = merged(found[f"{pool}-devices"], at(other, {**GPU, **RDMA}))
    return found


def _matrix() -> dict[str, Values]:
    flags = {**FLAGS, **{name: values for pool in POOLS for name, values in _pool_flags(pool).items()}}
    examples = {f"example-{name}": example(name) for name in EXAMPLES}
    loads = {f"example-{name}-load": merged(example(name), at("load.enabled", True)) for name in ("cpu", "planner")}
    return {**{name: merged(MINIMAL, values) for name, values in flags.items()}, **examples, **loads}


MATRIX = _matrix()
# Dynamic resource allocation has its present form since Kubernetes 1.31.
RECENT = {
    "claims": merged(MINIMAL, {**NO_PREFILL, **at("decode.accelerator.claims", [CLAIM])}),
    "claim-request": merged(MINIMAL, {**NO_PREFILL, **at("decode.accelerator.claims", [{**CLAIM, "request": "gpu"}])}),
}


def _some_value(schema: Mapping[str, Any]) -> Any:
    """A value within the limits of a setting."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] not in ("integer", "number"):
        return {"string": "x", "boolean": True}[schema["type"]]
    usual = 2 if schema["type"] == "integer" else 0.5
    beyond = schema.get("exclusiveMinimum", -math.inf)
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    return next(value for value in (usual, low, beyond + 1) if low <= value <= high and value > beyond)


def _every_setting(process: str) -> Values:
    properties = settings_schema(process)["properties"]
    return {"enabled": True, "settings": {name: _some_value(schema) for name, schema in properties.items()}}


# Every setting there is, in its type, whatever it would mean.
EVERY_SETTING = merged(
    MINIMAL,
    {process: _every_setting(process) for process in SETTINGS},
    at("gateway.settings.accounts", "redis://accounts.example:6379/0"),
)
