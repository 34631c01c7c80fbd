"""Renewal of the certificates that the chart draws: by `helm upgrade`, with no pod refusing another in between."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from tandem.tls.contexts import check_by_handshake
from tandem.tls.files import Material, TlsFiles
from tandem.tls.identity import CertifiedRole
from tests.helm.cases import MINIMAL
from tests.helpers.helm import NAME, at, merged
from tests.helpers.helm_cluster import DATE_FORM, HelmCluster, helm_cluster

DAYS = 90
VALUES = merged(MINIMAL, at("tls.days", DAYS))
ROLES = (CertifiedRole.GATEWAY, CertifiedRole.ROUTER, CertifiedRole.WORKER, CertifiedRole.PLANNER)

Pods = Mapping[CertifiedRole, Material]


@pytest.fixture
def cluster() -> Iterator[HelmCluster]:
    with helm_cluster() as made:
        made.upgrade(VALUES)
        yield made


def pods(cluster: HelmCluster, place: Path) -> Pods:
    """TLS material of each role, read from the current Secrets."""
    found = {}
    for role in ROLES:
        directory = place / f"{role}-{len(list(place.iterdir()))}"
        directory.mkdir()
        for name, data in cluster.data(f"tls-{role}").items():
            (directory / name).write_bytes(data)
        found[role] = TlsFiles(directory, role).current()
    return found


def check_that_all_talk(some: Pods, others: Pods) -> None:
    """Both ways: who has the new Secret with who has the old."""
    for client, server in ((some, others), (others, some)):
        called = server[CertifiedRole.WORKER]
        check_by_handshake(called.server, client[CertifiedRole.GATEWAY].client, str(called.name))


def certificate(pods: Pods) -> bytes:
    return pods[CertifiedRole.WORKER].certificate


def authorities(pods: Pods) -> set[bytes]:
    found = x509.load_pem_x509_certificates(pods[CertifiedRole.WORKER].ca)
    return {each.fingerprint(each.signature_hash_algorithm) for each in found if each.signature_hash_algorithm}


def test_an_upgrade_keeps_what_is_valid(cluster: HelmCluster) -> None:
    cluster.age(timedelta(days=DAYS / 3 - 1))
    before = dict(cluster.secrets)
    cluster.upgrade(VALUES)
    assert cluster.secrets == before
    first_day, last_day = (datetime.now(UTC).date() + timedelta(days=each) for each in (1, DAYS * 2 / 3 + 1))
    assert f"An upgrade renews them from {first_day} on, and must by {last_day}." in cluster.notes


@pytest.mark.parametrize("interval", [31, 61])
def test_upgrades_renew_and_nobody_is_refused(interval: int, cluster: HelmCluster, tmp_path: Path) -> None:
    """Over a year, one every `interval` days. The last one comes as late as it may."""
    before, num_renewals, worn = pods(cluster, tmp_path), 0, 0
    for _ in range(0, 365, interval):
        cluster.age(timedelta(days=interval))
        worn += interval
        cluster.upgrade(VALUES)
        after = pods(cluster, tmp_path)
        check_that_all_talk(before, after)
        if certificate(after) != certificate(before):
            assert authorities(before) & authorities(after), "a renewal must not replace all"
            num_renewals, worn = num_renewals + 1, _worn_days(cluster)
        assert worn < DAYS
        before = after
    assert num_renewals >= 365 // DAYS


def _worn_days(cluster: HelmCluster) -> int:
    drawn = cluster.secrets[f"{NAME}-tandem-tls-worker"]["metadata"]["annotations"]["tandem.dev/drawn"]
    return (datetime.now(UTC).replace(tzinfo=None) - datetime.strptime(drawn, DATE_FORM)).days


def test_an_authority_goes_with_the_second_renewal(cluster: HelmCluster, tmp_path: Path) -> None:
    """So what it signed, or would sign for who has its key, is refused from then on."""
    generations = [pods(cluster, tmp_path)]
    for _ in range(2):
        cluster.age(timedelta(days=DAYS / 3))
        cluster.upgrade(VALUES)
        generations.append(pods(cluster, tmp_path))
    assert len({certificate(each) for each in generations}) == 3
    assert [len(authorities(each)) for each in generations] == [2, 3, 3]
    with pytest.raises(Exception, match="refused by a"):
        check_that_all_talk(generations[0], generations[2])


def test_secrets_of_a_chart_that_renewed_nothing(cluster: HelmCluster, tmp_path: Path) -> None:
    """They have no dates and one CA; they are kept, and renewed in time."""
    del cluster.secrets[f"{NAME}-tandem-tls-next"]
    for secret in cluster.secrets.values():
        if secret["type"] == "kubernetes.io/tls":
            del secret["metadata"]["annotations"]
            made = datetime.now(UTC) - timedelta(days=DAYS * 0.7)
            secret["metadata"]["creationTimestamp"] = made.strftime(DATE_FORM)
    before = pods(cluster, tmp_path)
    cluster.upgrade(VALUES)
    trusting = pods(cluster, tmp_path)
    assert certificate(trusting) == certificate(before)
    check_that_all_talk(before, trusting)
    cluster.age(timedelta(hours=2))
    cluster.upgrade(VALUES)
    renewed = pods(cluster, tmp_path)
    assert certificate(renewed) != certificate(before)
    check_that_all_talk(trusting, renewed)


def test_what_has_ended_is_drawn_anew(cluster: HelmCluster, tmp_path: Path) -> None:
    before = pods(cluster, tmp_path)
    cluster.age(timedelta(days=DAYS + 1))
    cluster.upgrade(VALUES)
    after = pods(cluster, tmp_path)
    check_that_all_talk(after, after)
    assert not authorities(before) & authorities(after)


def test_a_secret_that_was_deleted_is_a_renewal(cluster: HelmCluster, tmp_path: Path) -> None:
    """Nobody can sign the missing one again. Regression: all pods refused each other for a minute."""
    before = pods(cluster, tmp_path)
    del cluster.secrets[f"{NAME}-tandem-tls-planner"]
    cluster.upgrade(VALUES)
    after = pods(cluster, tmp_path)
    assert certificate(after) != certificate(before)
    check_that_all_talk(before, after)


def test_certificates_from_before_redis_had_one_are_kept(cluster: HelmCluster, tmp_path: Path) -> None:
    """Their authority's key is nowhere, so that Redis gets an authority of its own."""
    for name in ("redis", "redis-next"):
        del cluster.secrets[f"{NAME}-tandem-tls-{name}"]
    before = pods(cluster, tmp_path)
    cluster.upgrade(VALUES)
    after = pods(cluster, tmp_path)
    assert (certificate(after), authorities(after)) == (certificate(before), authorities(before))
    assert cluster.data("tls-redis")["ca.crt"] != before[CertifiedRole.WORKER].ca


def test_redis_is_trusted_while_its_certificate_is_renewed(cluster: HelmCluster) -> None:
    """By who has the new authorities and by who has the old; redis-server reads its certificate when it starts."""
    before = cluster.data("tls-redis")
    cluster.age(timedelta(days=DAYS / 3))
    cluster.upgrade(VALUES)
    after = cluster.data("tls-redis")
    assert after["tls.crt"] != before["tls.crt"]
    for trusted in (before["ca.crt"], after["ca.crt"]):
        for certificate in (before["tls.crt"], after["tls.crt"]):
            assert _is_signed_by_one_of(x509.load_pem_x509_certificates(trusted), certificate)


def _is_signed_by_one_of(authorities: list[x509.Certificate], certificate: bytes) -> bool:
    signed = x509.load_pem_x509_certificate(certificate)
    for authority in authorities:
        try:
            signed.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError):
            continue
        return True
    return False


def test_what_comes_next_is_in_no_pod(cluster: HelmCluster) -> None:
    keys = {name for name in cluster.data("tls-next") if name.endswith(".key")}
    assert keys == {f"{role}.key" for role in ROLES}
    assert all(set(cluster.data(f"tls-{role}")) == {"tls.crt", "tls.key", "ca.crt"} for role in ROLES)
