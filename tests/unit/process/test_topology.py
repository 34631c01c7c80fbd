import random
import socket
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.process.cores import Share, parse_cpus, share_cores
from tandem.process.ports import free_ports
from tandem.process.process_spec import ProcessSpec
from tandem.process.topology import Topology
from tests.helpers.secret import SECRET


def topology(**changes: object) -> Topology:
    fields: dict[str, object] = {
        "model": "models/demo",
        "served_model_name": "demo",
        "num_prefill": 2,
        "num_decode": 1,
        "num_routers": 2,
        "host": "127.0.0.1",
        "gateway_ports": (8000,),
        "ports": tuple(range(101, 111)),
        "cluster_secret": SECRET.decode(),
        "shares": (Share(4, (0, 1, 2, 3)), Share(4, (4, 5, 6, 7)), Share(4)),
    }
    return Topology(**(fields | changes))  # type: ignore[arg-type]


def flag(spec: ProcessSpec, name: str) -> str | None:
    return spec.argv[spec.argv.index(name) + 1] if name in spec.argv else None


def by_name(made: Topology) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in made.specs()}


def test_the_secret_is_in_the_environment_and_out_of_sight() -> None:
    made = topology()
    for spec in made.specs():
        assert spec.env["TANDEM_CLUSTER_SECRET"] == SECRET.decode()
        assert SECRET.decode() not in " ".join(spec.argv)
        assert SECRET.decode() not in repr(spec)
    assert SECRET.decode() not in repr(made)


def test_each_role_has_certificates_of_its_own() -> None:
    directories = {spec.name: spec.env["TANDEM_TLS_DIR"] for spec in topology(tls_dir=Path("/run/tls")).specs()}
    assert directories == {
        **dict.fromkeys(("router-0", "router-1"), "/run/tls/router"),
        **dict.fromkeys(("prefill-0", "prefill-1", "decode-0"), "/run/tls/worker"),
        "gateway": "/run/tls/gateway",
    }
    assert not any("TANDEM_TLS_DIR" in spec.env for spec in topology().specs())


def test_names_modules_and_tiers() -> None:
    specs = topology().specs()
    assert [(spec.name, spec.argv[2], spec.tier) for spec in specs] == [
        ("router-0", "services.router", 0),
        ("router-1", "services.router", 0),
        ("prefill-0", "services.prefill", 1),
        ("prefill-1", "services.prefill", 1),
        ("decode-0", "services.decode", 2),
        ("gateway", "services.gateway", 3),
    ]


def test_every_internal_process_has_two_ports_of_its_own_and_the_rest_know_them() -> None:
    specs = by_name(topology())
    binds = [flag(spec, "--bind") for spec in specs.values()][:-1]
    metrics = [flag(spec, "--metrics-port") for spec in specs.values()][:-1]
    assert binds == [f"127.0.0.1:{port}" for port in (101, 103, 105, 107, 109)]
    assert metrics == ["102", "104", "106", "108", "110"]
    assert flag(specs["decode-0"], "--routers") == "127.0.0.1:101,127.0.0.1:103"
    assert flag(specs["gateway"], "--routers") == "127.0.0.1:101,127.0.0.1:103"
    assert specs["decode-0"].ready_url == "http://127.0.0.1:110/health"
    assert specs["gateway"].ready_url == "http://127.0.0.1:8000/ready"
    assert topology().metrics_url("prefill-1") == "http://127.0.0.1:108"
    assert topology().metrics_url("gateway") == "http://127.0.0.1:8000"


def test_with_redis_workers_are_found_there() -> None:
    specs = by_name(topology(redis="redis://h/0", node="host-8000"))
    assert {spec.env["TANDEM_REDIS"] for spec in specs.values()} == {"redis://h/0"}
    assert flag(specs["prefill-0"], "--routers") is None
    assert flag(specs["prefill-0"], "--worker-id") == "prefill-0.host-8000"


def test_a_password_of_redis_stands_on_no_command_line() -> None:
    """It was handed on by flags, so that `ps` showed what had been given by the environment."""
    specs = topology(redis="redis://:s3cret@h/0").specs()
    assert not [argument for spec in specs for argument in spec.argv if "s3cret" in argument]


def test_flags_of_a_role_and_of_one_process_follow_the_common_ones() -> None:
    more = {"decode": ("--a", "1"), "prefill-1": ("--b", "2"), "gateway": ("--c", "3")}
    specs = by_name(topology(worker_flags=("--block-size", "32"), flags=more))
    assert specs["decode-0"].argv[-4:] == ("--block-size", "32", "--a", "1")
    assert specs["prefill-1"].argv[-2:] == ("--b", "2")
    assert specs["prefill-0"].argv[-2:] == ("--block-size", "32")
    assert specs["gateway"].argv[-2:] == ("--c", "3")
    assert specs["gateway"].argv.count("--c") == 1
    assert "--block-size" not in specs["gateway"].argv


def test_workers_get_their_share_of_the_cores() -> None:
    specs = by_name(topology())
    assert (flag(specs["prefill-0"], "--num-threads"), specs["prefill-0"].cpus) == ("4", (0, 1, 2, 3))
    assert specs["decode-0"].cpus == ()
    assert specs["prefill-0"].env["OMP_NUM_THREADS"] == "4"
    assert specs["gateway"].env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("10.0.0.5", "http://10.0.0.5:8000")],
)
def test_the_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert topology(host=host).gateway_url() == url


def test_several_gateways_are_numbered() -> None:
    made = topology(gateway_ports=(8000, 8001))
    assert [spec.name for spec in made.specs()][-2:] == ["gateway-0", "gateway-1"]
    assert made.metrics_url("gateway-1") == "http://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("cpus", "num_workers", "expected"),
    [
        (range(8), 2, [Share(4, (0, 1, 2, 3)), Share(4, (4, 5, 6, 7))]),
        (range(5), 2, [Share(2, (0, 1)), Share(2, (2, 3))]),
        (range(2), 2, [Share(1), Share(1)]),
        (range(2), 4, [Share(1)] * 4),
        ((3, 9), 1, [Share(2, (3, 9))]),
    ],
)
def test_cores_are_shared_out(cpus: range, num_workers: int, expected: list[Share]) -> None:
    assert share_cores(cpus, num_workers) == expected


def test_threads_that_were_asked_for_and_no_pinning() -> None:
    assert share_cores(range(8), 2, num_threads=7, pin=False) == [Share(7), Share(7)]


def test_cpu_lists() -> None:
    assert parse_cpus("0-3, 8,2") == (0, 1, 2, 3, 8)
    for text in ("", "a", "3-1", "1-", "-1", "1,,2", "0-99999999999"):
        with pytest.raises(ConfigurationError, match="cpus="):
            parse_cpus(text)


def test_ports_are_free_different_and_chosen_by_the_seed() -> None:
    first = free_ports(20, "127.0.0.1", random.Random(5))
    assert len(set(first)) == 20
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first[3]))
        taken.listen()
        again = free_ports(20, "127.0.0.1", random.Random(5))
    assert first[3] not in again
    assert set(first) - set(again) == {first[3]}
    assert set(first) - set(free_ports(20, "127.0.0.1", random.Random(5), kept=first[:2])) == set(first[:2])


def test_workers_alone_are_told_of_the_core_board_each_with_a_slot_of_its_own() -> None:
    specs = by_name(topology(core_board="/run/cores"))
    told = {name: flag(spec, "--core-board") for name, spec in specs.items()}
    slots = {"prefill-0": "/run/cores:0", "prefill-1": "/run/cores:1", "decode-0": "/run/cores:2"}
    assert {name: value for name, value in told.items() if value is not None} == slots
    assert not any(flag(spec, "--core-board") for spec in topology().specs())
