"""Every TANDEM_* variable that the chart writes is a setting of the process that reads it, with a value it takes."""

import re
from collections.abc import Iterator, Mapping

import pytest
import yaml
from pydantic_settings import BaseSettings

from tandem.gateway.settings import GatewaySettings
from tandem.locality.base import DEFAULT_MAX_BLOCK_REPLICAS
from tandem.worker.host_settings import RankHostSettings
from tests.helm.renders import ALL, rendered
from tests.helpers.helm import NAME, NAMESPACE, POOLS, ROOT, SETTINGS, Object, Rendered, at, merged, render

SECRETS = "0123456789abcdef0123456789abcdef"
REDIS_CA = "?ssl_ca_certs=/etc/tandem/redis-ca/ca.crt"
FIELDS = {"status.podIP": "10.1.2.3", "metadata.name": f"{NAME}-pod-1", "metadata.namespace": NAMESPACE}


def _resolved(container: Object) -> dict[str, str]:
    """Its environment as a kubelet would make it."""
    env: dict[str, str] = {}
    for each in container["env"]:
        source = each.get("valueFrom", {})
        if "fieldRef" in source:
            value = FIELDS[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = "rediss://:pw@redis:6379/0" if source["secretKeyRef"]["key"].endswith("url") else SECRETS
        else:
            value = each["value"]
        env[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: env[found.group(1)], value)
    return env


def _processes(made: Rendered) -> Iterator[tuple[str, Object]]:
    for pool in POOLS:
        if made.has("Deployment", pool):
            yield pool, made.container(pool)
    for job in made.of_kind("Job"):
        yield "load", job["spec"]["template"]["spec"]["containers"][0]


def _parsed(process: str, env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> BaseSettings:
    with monkeypatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        return SETTINGS[process]()


def _settings(case: str, process: str, monkeypatch: pytest.MonkeyPatch) -> BaseSettings:
    container = dict(_processes(rendered(case)))[process]
    return _parsed(process, _resolved(container), monkeypatch)


def _environments(process: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each that occurs, once, and the case where it does."""
    found: dict[tuple[tuple[str, str], ...], str] = {}
    for case in ALL:
        for name, container in _processes(rendered(case)):
            if name == process:
                found.setdefault(tuple(_resolved(container).items()), case)
    assert len(found) > 1
    for env, case in found.items():
        yield case, dict(env)


@pytest.mark.parametrize("process", SETTINGS)
def test_variables_are_settings(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for case, env in _environments(process):
        prefix = "TANDEM_LOAD_" if process == "load" else "TANDEM_"
        fields = {f"{prefix}{field.upper()}" for field in SETTINGS[process].model_fields}
        ours = {name for name in env if name.startswith("TANDEM_")}
        ours -= {"TANDEM_ACCOUNTS"} if process == "load" else set()  # NOTE: with_key.py draws a key there
        assert ours <= fields, case
        parsed = _parsed(process, env, monkeypatch)
        assert {f"{prefix}{field.upper()}" for field in parsed.model_fields_set} == ours, case


def _value(case: str, process: str, field: str, monkeypatch: pytest.MonkeyPatch) -> object:
    return getattr(_settings(case, process, monkeypatch), field)


@pytest.mark.parametrize(
    ("case", "path", "name"),
    [
        ("minimal", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("model-host", "/models/tandem-demo", "tandem-demo"),
        ("model-pvc", "/models/a/b", "b"),
        ("model-pvc-root", "/models", "mine"),
        ("model-image", "/models/tandem-demo", "tandem-demo"),
    ],
)
def test_all_serve_one_model(case: str, path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in ("gateway", "prefill", "decode"):
        assert _value(case, process, "model", monkeypatch) == path
        assert _value(case, process, "served_model_name", monkeypatch) == name
        mounts = {each["mountPath"] for each in rendered(case).container(process)["volumeMounts"]}
        is_mounted = any(path == mount or path.startswith(f"{mount}/") for mount in mounts)
        assert is_mounted == (case not in ("minimal", "model-image"))


def test_the_model_is_mounted_read_only() -> None:
    volumes = rendered("model-pvc").deployment("decode")["spec"]["template"]["spec"]["volumes"]
    claim = {"claimName": "models", "readOnly": True}
    assert {"name": "model", "persistentVolumeClaim": claim} in volumes
    host = rendered("model-host").deployment("gateway")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "model", "hostPath": {"path": "/data/models/tandem-demo", "type": "Directory"}} in host
    mounts = rendered("model-host").container("gateway")["volumeMounts"]
    assert {"name": "model", "mountPath": "/models/tandem-demo", "readOnly": True} in mounts


@pytest.mark.parametrize(
    ("case", "address", "bind"),
    [("minimal", "10.1.2.3:7900", "0.0.0.0:7900"), ("ipv6", "[10.1.2.3]:7900", "[::]:7900")],
)
def test_workers_are_called_at_their_pods_address(
    case: str, address: str, bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process in ("prefill", "decode"):
        assert _value(case, process, "advertise", monkeypatch) == address
        assert _value(case, process, "bind", monkeypatch) == bind
        assert _value(case, process, "worker_id", monkeypatch) == f"{NAME}-pod-1"


@pytest.mark.parametrize(
    ("case", "url"),
    [
        ("minimal", f"rediss://USER:{SECRETS}@demo-tandem-redis:6379/0{REDIS_CA}"),
        ("redis-without-password", f"rediss://demo-tandem-redis:6379/0{REDIS_CA}"),
        ("plain-text", f"redis://USER:{SECRETS}@demo-tandem-redis:6379/0"),
        ("certificates-given", f"redis://USER:{SECRETS}@demo-tandem-redis:6379/0"),
        ("external-redis-plain", "redis://redis:6379/3"),
        ("external-redis-url", "rediss://:pw@redis:6379/0"),
        (
            "example-external-redis",
            f"rediss://USER:{SECRETS}@redis.data.svc.cluster.local:6380/0?ssl_ca_certs=/etc/tandem/redis-ca/ca.crt",
        ),
        ("announce", None),
    ],
)
def test_everybody_is_told_of_one_redis(case: str, url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in ("gateway", "router", "prefill", "decode"):
        user = "gateway" if process == "gateway" else "cluster"
        assert _value(case, process, "redis", monkeypatch) == (url and url.replace("USER", user))
    routers = _value(case, "decode", "routers", monkeypatch)
    assert routers == ("demo-tandem-router:7800" if url is None else "")


@pytest.mark.parametrize(
    ("case", "num_replicas"),
    [
        ("minimal", 3_579_139),
        ("router-settings", 1_000_000),
        ("external-redis-plain", DEFAULT_MAX_BLOCK_REPLICAS),
        ("announce", DEFAULT_MAX_BLOCK_REPLICAS),
    ],
)
def test_the_index_fits_into_the_charts_redis(case: str, num_replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the default index was larger than the default Redis; once that was full nobody could join."""
    assert _value(case, "router", "max_block_replicas", monkeypatch) == num_replicas


def test_stored_responses_fit_beside_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _value("minimal", "gateway", "stored_responses_mib", monkeypatch) == 128
    assert _value("external-redis-plain", "gateway", "stored_responses_mib", monkeypatch) is None
    small = render(merged(at("model.uri", "hf://org/name"), at("redis.maxMemoryMiB", 64)))
    assert small.env("gateway")["TANDEM_STORED_RESPONSES_MIB"]["value"] == "16"


def test_as_many_block_replicas_as_fit_are_taken() -> None:
    redis = {"maxMemoryMiB": 1145, "resources": {"limits": {"memory": "1.3G"}}}
    values = merged(at("model.uri", "hf://org/name"), at("redis", redis))
    for num_replicas in (8_000_000, 8_004_130):
        assert render(merged(values, at("router.settings.maxBlockReplicas", num_replicas))).objects


def test_compose_bounds_the_index_as_the_chart_does() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for words in (services["redis"]["command"], rendered("minimal").container("redis")["args"]):
        assert words[words.index("--maxmemory") + 1] == "512mb"
    bound = rendered("minimal").env("router")["TANDEM_MAX_BLOCK_REPLICAS"]["value"]
    assert services["router"]["environment"]["TANDEM_MAX_BLOCK_REPLICAS"] == bound


def test_compose_starts_nothing_without_a_cluster_secret() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for name in ("router", "prefill", "decode", "gateway"):
        secret = services[name]["environment"]["TANDEM_CLUSTER_SECRET"]
        assert secret.startswith("${TANDEM_CLUSTER_SECRET:?"), "compose refuses an empty one, too"
        assert "openssl rand -hex 32" in secret


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("minimal", "redis"),
        ("announce", "announce"),
        ("discovery-kubernetes", "kubernetes"),
        ("discovery-kubernetes-without-redis", "kubernetes"),
        ("discovery-redis", "redis"),
    ],
)
def test_routers_know_how_to_find_workers(case: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(case, "router", monkeypatch)
    assert getattr(settings, "found_by") == mode  # noqa: B009
    if mode == "kubernetes":
        assert getattr(settings, "kubernetes_namespace") == NAMESPACE  # noqa: B009
        selector = str(getattr(settings, "kubernetes_selector"))  # noqa: B009
        labels = rendered(case).deployment("decode")["spec"]["template"]["metadata"]["labels"]
        for term in selector.split(","):
            name, _, value = term.partition("=")
            assert labels[name] == (value or "decode")


def test_several_routers_are_named_one_by_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    routers = _value("minimal", "gateway", "routers", monkeypatch)
    assert routers == "demo-tandem-router:7800,demo-tandem-router-headless:7800"
    assert rendered("minimal").get("Service", "router-headless")["spec"]["clusterIP"] == "None"
    assert _value("announce", "gateway", "routers", monkeypatch) == "demo-tandem-router:7800"


def test_workers_of_another_releases_router_know_its_secret_and_its_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    case = "workers-of-another-release"
    assert _value(case, "decode", "redis", monkeypatch) == f"redis://cluster:{SECRETS}@other-tandem-redis:6379/0"
    assert rendered(case).env("decode")["TANDEM_CLUSTER_SECRET"]["valueFrom"]["secretKeyRef"] == {
        "name": "other-tandem-secrets",
        "key": "cluster-secret",
    }


def test_a_router_can_be_named_by_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: unquoted, YAML took it for a list."""
    for process in ("gateway", "decode"):
        assert _value("other-router-at-an-address", process, "routers", monkeypatch) == "[fd00::1]:7800"


def test_addresses_are_services_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rendered("planner-acts")
    ports = {
        f"{service['metadata']['name']}:{port['port']}"
        for service in made.of_kind("Service")
        for port in service["spec"]["ports"]
    }
    planner = _settings("planner-acts", "planner", monkeypatch)
    for field in ("routers", "gateways"):
        assert set(str(getattr(planner, field)).split(",")) <= ports
    headless = made.get("Service", "gateway-headless")
    assert headless["spec"]["clusterIP"] == "None", "the planner asks every gateway"


def test_the_planner_is_told_of_both_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    made, planner = rendered("example-planner"), _settings("example-planner", "planner", monkeypatch).model_dump()
    objectives = {"mode": "act", "ttft_ms": 800, "tpot_ms": 40, "startup_s": 90}
    bounds = {"min_prefill": 1, "max_prefill": 8, "min_decode": 2, "max_decode": 10, "max_accelerators": 12}
    assert (objectives | bounds).items() <= planner.items()
    assert planner["prefill_accelerators"] == planner["decode_accelerators"] == 1
    assert planner["lease_name"] in made.get("Role", "planner")["rules"][2]["resourceNames"]
    for pool in ("prefill", "decode"):
        deployment = made.deployment(pool)
        assert planner[f"{pool}_deployment"] == deployment["metadata"]["name"]
        terms = dict(term.split("=") for term in planner[f"{pool}_selector"].split(","))
        assert terms == deployment["spec"]["selector"]["matchLabels"]


def test_numbers_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 1000000 of a values file is a float in Helm, which prints it as 1e+06."""
    assert rendered("prefill-settings").env("prefill")["TANDEM_MAX_MODEL_LEN"]["value"] == "1000000"
    assert _value("prefill-settings", "prefill", "prefix_caching", monkeypatch) is False
    assert _value("prefill-settings", "prefill", "kv_cache_gib", monkeypatch) == 0.5


def test_ranks_are_processes_of_one_pod() -> None:
    stages = at("prefill.ranks.pipeline", 2)
    made = render(merged(at("model.uri", "hf://Qwen/Qwen3-8B"), at("decode.ranks.tensor", 2), stages))
    assert made.env("decode")["TANDEM_TP"]["value"] == "2"
    assert "TANDEM_TP" not in made.env("prefill")
    assert made.env("prefill")["TANDEM_PP"]["value"] == "2"
    assert "TANDEM_PP" not in made.env("decode")
    contexts = render(
        merged(
            at("model.uri", "hf://Qwen/Qwen3-8B"),
            at("prefill.ranks", {"pipeline": 2, "context": 2}),
            at("prefill.resources.requests.cpu", 4),
        )
    )
    assert {name: contexts.env("prefill")[f"TANDEM_{name}"]["value"] for name in ("CP", "PP")} == {"CP": "2", "PP": "2"}
    assert "TANDEM_CP" not in contexts.env("decode")


def test_pods_of_a_group_have_whole_stages() -> None:
    made = rendered("hosts-stages")
    leaders = {}
    for pool in ("prefill", "decode"):
        spec = made.get("LeaderWorkerSet", pool)["spec"]["leaderWorkerTemplate"]
        assert spec["size"] == 2
        (container,) = spec["leaderTemplate"]["spec"]["containers"]
        leaders[pool] = {each["name"].removeprefix("TANDEM_"): each.get("value") for each in container["env"]}
    assert {name: leaders["decode"].get(name) for name in ("TP", "PP", "CP", "HOSTS")} == {
        "TP": "2",
        "PP": "2",
        "CP": None,
        "HOSTS": "2",
    }
    assert {name: leaders["prefill"].get(name) for name in ("TP", "PP", "CP", "HOSTS")} == {
        "TP": None,
        "PP": "2",
        "CP": "2",
        "HOSTS": "2",
    }


def test_ranks_in_several_pods_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts join where the leader listens, with the settings that both of them read."""
    spec = rendered("hosts").get("LeaderWorkerSet", "decode")["spec"]["leaderWorkerTemplate"]
    leader, host = (spec[f"{role}Template"]["spec"]["containers"][0] for role in ("leader", "worker"))
    told, asked = ({each["name"]: each.get("value", SECRETS) for each in one["env"]} for one in (leader, host))
    assert (leader["command"][-1], host["command"][-1]) == ("services.decode", "services.rank_host")
    assert (spec["size"], told["TANDEM_TP"], told["TANDEM_HOSTS"]) == (4, "8", "4")
    assert {each["name"]: each["containerPort"] for each in leader["ports"]}["ranks"] == 7903
    assert told["TANDEM_RANKS_BIND"].endswith(":7903")
    asked["TANDEM_LEADER"] = asked["TANDEM_LEADER"].replace("$(LWS_LEADER_ADDRESS)", "a.b")
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    kind: type[BaseSettings] = RankHostSettings
    settings = kind()
    assert isinstance(settings, RankHostSettings)
    assert settings.leader_address == ("a.b", 7903)
    ports = {each["name"]: each["containerPort"] for each in host["ports"]}
    assert (settings.metrics_port, settings.kv_bind) == (ports["metrics"], f"0.0.0.0:{ports['kv']}")
    assert settings.advertise_host == "$(POD_IP)"
    assert settings.secret == SECRETS.encode()


def test_nobody_is_left_without_the_cluster_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for process, _ in _processes(rendered("planner-acts")):
        secret = getattr(_settings("planner-acts", process, monkeypatch), "secret")  # noqa: B009
        assert secret == SECRETS.encode()


def test_listening_ports_are_the_containers_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    for process, container in _processes(rendered("planner-acts")):
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        values = _settings("planner-acts", process, monkeypatch).model_dump()
        told = {"http": values.get("port"), "metrics": values.get("metrics_port"), "kv": values.get("kv_port")}
        if values.get("admin_bind") is not None:
            told["metrics"] = int(values["admin_bind"].rpartition(":")[2])
        if "bind" in values:
            told["grpc"] = int(values["bind"].rpartition(":")[2])
        assert ports == {name: port for name, port in told.items() if port is not None}


def test_accounts_can_be_in_the_same_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings("minimal", "gateway", monkeypatch)
    assert isinstance(settings, GatewaySettings)
    assert settings.accounts is not None
    assert settings.accounts.get_secret_value() == f"rediss://accounts:{SECRETS}@{NAME}-tandem-redis:6379/0{REDIS_CA}"
