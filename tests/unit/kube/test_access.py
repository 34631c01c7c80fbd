from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.kube.access import Access, find_access

IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("t")
    (folder / "namespace").write_text("prod\n")
    return folder


def test_a_pod_is_its_service_account(account: Path, tmp_path: Path) -> None:
    environ = {**IN_POD, "KUBECONFIG": str(tmp_path / "unused")}
    assert find_access(environ, account) == Access(
        url="https://10.96.0.1:443", token_file=account / "token", ca_file=account / "ca.crt", namespace="prod"
    )


def test_an_ipv6_cluster(account: Path) -> None:
    assert find_access({**IN_POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}, account).url == "https://[fd00::1]:443"


def test_a_pod_without_a_token_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="automountServiceAccountToken"):
        find_access(IN_POD, tmp_path)


def test_elsewhere_it_is_a_kubeconfig(tmp_path: Path) -> None:
    named, usual = tmp_path / "named", tmp_path / ".kube" / "config"
    usual.parent.mkdir()
    for path in (named, usual):
        path.write_text("{}")
    assert find_access({"KUBECONFIG": str(named), "HOME": str(tmp_path)}).kubeconfig == str(named)
    assert find_access({"HOME": str(tmp_path)}).kubeconfig == str(usual)
    assert find_access({"KUBECONFIG": f"{tmp_path}/missing:{named}"}).kubeconfig == f"{tmp_path}/missing:{named}"


def test_nowhere_is_said(tmp_path: Path) -> None:
    for environ in ({"HOME": str(tmp_path)}, {"KUBECONFIG": str(tmp_path / "missing")}):
        with pytest.raises(ConfigurationError, match="KUBECONFIG"):
            find_access(environ)


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(Access(url="http://h", token="hidden"))
