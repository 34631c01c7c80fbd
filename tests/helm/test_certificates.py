"""Certificates of the chart: of which role each pod has, and that its processes take those that the chart draws."""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from cryptography import x509

from tandem.rpc.credentials import certified_role
from tandem.tls.files import TlsFiles
from tandem.tls.identity import CertifiedName, CertifiedRole
from tests.helm.cases import MINIMAL
from tests.helm.renders import ALL, rendered
from tests.helpers.helm import CHART, NAME, NAMESPACE, POOLS, Object, at, merged, render

DRAWN = (CertifiedRole.GATEWAY, CertifiedRole.ROUTER, CertifiedRole.WORKER, CertifiedRole.PLANNER)
REDIS_NAMES = [f"{NAME}-tandem-redis{rest}" for rest in ("", f".{NAMESPACE}", f".{NAMESPACE}.svc")]
PLANNED = merged(MINIMAL, at("planner.enabled", True))


def drawn(values: Mapping[str, Any]) -> dict[str, dict[str, bytes]]:
    """Data of the Secrets of certificates, by role. NOTE: renders of the matrix mask it."""
    made = helm_python.Chart.load(str(CHART)).render(dict(values), name=NAME, namespace=NAMESPACE)
    objects = [
        each
        for text in made.values()
        if "kubernetes.io/tls" in text
        for each in yaml.safe_load_all(text)
        if each and each["type"] == "kubernetes.io/tls"
    ]
    return {
        each["metadata"]["name"].rpartition("-")[2]: {
            name: base64.b64decode(value, validate=True) for name, value in each["data"].items()
        }
        for each in objects
    }


def secret_of(pod: Object) -> str | None:
    """The Secret of a pod's certificates."""
    found = [each["secret"]["secretName"] for each in pod["volumes"] if each["name"] == "tls"]
    return found[0] if found else None


@pytest.fixture(scope="module")
def secrets() -> dict[str, dict[str, bytes]]:
    return drawn(MINIMAL)


@pytest.mark.parametrize("role", DRAWN)
def test_processes_take_what_the_chart_draws(
    role: CertifiedRole, secrets: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    for name, data in secrets[role].items():
        (tmp_path / name).write_bytes(data)
    material = TlsFiles(tmp_path, role).current()
    assert material.name == CertifiedName(role, f"{NAME}.{NAMESPACE}")
    end = x509.load_pem_x509_certificate(material.certificate).not_valid_after_utc
    assert timedelta(days=3649) < end - datetime.now(UTC) <= timedelta(days=3650)


def test_all_are_of_one_authority_whose_key_is_nowhere(secrets: dict[str, dict[str, bytes]]) -> None:
    assert set(secrets) == {*DRAWN, "redis"}
    assert len({secrets[role]["ca.crt"] for role in DRAWN}) == 1
    assert len({data["tls.key"] for data in secrets.values()}) == len(secrets)
    assert {name for data in secrets.values() for name in data} == {"tls.crt", "tls.key", "ca.crt"}
    assert all(b"PRIVATE KEY" not in data["ca.crt"] for data in secrets.values())


def test_the_deployment_is_in_the_names() -> None:
    secrets = drawn(merged(MINIMAL, at("tls.deployment", "llm.example")))
    certificate = x509.load_pem_x509_certificate(secrets["router"]["tls.crt"])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["router.llm.example.tandem.internal"]


@pytest.mark.parametrize("pool", POOLS)
def test_a_pod_has_the_key_of_its_role_alone(pool: str) -> None:
    made = render(PLANNED)
    role = certified_role(pool)
    assert secret_of(made.deployment(pool)["spec"]["template"]["spec"]) == f"{NAME}-tandem-tls-{role}"
    (mount,) = [each for each in made.container(pool)["volumeMounts"] if each["name"] == "tls"]
    assert mount["readOnly"]
    assert made.env(pool)["TANDEM_TLS_DIR"]["value"] == mount["mountPath"]
    assert "TANDEM_INSECURE" not in made.env(pool)


def test_plain_text_is_said() -> None:
    made = rendered("plain-text")
    for pool in ("gateway", "router", "prefill", "decode"):
        assert made.env(pool)["TANDEM_INSECURE"]["value"] == "true"
        assert "TANDEM_TLS_DIR" not in made.env(pool)
        assert secret_of(made.deployment(pool)["spec"]["template"]["spec"]) is None
    assert "can read and change prompts, answers and KV blocks" in made.notes
    assert not [each for each in made.of_kind("Secret") if each["type"] == "kubernetes.io/tls"]


def test_cert_manager_makes_one_for_each_role_that_runs() -> None:
    made = rendered("certificates-of-cert-manager")
    found = {each["spec"]["dnsNames"][0]: each["spec"] for each in made.of_kind("Certificate")}
    redis = found.pop(REDIS_NAMES[0])
    assert (redis["dnsNames"], redis["secretName"]) == (REDIS_NAMES, f"{NAME}-tandem-certificate-redis")
    assert set(found) == {str(CertifiedName(role, f"{NAME}.{NAMESPACE}")) for role in DRAWN}
    for name, spec in found.items():
        assert spec["secretName"] == f"{NAME}-tandem-certificate-{name.partition('.')[0]}"
        assert {"server auth", "client auth"} <= set(spec["usages"])
    assert not [each for each in made.of_kind("Secret") if each["type"] == "kubernetes.io/tls"]


def test_secrets_of_cert_manager_are_not_those_that_the_chart_draws() -> None:
    """Regression: after a change of the source Helm deleted what cert-manager had made, or took it for its own."""
    made = rendered("certificates-of-cert-manager")
    used = {secret_of(made.deployment(name)["spec"]["template"]["spec"]) for name in (*POOLS, "redis")}
    assert used == {each["spec"]["secretName"] for each in made.of_kind("Certificate")}
    assert not used & {f"{NAME}-tandem-tls-{role}" for role in DRAWN}


def test_given_secrets_are_used_and_nothing_is_drawn() -> None:
    made = rendered("certificates-given")
    pods = {pool: made.deployment(pool)["spec"]["template"]["spec"] for pool in ("gateway", "router", "prefill")}
    assert {pool: secret_of(pod) for pool, pod in pods.items()} == {"gateway": "a", "router": "b", "prefill": "c"}
    assert not [each for each in made.of_kind("Secret") if each["type"] == "kubernetes.io/tls"]


def test_redis_has_a_certificate_for_the_names_of_its_service() -> None:
    data = drawn(MINIMAL)["redis"]
    names = x509.load_pem_x509_certificate(data["tls.crt"]).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == REDIS_NAMES
    pod = rendered("minimal").deployment("redis")["spec"]["template"]["spec"]
    assert secret_of(pod) == f"{NAME}-tandem-tls-redis"


@pytest.mark.parametrize(
    ("case", "secret"),
    [
        ("minimal", f"{NAME}-tandem-tls-redis"),
        ("certificates-of-cert-manager", f"{NAME}-tandem-certificate-redis"),
        ("certificates-given-to-redis", "d"),
    ],
)
def test_who_asks_redis_has_its_authority_and_not_its_key(case: str, secret: str) -> None:
    made = rendered(case)
    assert secret_of(made.deployment("redis")["spec"]["template"]["spec"]) == secret
    for pool in ("gateway", "router", "prefill", "decode"):
        volumes = made.deployment(pool)["spec"]["template"]["spec"]["volumes"]
        (source,) = [each["secret"] for each in volumes if each["name"] == "redis-ca"]
        assert source == {"secretName": secret, "items": [{"key": "ca.crt", "path": "ca.crt"}]}


@pytest.mark.parametrize("tls", [{}, {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}])
def test_a_secret_given_to_redis_alone_is_used_and_not_made(tls: dict[str, Any]) -> None:
    """Regression: it was rendered as a Secret of the release, which Helm refuses, or as one that cert-manager fills."""
    made = render(merged(MINIMAL, {"tls": {"existingSecrets": {"redis": "d"}, **tls}}))
    assert secret_of(made.deployment("redis")["spec"]["template"]["spec"]) == "d"
    assert "--tls-port" in made.container("redis")["args"]
    names = {each["metadata"]["name"] for each in made.of_kind("Secret", "Certificate")}
    assert not names & {"d", f"{NAME}-tandem-tls-redis-next"}
    assert {name.rpartition("-")[2] for name in names} >= {"gateway", "router", "worker"}


def test_redis_in_plain_text_is_said() -> None:
    """Certificates of one's own from before Redis had one go on to work."""
    made = rendered("certificates-given")
    assert "tls.existingSecrets.redis is empty, so Redis is asked in plain text" in made.notes
    assert "--tls-port" not in made.container("redis")["args"]
    assert "Redis is asked in plain text" not in rendered("certificates-given-to-redis").notes


def test_certificates_restart_no_pod() -> None:
    """They are drawn anew in every render here; a change of them must reach processes that run."""
    first, second = (render(MINIMAL).deployment("router")["spec"]["template"] for _ in range(2))
    assert first == second


def test_no_other_pod_has_a_key() -> None:
    for case in ALL:
        for each in rendered(case).objects:
            if each["kind"] == "Pod" or each["kind"] == "Job":
                pod = each["spec"] if each["kind"] == "Pod" else each["spec"]["template"]["spec"]
                secrets = [each["secret"] for each in pod.get("volumes", []) if "secret" in each]
                for source in secrets:
                    if "-tls-" in source["secretName"]:
                        assert [each["key"] for each in source["items"]] == ["ca.crt"], case
