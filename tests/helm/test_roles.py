"""One credential a role: which pod has which user of Redis and which key, in the chart and in compose."""

import re
from typing import Any

import pytest
import yaml

from tests.helm.renders import ALL, rendered
from tests.helpers.compose import compose_services
from tests.helpers.helm import CHART, NAME, Object, Rendered, at, merged, pods, render

RULES = (CHART / "files" / "redis-users.acl").read_text()
MODEL = at("model.uri", "hf://org/name")
EXTERNAL: dict[str, Any] = {
    "redis": {"enabled": False},
    "externalRedis": {"host": "redis", "username": "cluster", "existingSecret": "redis", "passwordKey": "cluster"},
}
ROLES = {"router": {"cluster"}, "prefill": {"cluster"}, "decode": {"cluster"}, "gateway": {"gateway", "accounts"}}


def _users(arguments: list[str]) -> list[list[str]]:
    """The words of each `--user`."""
    found: list[list[str]] = []
    for word in arguments[arguments.index("--user") :]:
        if word == "--user":
            found.append([])
        else:
            found[-1].append(word)
    return found


def _rules(users: list[list[str]]) -> list[list[str]]:
    return [[word for word in user if not word.startswith(">")] for user in users]


def test_redis_has_the_users_of_the_file_each_with_a_password() -> None:
    expected = [line.split()[1:] for line in RULES.splitlines()]
    in_chart = _users(rendered("minimal").container("redis")["args"])
    in_compose = _users(compose_services()["redis"]["command"])
    assert _rules(in_chart) == _rules(in_compose) == expected
    assert expected[0] == ["default", "off"]
    for chart, compose in zip(in_chart[1:], in_compose[1:], strict=True):
        variable = f"REDIS_{chart[0].upper()}_PASSWORD"
        assert chart[-1] == f">$({variable})"
        assert compose[-1].startswith(f">${{TANDEM_{variable}:?")


def test_compose_gives_each_process_its_user() -> None:
    services = compose_services()
    for name, user in (("router", "cluster"), ("prefill", "cluster"), ("decode", "cluster"), ("gateway", "gateway")):
        url = services[name]["environment"]["TANDEM_REDIS"]
        password = f"TANDEM_REDIS_{user.upper()}_PASSWORD"
        assert re.fullmatch(rf"rediss://{user}:\${{{password}:\?[^}}]+}}@redis:6379/0\?ssl_ca_certs=.+", url)
        told = yaml.safe_dump(services[name])
        others = {
            f"TANDEM_REDIS_{each.upper()}_PASSWORD" for each in ("cluster", "gateway", "accounts") if each != user
        }
        assert not [other for other in others if other in told]


def _secret_keys(pod: Object) -> set[tuple[str, str]]:
    containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
    refs = [each.get("valueFrom", {}).get("secretKeyRef") for box in containers for each in box.get("env", [])]
    return {(ref["name"], ref["key"]) for ref in refs if ref}


@pytest.mark.parametrize("pool", ROLES)
def test_a_pod_has_the_passwords_of_its_roles_and_no_others(pool: str) -> None:
    made = rendered("planner-acts")
    found = {
        found.group(1).lower()
        for each in made.container(pool)["env"]
        if (found := re.fullmatch(r"REDIS_(\w+)_PASSWORD", each["name"]))
    }
    assert found == ROLES[pool]


def test_workers_are_never_told_what_only_gateways_know() -> None:
    """Over the whole matrix, whatever Redis and whatever secrets there are."""
    for case in ALL:
        for name, pod in pods(rendered(case).objects):
            component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            keys = {key for _, key in _secret_keys(pod)}
            if component in ("prefill", "decode", "router", "planner"):
                assert not [key for key in keys if "accounts" in key or "gateway" in key or "responses" in key], name


def test_a_password_is_drawn_for_each_user() -> None:
    secret = rendered("minimal").get("Secret", "secrets")
    passwords = {key for key in secret["data"] if "password" in key}
    assert passwords == {"redis-password", "redis-gateway-password", "redis-accounts-password"}
    existing = rendered("existing-secrets")
    assert ("redis", "redis-accounts-password") in _secret_keys(existing.deployment("gateway")["spec"]["template"])
    assert not existing.of_kind("Secret") or not [
        key for secret in existing.of_kind("Secret") for key in secret["data"] if "password" in key
    ]


def _value(made: Rendered, pool: str, name: str) -> Any:
    entry = made.env(pool)[name]
    return entry.get("value") or tuple(entry["valueFrom"]["secretKeyRef"].values())


def test_an_external_redis_has_one_user_unless_more_are_named() -> None:
    made = render(merged(MODEL, EXTERNAL))
    for pool, variable in (("decode", "TANDEM_REDIS"), ("gateway", "TANDEM_REDIS"), ("gateway", "TANDEM_ACCOUNTS")):
        assert re.sub(r"REDIS_\w+_PASSWORD", "P", _value(made, pool, variable)) == "redis://cluster:$(P)@redis:6379/0"
    for role in ("GATEWAY", "ACCOUNTS"):
        assert _value(made, "gateway", f"REDIS_{role}_PASSWORD") == ("redis", "cluster")


def test_roles_of_an_external_redis_can_have_users_secrets_and_urls() -> None:
    roles = {
        "gateway": {"username": "gateway", "passwordKey": "gateway"},
        "accounts": {"existingSecret": "accounts", "urlKey": "url"},
    }
    made = render(merged(MODEL, EXTERNAL, {"externalRedis": roles}))
    assert _value(made, "decode", "TANDEM_REDIS") == "redis://cluster:$(REDIS_CLUSTER_PASSWORD)@redis:6379/0"
    assert _value(made, "gateway", "TANDEM_REDIS") == "redis://gateway:$(REDIS_GATEWAY_PASSWORD)@redis:6379/0"
    assert _value(made, "gateway", "REDIS_GATEWAY_PASSWORD") == ("redis", "gateway")
    assert _value(made, "gateway", "TANDEM_ACCOUNTS") == ("accounts", "url")
    assert f"{NAME}-tandem-secrets" in {
        name for name, _ in _secret_keys(made.deployment("gateway")["spec"]["template"])
    }


def test_gateways_alone_have_the_key_of_stored_responses() -> None:
    made = rendered("minimal")
    assert _value(made, "gateway", "TANDEM_RESPONSES_KEY") == (f"{NAME}-tandem-secrets", "responses-key")
    assert "TANDEM_RESPONSES_KEY" not in made.env("decode")
    assert _value(rendered("redis-claim"), "gateway", "TANDEM_RESPONSES_KEY") == ("responses", "k")
    assert "responses-key" not in rendered("redis-claim").of_kind("Secret")[0]["data"]
    assert "TANDEM_RESPONSES_KEY" not in rendered("announce").env("gateway"), "they are in the gateway's memory"


@pytest.mark.parametrize(
    ("case", "claim", "is_made"),
    [
        ("minimal", f"{NAME}-tandem-redis", True),
        ("redis-volume", f"{NAME}-tandem-redis", True),
        ("redis-claim", "kept", False),
        ("anonymous", None, False),
        ("redis-for-hints", None, False),
        ("accounts", None, False),
        ("external-redis-plain", None, False),
    ],
)
def test_redis_has_a_volume_where_accounts_are_in_it(case: str, claim: str | None, is_made: bool) -> None:
    made = rendered(case)
    claims = made.of_kind("PersistentVolumeClaim")
    assert [each["metadata"]["name"] for each in claims] == ([claim] if is_made else [])
    if not made.has("Deployment", "redis"):
        return
    volumes = made.deployment("redis")["spec"]["template"]["spec"]["volumes"]
    found = [each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each]
    assert found == ([claim] if claim else [])
    arguments = made.container("redis")["args"]
    assert arguments[arguments.index("--appendonly") + 1] == ("yes" if claim else "no")
    assert arguments[arguments.index("--dir") + 1] == ("/data" if claim else "/tmp")


def test_a_claim_is_as_asked_for_and_outlives_the_release() -> None:
    (claim,) = rendered("redis-volume").of_kind("PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"]["storage"] == "8Gi"
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
