"""Values that would not work are refused, by the schema or by a guard, with the key and the remedy in the message."""

import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest

from tests.helm.cases import CLAIM, CUDA_IPC, GPU, MINIMAL, NO_REDIS, OTHER_ROUTER, PROMETHEUS, RDMA
from tests.helpers.helm import (
    CHART,
    KUBE_VERSION,
    NAME,
    SETTINGS,
    at,
    install_dry,
    merged,
    old_helm,
    render,
    run_old_helm,
    settings_schema,
)

KEDA = {"autoscaling": {"keda": {"enabled": True, "serverAddress": PROMETHEUS}}}
HPA = {"autoscaling": {"hpa": {"enabled": True}}}
ACTS = {"planner": {"enabled": True, "mode": "act"}}
ONE_FILE = {
    "replicas": 1,
    "rollout": {"maxSurge": 0, "maxUnavailable": 1},
    "settings": {"accounts": "sqlite:///accounts.db"},
}
OWN_URL = at("gateway.settings.accounts", "$(TANDEM_REDIS)")

# What a guard of the chart refuses, and words of its message.
GUARDED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": (at("model.uri", ""), r"model\.uri is required: hf://.* pvc://.* host://"),
    "more than sixteen ranks": (
        at("decode.ranks", {"tensor": 8, "pipeline": 3}),
        r"decode\.ranks\.tensor=8 and decode\.ranks\.pipeline=3 are 24 ranks, .* at most 16",
    ),
    "stages on one cpu": (
        at("decode", {"ranks": {"pipeline": 3}, "resources": {"requests": {"cpu": 2}}}),
        r"decode\.ranks\.pipeline=3 with decode\.resources\.requests\.cpu=2: .* ask for 3 or more",
    ),
    "a stage on several hosts": (
        at("decode.ranks", {"tensor": 2, "hosts": 2, "pipeline": 3}),
        r"decode\.ranks\.pipeline=3 with decode\.ranks\.hosts=2: .* set as many stages as pods, or a multiple",
    ),
    "contexts on several hosts": (
        at("prefill.ranks", {"tensor": 2, "hosts": 2, "context": 2}),
        r"prefill\.ranks\.context=2 with prefill\.ranks\.hosts=2: .* or prefill\.ranks\.pipeline=2",
    ),
    "contexts of decode": (
        at("decode.ranks.context", 2),
        r"decode\.ranks\.context=2: .* set prefill\.ranks\.context, and decode\.ranks\.context=1",
    ),
    "more contexts and stages than ranks": (
        at("prefill.ranks", {"tensor": 4, "context": 2, "pipeline": 3}),
        r"tensor=4 and prefill\.ranks\.pipeline=3 and prefill\.ranks\.context=2 are 24 ranks, .* at most 16",
    ),
    "more contexts than ranks": (
        at("prefill.ranks", {"tensor": 4, "context": 5}),
        r"prefill\.ranks\.tensor=4 and prefill\.ranks\.context=5 are 20 ranks, .* at most 16",
    ),
    "hosts beside the planner": (
        at("decode.ranks", {"tensor": 2, "hosts": 2}) | at("planner.enabled", True),
        r"decode\.ranks\.hosts=2 with planner\.enabled: .* scale the LeaderWorkerSet by hand",
    ),
    "more hosts than ranks": (
        at("decode.ranks", {"tensor": 2, "hosts": 4}),
        r"hosts=4 with .*tensor=2: .* to 2 or fewer",
    ),
    "ranks on accelerators": (
        at("decode", GPU | {"ranks": {"tensor": 2}}),
        r"ranks\.tensor=2 and .* with .*CPUs alone",
    ),
    "more ranks than cpus": (
        at("prefill.ranks.tensor", 4),
        r"prefill\.ranks\.tensor=4 and .* with prefill\.resources\.requests\.cpu=2: .* ask for 4 or more",
    ),
    "ranks on parts of a cpu": (
        at("decode", {"ranks": {"tensor": 2}, "resources": {"requests": {"cpu": "1500m"}}}),
        r"decode\.ranks\.tensor=2 and .* with decode\.resources\.requests\.cpu=1500m",
    ),
    "names that no service may have": (
        at("fullnameOverride", "2026.llm"),
        r"called 2026\.llm-gateway and so on, .*: set fullnameOverride, as fullnameOverride=tandem",
    ),
    "no decode": (at("decode.enabled", False), r"set decode\.enabled=true"),
    "a role's redis without an external one": (
        at("externalRedis.accounts", {"urlKey": "url", "existingSecret": "mine"}),
        r"externalRedis\.accounts has no effect without externalRedis\.host or urlKey",
    ),
    "two redis": (at("externalRedis.host", "redis"), r"set redis\.enabled=false"),
    "url key alone": (
        {"redis": {"enabled": False}, "externalRedis": {"urlKey": "url"}},
        r"needs externalRedis\.existingSecret",
    ),
    "a role's user beside a url": (
        {"redis": {"enabled": False}}
        | at("externalRedis", {"urlKey": "url", "existingSecret": "redis", "accounts": {"username": "accounts"}}),
        r"set externalRedis\.accounts\.urlKey",
    ),
    "a role's url of no secret": (
        {"redis": {"enabled": False}, "externalRedis": {"host": "redis", "gateway": {"urlKey": "url"}}},
        r"externalRedis\.gateway\.urlKey needs externalRedis\.gateway\.existingSecret",
    ),
    "accounts as another user": (OWN_URL, r"remove it; without it they are"),
    "an index larger than redis": (
        at("router.settings.maxBlockReplicas", 8_000_000),
        r"maxBlockReplicas=8000000 would fill Redis.*=512 has room for 3579139; .*set redis\.maxMemoryMiB=1145",
    ),
    "a redis larger than its limit": (
        at("redis.maxMemoryMiB", 1024),
        r"maxMemoryMiB=1024 with redis\.resources\.limits\.memory=1Gi: .* set redis\.resources\.limits\.memory=2048Mi",
    ),
    "a redis larger than its limit in bytes": (
        at("redis.resources.limits.memory", 536870912),
        r"maxMemoryMiB=512 with redis\.resources\.limits\.memory=536870912: .*=1024Mi",
    ),
    "redis discovery without redis": (merged(NO_REDIS, at("discovery.mode", "redis")), r"set redis\.enabled=true or"),
    "announcing beside redis": (at("discovery.mode", "announce"), r"set redis\.enabled=false"),
    "several routers without redis": (at("redis.enabled", False), r"or router\.replicas=1"),
    "scaled routers without redis": (
        merged(NO_REDIS, at("router", HPA)),
        r"router\.replicas=1 without autoscaling",
    ),
    "no router": (at("router.enabled", False), r"set router\.externalAddresses"),
    "another's router and a secret of one's own": (
        merged(OTHER_ROUTER, at("clusterSecret.existingSecret", "")),
        r"set clusterSecret\.existingSecret to the Secret with theirs",
    ),
    "another's router and certificates of one's own": (
        merged(OTHER_ROUTER, at("tls.existingSecrets", {"gateway": "", "router": "", "worker": ""})),
        r"refuse certificates that this one draws: set tls\.existingSecrets .*or tls\.enabled=false in both",
    ),
    "another's router and no name of its deployment": (
        merged(
            OTHER_ROUTER,
            at("tls.existingSecrets", {"gateway": "", "router": "", "worker": ""}),
            at("tls.certManager", {"enabled": True, "issuerRef": {"name": "ca"}}),
        ),
        r"set tls\.deployment to theirs",
    ),
    "certificates of a role are missing": (
        at("tls.existingSecrets", {"gateway": "a", "router": "b"}),
        r"tls\.existingSecrets\.worker is missing: .* for worker\..*\.tandem\.internal, tls\.key and ca\.crt",
    ),
    "certificates from two places": (
        at("tls", {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}, "existingSecrets": {"worker": "a"}}),
        r"tls\.certManager\.enabled and tls\.existingSecrets are both set",
    ),
    "cert-manager without an issuer": (
        at("tls.certManager.enabled", True),
        r"needs tls\.certManager\.issuerRef\.name",
    ),
    "another's router and a redis of one's own": (
        merged(OTHER_ROUTER, at("redis.enabled", True)),
        r"set redis\.enabled=false, and externalRedis to the Redis of those routers",
    ),
    "two autoscalers": (at("prefill", merged(HPA, KEDA)), r"prefill\.autoscaling\.hpa and .*: enable one"),
    "keys and no place for them": (
        at("redis.enabled", False) | {"router": {"replicas": 1}},
        r"set redis\.enabled=true or .*, or gateway\.settings\.accounts .*gateway\.allowAnonymous=true",
    ),
    "keys for anybody": (
        at("gateway", {"allowAnonymous": True, "settings": {"accounts": "redis://r:6379/0"}}),
        r"gateway\.allowAnonymous=true and gateway\.settings\.accounts are both set",
    ),
    "keys that go with redis's pod": (
        at("redis.persistence.enabled", False),
        r"set it to true, or name another place .*gateway\.settings\.accounts .*gateway\.allowAnonymous=true",
    ),
    "keys that go with the pod of a redis without users": (
        merged(OWN_URL, {"redis": {"auth": {"enabled": False}, "persistence": {"enabled": False}}}),
        r"gateway\.settings\.accounts=\$\(TANDEM_REDIS\) .*: remove it and have redis\.persistence\.enabled=true",
    ),
    "keys in a redis without users for which no volume is made": (
        merged(OWN_URL, at("redis.auth.enabled", False)),
        r"gives this release's Redis no volume",
    ),
    "a variable that has keys go with redis's pod": (
        merged(
            at("gateway.extraEnv", [{"name": "TANDEM_ACCOUNTS", "value": "$(TANDEM_REDIS)"}]),
            at("redis.auth.enabled", False),
        ),
        r"gateway\.extraEnv TANDEM_ACCOUNTS=\$\(TANDEM_REDIS\) gives this release's Redis no volume",
    ),
    "a file for two gateways": (at("gateway.settings.accounts", "/accounts.db"), r"or remove it .*, or set"),
    "a file for scaled gateways": (
        at("gateway", {**ONE_FILE, **HPA}),
        r"gateway\.replicas=1 without autoscaling",
    ),
    "a file for the old and the new gateway": (
        at("gateway", {**ONE_FILE, "rollout": {"maxSurge": 1}}),
        r"gateway\.rollout\.maxSurge=0",
    ),
    "planner and hpa": (merged(ACTS, at("decode", HPA)), r"set planner\.mode=advise"),
    "planner and keda": (merged(ACTS, at("prefill", KEDA)), r"disable the autoscaler"),
    "scaled planner": (at("planner", {"enabled": True, **HPA}), r"set planner\.replicas"),
    "planner without prefill": (merged(at("planner.enabled", True), at("prefill.enabled", False)), r"needs prefill"),
    "planner's bounds": (
        at("planner", {"enabled": True, "limits": {"decode": {"min": 9, "max": 2}}}),
        r"planner\.limits\.decode\.min=9 is above max=2",
    ),
    "planner's budget": (
        at("planner", {"enabled": True, "maxAccelerators": 4, "limits": {"decode": {"min": 4}}}),
        r"maxAccelerators=4 is too few: planner\.limits need at least 5",
    ),
    "hpa's bounds": (
        at("decode.autoscaling.hpa", {"enabled": True, "minReplicas": 9}),
        r"minReplicas=9 is above maxReplicas=8",
    ),
    "hpa without metrics": (at("decode.autoscaling.hpa", {"enabled": True, "metrics": []}), r"name a metric"),
    "keda without source": (at("decode.autoscaling.keda.enabled", True), r"needs serverAddress .* or triggers"),
    "too short a grace": (
        at("decode.termination", {"drainSeconds": 300, "gracePeriodSeconds": 60}),
        r"decode\.termination\.gracePeriodSeconds=60 would kill streams.*at least 305.*or set 0",
    ),
    "grace without its preStop": (
        at("gateway.termination", {"preStopSeconds": 10, "drainSeconds": 20, "gracePeriodSeconds": 34}),
        r"at least 35",
    ),
    "no pod may move": (at("decode.rollout", {"maxSurge": 0}), r"set one of them to 1"),
    "no pod may move, in percent": (at("decode.rollout", {"maxSurge": "0%", "maxUnavailable": "0%"}), r"both 0"),
    "two budgets": (at("decode.pdb", {"minAvailable": 1, "maxUnavailable": 2}), r"decode\.pdb: .*: keep one"),
    "two accelerators": (
        at("decode.accelerator.count", 2),
        r"decode\.accelerator\.count=2: .*set count=1, and more replicas",
    ),
    "unknown vendor": (
        at("decode.accelerator.vendor", "acme"),
        r"vendor=acme is unknown: use none or one of nvidia, add it to acceleratorResources",
    ),
    "gpus without a transport": (
        {"prefill": GPU, "decode": GPU},
        r"prefill\.accelerator .*set rdma\.enabled=true in prefill and decode .*hostIPC=true and hostPID=true in both",
    ),
    "gpus that may be on different nodes": (
        {"prefill": {**GPU, **CUDA_IPC}, "decode": {**GPU, **CUDA_IPC}},
        r"set decode\.affinity to a podAffinity .*, or nodeSelector with kubernetes\.io/hostname in both",
    ),
    "claimed gpus without a transport": (
        {pool: {"accelerator": {"claims": [CLAIM]}} for pool in ("prefill", "decode")},
        r"without a transport .* or prefill\.enabled=false",
    ),
    "gpus of decode alone": (
        {"prefill": RDMA, "decode": {**GPU, **RDMA}},
        r"accelerators in one of prefill and decode",
    ),
    "gpus of prefill alone": ({"prefill": {**GPU, **RDMA}, "decode": RDMA}, r"set accelerator in both, or prefill"),
    "rdma on one side": ({"prefill": {**GPU, **RDMA}, "decode": GPU}, r"set rdma\.enabled=true in prefill and decode"),
    "process ids without ipc": (
        {pool: {**GPU, "hostPID": True} for pool in ("prefill", "decode")},
        r"hostIPC=true and hostPID=true in both",
    ),
    "ipc without process ids": (
        {pool: {**GPU, **RDMA, "hostIPC": True} for pool in ("prefill", "decode")},
        r"prefill\.hostIPC and hostPID are not both true, or both false",
    ),
    "resource without vendor": (at("decode.accelerator.resource", "acme.com/npu"), r"set vendor"),
    "device and claim": (
        at("decode.accelerator", {"vendor": "nvidia", "claims": [{"name": "gpu", "resourceClaimName": "c"}]}),
        r"set vendor=none",
    ),
    "the chart's variable": (
        at("decode.extraEnv", [{"name": "TANDEM_BIND", "value": "x"}]),
        r"decode\.extraEnv sets TANDEM_BIND, which the chart sets too",
    ),
    "a setting twice": (
        at("decode", {"settings": {"dtype": "auto"}, "extraEnv": [{"name": "TANDEM_DTYPE", "value": "x"}]})
        | {"prefill": {"settings": {"dtype": "auto"}}},
        r"or decode\.settings",
    ),
    "pools that cannot share": (at("decode.settings.blockSize", 32), r"blockSize differ.*set both to the same"),
    "route to nowhere": (at("gatewayApi.enabled", True), r"name the Gateway, as \[\{name: my-gateway\}\]"),
    "load on nobody": (
        {"gateway": {"enabled": False}, "load": {"enabled": True}, "tests": {"enabled": False}},
        r"set load\.url",
    ),
}

# What the schema refuses, and the key that its message names.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown block": ({"prefil": {}}, "prefil"),
    "unknown key": (at("decode.replica", 2), "replica"),
    "unknown setting": (at("decode.settings.maxModelLength", 2), "maxModelLength"),
    "setting of another process": (at("gateway.settings.blockSize", 16), "blockSize"),
    "setting that the chart owns": (at("decode.settings.bind", "0.0.0.0:1"), "bind"),
    "ranks as a setting": (at("decode", {"accelerator": {"vendor": "nvidia"}, "settings": {"tp": 2}}), "tp"),
    "contexts as a setting": (at("decode.settings.cp", 2), "cp"),
    "setting of a wrong type": (at("decode.settings.maxModelLen", "long"), "maxModelLen"),
    "text for a number": (at("decode.replicas", "2"), "replicas"),
    "negative replicas": (at("decode.replicas", -1), "replicas"),
    "word for a truth": (at("decode.enabled", "yes"), "enabled"),
    "unknown scheme": (at("model.uri", "s3://bucket/model"), "uri"),
    "revision in a name": (at("model.uri", "hf://org/name@main@twice"), "uri"),
    "relative path": (at("model.uri", "models/x"), "uri"),
    "unknown mode": (at("planner.mode", "auto"), "mode"),
    "unknown discovery": (at("discovery.mode", "dns"), "mode"),
    "odd quantity": (at("decode.resources.limits.memory", "lots"), "memory"),
    "no such policy": (at("images.worker.pullPolicy", "Sometimes"), "pullPolicy"),
    "short digest": (at("images.worker.digest", "sha256:123"), "digest"),
    "variable without name": (at("decode.extraEnv", [{"value": "x"}]), "name"),
    "nameless claim": (at("decode.accelerator.claims", [{"request": "gpu"}]), "name"),
    "more than a day to start": (at("decode.probes.startupSeconds", 86401), "startupSeconds"),
    "port out of range": (at("gateway.service.port", 70000), "port"),
    "no accelerators": (at("decode.accelerator.count", 0), "count"),
    "no threshold": (at("decode.autoscaling.keda.threshold", 2), "threshold"),
}

BLOCKS = ["model", "gateway", "redis", "planner", "load", "monitoring", "podSecurityContext", "networkPolicy"]
NULLS = [
    *BLOCKS,
    *("model.cache", "model.authSecret", "images.control", "images.worker.repository", "gateway.service", "log.level"),
    *(f"decode.{block}" for block in ("enabled", "replicas", "settings", "image", "args", "extraEnv", "resources")),
    *(f"decode.{block}" for block in ("accelerator", "accelerator.vendor", "rdma", "rdma.enabled", "shm", "affinity")),
    *(f"decode.{block}" for block in ("autoscaling", "autoscaling.hpa", "autoscaling.keda.enabled", "pdb", "probes")),
    *(f"decode.{block}" for block in ("termination", "termination.drainSeconds", "rollout", "serviceAccount")),
    *(
        "redis.auth",
        "redis.persistence",
        "redis.image",
        "gateway.responsesKey",
        "externalRedis",
        "externalRedis.tls",
        "gatewayApi",
        "tests",
        "planner.slo",
    ),
]


def _message(values: dict[str, Any]) -> str:
    with pytest.raises(helm_python.HelmError) as refusal:
        render(values)
    return str(refusal.value)


@pytest.mark.parametrize("why", GUARDED)
def test_guards_name_the_remedy(why: str) -> None:
    values, words = GUARDED[why]
    message = _message(merged(MINIMAL, values))
    assert re.search(words, message), message


@pytest.mark.parametrize(
    "transport",
    [
        RDMA,
        {**RDMA, **CUDA_IPC},
        {**CUDA_IPC, "affinity": {"podAffinity": {}}},
        {**CUDA_IPC, "nodeSelector": {"kubernetes.io/hostname": "a"}},
    ],
)
def test_gpus_with_a_transport_are_taken(transport: dict[str, Any]) -> None:
    pool = {**GPU, **transport}
    assert render(merged(MINIMAL, {"prefill": pool, "decode": pool})).objects
    assert render(merged(MINIMAL, {"prefill": {**GPU, "enabled": False}, "decode": GPU})).objects


@pytest.mark.parametrize(
    "where",
    ["redis://r:6379/0", "rediss://r:6379/0", "unix:///r.sock", "redis+sentinel://a:1,b:1/s", "$(ACCOUNTS_URL)"],
)
def test_gateways_share_accounts_in_redis(where: str) -> None:
    assert render(merged(MINIMAL, at("gateway.settings.accounts", where))).objects


def test_accounts_may_have_the_url_of_a_redis_without_users_that_has_a_volume() -> None:
    redis = {"auth": {"enabled": False}, "persistence": {"existingClaim": "kept"}}
    assert render(merged(MINIMAL, merged(OWN_URL, {"redis": redis}))).objects


@pytest.mark.parametrize("why", REFUSED)
def test_the_schema_names_the_key(why: str) -> None:
    values, key = REFUSED[why]
    message = _message(merged(MINIMAL, values))
    assert message.startswith("tandem:\n- at '"), message
    assert key in message


def _outside(process: str) -> Iterator[tuple[str, float]]:
    """Settings in the chart's schema that have limits, and for each limit a value that the process refuses."""
    for key, field in settings_schema(process)["properties"].items():
        for limit, beyond in (("minimum", -0.1), ("maximum", 0.1), ("exclusiveMinimum", 0), ("exclusiveMaximum", 0)):
            if limit in field:
                step = (beyond > 0) - (beyond < 0) if field["type"] == "integer" else beyond
                yield key, field[limit] + step


@pytest.mark.parametrize("process", SETTINGS)
def test_a_setting_beyond_its_limits_is_refused_before_a_pod_starts(process: str) -> None:
    """Regression: the schema knew types alone, and pods with such a setting ended as often as they started."""
    cases = list(_outside(process))
    assert len(cases) > 4
    for key, value in cases:
        message = _message(merged(MINIMAL, at(f"{process}.settings.{key}", value)))
        assert f"at '/{process}/settings/{key}'" in message, message


@pytest.mark.parametrize("path", NULLS)
def test_null_is_refused_and_not_a_crash(path: str) -> None:
    """Regression: null removes a default; templates then met a nil pointer."""
    message = _message(merged(MINIMAL, at(path, None)))
    assert "missing property" in message, message
    assert path.rpartition(".")[2] in message


def test_every_guard_of_the_chart_is_tried() -> None:
    guards = (CHART / "templates" / "_validate.tpl").read_text()
    told = [_message(merged(MINIMAL, values)) for values, _ in GUARDED.values()]
    for text in re.findall(r'fail (?:\(printf )?"([^"]+)"', guards):
        pattern = ".*".join(re.escape(part) for part in re.split(r"%[sd]", text))
        assert any(re.search(pattern, message) for message in told), text


def test_an_install_is_refused_alike() -> None:
    with pytest.raises(helm_python.HelmError, match=r"or router\.replicas=1"):
        install_dry(merged(MINIMAL, at("redis.enabled", False)))


@pytest.mark.skipif(old_helm() is None, reason="Helm 3.6 is not here: run `make test`, or name one in TANDEM_HELM")
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (at("redis.enabled", False), r"or router\.replicas=1"),
        (at("decode.accelerator", None), "accelerator is required"),
        (at("decode.replica", 2), "replica is not allowed"),
        ({"prefill": GPU, **ACTS, "decode": HPA}, r"set planner\.mode=advise"),
    ],
)
def test_the_old_engine_refuses_alike(values: dict[str, Any], words: str) -> None:
    where = ["--kube-version", KUBE_VERSION]
    done = run_old_helm("template", NAME, str(CHART), *where, values=merged(MINIMAL, values))
    assert done.returncode != 0
    assert re.search(words, done.stderr), done.stderr


@pytest.mark.skipif(old_helm() is None, reason="Helm 3.6 is not here: run `make test`, or name one in TANDEM_HELM")
def test_clusters_that_are_too_old_are_refused() -> None:
    done = run_old_helm("template", NAME, str(CHART), "--kube-version", "1.27.9", values=MINIMAL)
    assert "chart requires kubeVersion: >=1.28" in done.stderr
    assert run_old_helm("template", NAME, str(CHART), "--kube-version", "1.28.0-gke.1", values=MINIMAL).returncode == 0
