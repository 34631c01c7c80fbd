"""The harness's own decisions: environments, podman's arguments, DNS answers, statuses, probes, the Service proxy."""

import asyncio
import socket
import struct
import sys
from contextlib import suppress

import pytest

from tandem.compute.native.build import default_cache_dir
from tools.kubernetes import probes
from tools.kubernetes.api import Object
from tools.kubernetes.chart import with_old_names
from tools.kubernetes.dns import answer
from tools.kubernetes.environment import MissingReferenceError, Sources, amount, environment
from tools.kubernetes.pod_spec import Placement, run_arguments
from tools.kubernetes.pod_status import ContainerState, phase, pod_status
from tools.kubernetes.processes import translation_of
from tools.kubernetes.proxy import PortProxy
from tools.kubernetes.volumes import referred

POD: Object = {
    "metadata": {"name": "decode-0", "namespace": "default", "uid": "u-1", "labels": {"role": "decode"}},
    "spec": {"nodeName": "node-1", "containers": [], "enableServiceLinks": False},
}
SERVICE: Object = {
    "metadata": {"name": "tandem", "namespace": "default"},
    "spec": {"clusterIP": "10.96.0.7", "ports": [{"name": "http", "port": 8000}]},
}


def sources(pod: Object = POD, services: tuple[Object, ...] = ()) -> Sources:
    return Sources(pod, "10.244.0.9", "10.244.0.1", {"s": {"key": b"secret"}}, {"c": {"A": b"from map"}}, services)


def test_environment_takes_values_from_everywhere() -> None:
    entries = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "ROLE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
        {"name": "GONE", "valueFrom": {"secretKeyRef": {"name": "x", "key": "key", "optional": True}}},
        {"name": "ADDRESS", "value": "$(POD_IP):7900 $(UNKNOWN) $$(POD_IP)"},
        {"name": "CORES", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    ]
    container = {
        "env": entries,
        "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "X_"}],
        "resources": {"limits": {"cpu": "1500m"}},
    }
    assert environment(container, sources()) == {
        "X_A": "from map",
        "POD_IP": "10.244.0.9",
        "ROLE": "decode",
        "KEY": "secret",
        "ADDRESS": "10.244.0.9:7900 $(UNKNOWN) $(POD_IP)",
        "CORES": "2",
    }


def test_a_missing_secret_is_named() -> None:
    container = {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "nowhere", "key": "k"}}}]}
    with pytest.raises(MissingReferenceError, match="nowhere"):
        environment(container, sources())


def test_service_links_are_given_unless_refused() -> None:
    linked = {**POD, "spec": {**POD["spec"], "enableServiceLinks": True}}
    assert environment({}, sources(POD, (SERVICE,))) == {}
    given = environment({}, sources(linked, (SERVICE,)))
    assert given["TANDEM_PORT"] == "tcp://10.96.0.7:8000"
    assert given["TANDEM_SERVICE_HOST"] == "10.96.0.7"


def test_references_of_environments_and_volumes_are_found() -> None:
    projected = {"sources": [{"configMap": {"name": "ca"}}, {"serviceAccountToken": {"path": "token"}}]}
    spec = {
        "containers": [{"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}],
        "initContainers": [{"envFrom": [{"configMapRef": {"name": "c"}}]}],
        "volumes": [{"name": "v", "secret": {"secretName": "t"}}, {"name": "p", "projected": projected}],
    }
    assert referred({"spec": spec}) == {
        ("secrets", "s"),
        ("configmaps", "c"),
        ("secrets", "t"),
        ("configmaps", "ca"),
    }


async def never(command: list[str], timeout_s: float) -> None:
    raise AssertionError(f"{command} is run in no container")


def test_processes_have_folders_for_mounts_and_this_python() -> None:
    """Pods as processes: a mount is named by its folder, wherever it is named whole. Probes and hooks are run alike."""
    container = {
        "volumeMounts": [
            {"name": "model", "mountPath": "/models", "subPath": "v1"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes = {"model": "/srv/model", "tmp": "/srv/tmp", "shm": "memory:1024"}
    values = {"TANDEM_MODEL": "/models/demo", "HOME": "/tmp", "TANDEM_CACHE_DIR": "/opt/kernels"}
    translation = translation_of(container, values, volumes)
    words = ["python3", "-m", "services.decode", "--model", "/models/demo", "--log", "/models-old/x", "--dir", "/tmp"]
    command = translation.command(words)
    assert command[0] == sys.executable
    assert command[3:] == ["--model", "/srv/model/v1/demo", "--log", "/models-old/x", "--dir", "/tmp"]
    assert translation.command(["redis-cli", "--cacert", "/models/ca.crt"])[2] == "/srv/model/v1/ca.crt"
    assert translation.environment["TANDEM_MODEL"] == "/srv/model/v1/demo"
    assert translation.environment["TANDEM_CACHE_DIR"] == str(default_cache_dir()), "compiled kernels of this machine"


def test_run_arguments_harden_and_limit() -> None:
    container = {
        "name": "c",
        "image": "localhost/x:dev",
        "command": ["python", "-m", "$(WHAT)"],
        "args": ["--flag"],
        "volumeMounts": [
            {"name": "model", "mountPath": "/models", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "resources": {"limits": {"memory": "1Gi", "cpu": "500m"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {**POD, "spec": {"securityContext": {"runAsUser": 10001, "runAsGroup": 10002, "fsGroup": 7}}}
    volumes = {"model": "/srv/model", "shm": "memory:1024"}
    where = Placement("x", "10.244.0.9", "", volumes, "/run/x.pid")
    text = " ".join(run_arguments(pod, container, {"WHAT": "services.decode"}, where))
    for part in (
        "--user 10001:10002",
        "--group-add 7",
        "--read-only --read-only-tmpfs=false",
        "--security-opt no-new-privileges",
        "--cap-drop ALL",
        "--memory 1073741824",
        "--cpus 0.5",
        "--volume /srv/model:/models:ro",
        "--mount type=tmpfs,destination=/dev/shm,tmpfs-mode=1777,tmpfs-size=1024",
        '--entrypoint ["python", "-m", "services.decode"] localhost/x:dev --flag',
    ):
        assert part in text


@pytest.mark.parametrize(("quantity", "number"), [("250m", 0.25), ("2", 2), ("1Gi", 2**30), ("3k", 3000), (0.5, 0.5)])
def test_quantities(quantity: str | float, number: float) -> None:
    assert amount(quantity) == number


@pytest.mark.parametrize(
    ("policy", "codes", "expected"),
    [
        ("Never", [0, 0], "Succeeded"),
        ("Never", [0, 1], "Failed"),
        ("Never", [0, None], "Running"),
        ("OnFailure", [0, 1], "Running"),
        ("Always", [0, 0], "Running"),
    ],
)
def test_phases(policy: str, codes: list[int | None], expected: str) -> None:
    states = [ContainerState("c", "i", started_at="t", exit_code=code) for code in codes]
    assert phase(policy, states) == expected


def test_a_pod_is_ready_when_containers_and_gates_are_and_it_is_not_stopping() -> None:
    container = ContainerState("c", "i", started_at="t", ready=True)
    gated = {**POD, "spec": {**POD["spec"], "readinessGates": [{"conditionType": "warm"}]}}
    opened = {**gated, "status": {"conditions": [{"type": "warm", "status": "True", "lastTransitionTime": "t"}]}}

    def ready(pod: Object, stopping: bool = False) -> str:
        status = pod_status(pod, [container], [], ("h", "p"), stopping)
        return next(str(one["status"]) for one in status["conditions"] if one["type"] == "Ready")

    assert [ready(POD), ready(gated), ready(opened), ready(POD, stopping=True)] == ["True", "False", "True", "False"]


def query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def test_dns_answers_what_it_knows() -> None:
    def lookup(name: str) -> list[str] | None:
        known = {"tandem-router.default.svc.cluster.local": ["10.244.0.5", "10.244.0.6"], "nobody.ready": []}
        return known.get(name)

    found = answer(query("tandem-router.default.svc.cluster.local"), lookup)
    assert struct.unpack(">HHHHHH", found[:12]) == (7, 0x8580, 1, 2, 0, 0)
    assert socket.inet_aton("10.244.0.6") == found[-4:]
    ipv6 = answer(query("tandem-router.default.svc.cluster.local", kind=28), lookup)
    assert struct.unpack(">HHHHHH", ipv6[:12]) == (7, 0x8580, 1, 0, 0, 0)
    assert struct.unpack(">HHHHHH", answer(query("nobody.ready"), lookup)[:12]) == (7, 0x8580, 1, 0, 0, 0)
    unknown = answer(query("example.com"), lookup)
    assert struct.unpack(">HHHHHH", unknown[:12]) == (7, 0x8583, 1, 0, 0, 0)


def test_chart_speaks_the_old_api() -> None:
    template = (
        "apiVersion: policy/v1\nkind: PodDisruptionBudget\n  unhealthyPodEvictionPolicy: AlwaysAllow\n---\n"
        "  ports:\n    - port: 1\n      targetPort: http\n"
    )
    assert with_old_names(template) == (
        "apiVersion: policy/v1beta1\nkind: PodDisruptionBudget\n---\n"
        "  ports:\n    - port: 1\n      targetPort: http\n      protocol: TCP\n"
    )


def test_probes_turn_after_their_thresholds() -> None:
    """Of bad, good, bad, bad, good, good only the two alike in a row turn anything."""
    statuses = [500, 200, 500, 500, 200, 200]
    num_asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        await reader.readuntil(b"\r\n\r\n")
        status = statuses[min(num_asked, len(statuses) - 1)]
        num_asked += 1
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async def scenario() -> list[tuple[bool, int]]:
        turns: asyncio.Queue[tuple[bool, int]] = asyncio.Queue()
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            asked = {"httpGet": {"path": "/health", "port": "metrics"}, "periodSeconds": 0.001, "timeoutSeconds": 30}
            target = probes.Target(never, "127.0.0.1", {"ports": [{"name": "metrics", "containerPort": port}]})
            probe = {**asked, "failureThreshold": 2, "successThreshold": 2}
            task = asyncio.create_task(probes.follow(probe, target, lambda ok: turns.put_nowait((ok, num_asked))))
            seen = [await asyncio.wait_for(turns.get(), 30) for _ in range(2)]
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return seen

    assert asyncio.run(scenario()) == [(False, 4), (True, 6)]


def test_a_closed_port_fails_a_probe() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        target = probes.Target(never, "127.0.0.1", {})
        assert not asyncio.run(probes.passes({"tcpSocket": {"port": held.getsockname()[1]}}, target))


def test_proxy_follows_the_ready_endpoints() -> None:
    """New connections go where the list says now; one that is open stays; none is answered without endpoints."""

    async def scenario() -> None:
        servers = [await echo(name) for name in (b"a", b"b")]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        ready = [("127.0.0.1", ports[0])]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            own = free.getsockname()[1]
        proxy = PortProxy("127.0.0.1", own, lambda: ready)
        await proxy.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", own)
        assert await ask(reader, writer) == b"a"
        ready[:] = [("127.0.0.1", ports[1])]
        again, second = await asyncio.open_connection("127.0.0.1", own)
        assert await ask(again, second) == b"b"
        assert await ask(reader, writer) == b"a"
        ready.clear()
        refused, third = await asyncio.open_connection("127.0.0.1", own)
        with suppress(ConnectionError):
            assert await refused.read() == b""
        for one in (writer, second, third):
            one.close()
        await proxy.stop()
        for server in servers:
            server.close()

    asyncio.run(scenario())


async def echo(name: bytes) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            writer.write(name)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"?")
    return await asyncio.wait_for(reader.read(1), 5)
