"""One DNS name of a certificate says role and deployment; everything else names nobody."""

import pytest

from tandem.tls.identity import CertifiedName, CertifiedRole, certified_name, dns_name, is_deployment


@pytest.mark.parametrize("role", CertifiedRole)
@pytest.mark.parametrize("deployment", ["up", "chat.default", "a.b.c-d"])
def test_a_name_is_read_as_it_was_written(role: CertifiedRole, deployment: str) -> None:
    name = CertifiedName(role, deployment)
    assert str(name) == dns_name(role, deployment)
    assert certified_name([str(name)]) == name
    assert certified_name(["chat-router.default.svc", str(name).upper(), "localhost"]) == name


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["worker.tandem.internal"],
        ["worker..tandem.internal"],
        ["*.chat.default.tandem.internal"],
        ["worker.chat.default.tandem.internal.example.com"],
        ["worker.chat.default"],
        ["decode.chat.default.tandem.internal"],
        ["xworker.chat.default.tandem.internal"],
        ["worker.chat.default.tandem.internal\n"],
        ["worker.chat.default.tandem.internal", "gateway.chat.default.tandem.internal"],
        ["worker.chat.default.tandem.internal", "worker.chat.other.tandem.internal"],
    ],
)
def test_what_names_nobody(names: list[str]) -> None:
    assert certified_name(names) is None


@pytest.mark.parametrize(("name", "is_one"), [("a" * 63, True), ("a" * 64, False), ("A", False), ("-a", False)])
def test_which_deployments_can_be_named(name: str, is_one: bool) -> None:
    assert is_deployment(name) is is_one
