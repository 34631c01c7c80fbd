"""Cases that only a fake can make: odd answers, tokens that change, kubeconfigs, and a missing package."""

import asyncio
import json
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tandem.core.errors import ConfigurationError
from tandem.kube.access import Access
from tandem.kube.api import KubeApi, open_api
from tandem.kube.errors import (
    BadAnswerError,
    ExpiredError,
    KubeUnavailableError,
    UnauthorizedError,
)
from tests.helpers.kube_fake import KubeFake, running_fake

BIG = "x" * (3 << 20)


def with_fake(scenario: Any) -> None:
    async def main() -> None:
        async with running_fake() as fake:
            fake.put_pod("d0", labels={"app": "a"})
            api = open_api(fake.access(), timeout_s=10)
            try:
                await scenario(fake, api)
            finally:
                await api.close()

    asyncio.run(asyncio.wait_for(main(), 60))


async def watched(api: KubeApi) -> list[str]:
    return [event.kind async for event in api.watch_pods("app", "1000", 60)]


LIST = {"kind": "PodList", "metadata": {"resourceVersion": "5"}, "items": []}


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(text="<html>"),
        web.Response(text=""),
        web.Response(text="[1]"),
        web.Response(text="[" * 100_000),
        web.Response(body=b"\xff\xfe"),
        web.json_response({}),
        web.json_response({**LIST, "kind": "Pod"}),
        web.json_response({**LIST, "metadata": {}}),
        web.json_response({**LIST, "items": [{}]}),
        web.json_response({**LIST, "items": {"a": 1}}),
        web.json_response({**LIST, "metadata": {"resourceVersion": "5", "continue": 7}}),
    ],
)
def test_a_list_that_is_none_is_refused(answer: web.Response) -> None:
    async def scenario(fake: KubeFake, api: KubeApi) -> None:
        fake.answers.append(answer)
        with pytest.raises(BadAnswerError, match=r"list pods in namespace 'default'.*check the address"):
            await api.list_pods("app")
        assert [pod.name for pod in (await api.list_pods("app")).pods] == ["d0"]

    with_fake(scenario)


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "{}",
        "[]",
        '{"type": 3}',
        '{"type": "MELTED", "object": {"metadata": {"name": "a", "resourceVersion": "1"}}}',
        '{"type": "ADDED", "object": {"metadata": {"name": "a"}}}',
        '{"type": "ADDED", "object": {"metadata": {"resourceVersion": "1"}}}',
        '{"type": "BOOKMARK", "object": {}}',
        '{"type": "ADDED", "obj',
        json.dumps({"type": "ADDED", "object": BIG + BIG}),
    ],
)
def test_an_event_that_is_none_is_refused(line: str) -> None:
    async def scenario(fake: KubeFake, api: KubeApi) -> None:
        fake.answers.append(web.Response(text=line))
        with pytest.raises(BadAnswerError, match="watch pods"):
            await watched(api)

    with_fake(scenario)


def test_large_events_are_no_problem() -> None:
    """A pod may have more than a megabyte; lines are longer than asyncio's usual limit."""

    async def scenario(fake: KubeFake, api: KubeApi) -> None:
        pod = {"metadata": {"name": "a", "resourceVersion": "7", "annotations": {"a": BIG[: 1 << 20]}}}
        fake.answers.append(web.Response(text=json.dumps({"type": "ADDED", "object": pod}) + "\n"))
        assert await watched(api) == ["added"]

    with_fake(scenario)


@pytest.mark.parametrize(("code", "kind"), [(410, ExpiredError), (500, KubeUnavailableError), (401, UnauthorizedError)])
def test_errors_inside_a_watch_are_what_they_would_be_outside(code: int, kind: type[Exception]) -> None:
    async def scenario(fake: KubeFake, api: KubeApi) -> None:
        status = {"kind": "Status", "code": code, "message": "m"}
        fake.answers.append(web.json_response({"type": "ERROR", "object": status}))
        fake.answers.append(web.json_response(status, status=code))
        for _ in range(2):
            with pytest.raises(kind, match="watch pods"):
                await watched(api)

    with_fake(scenario)


def test_an_overloaded_server_says_when_to_come_again() -> None:
    async def scenario(fake: KubeFake, api: KubeApi) -> None:
        fake.answers.append(web.Response(status=429, headers={"Retry-After": "7"}, text="slow down"))
        with pytest.raises(KubeUnavailableError) as refused:
            await api.list_pods("app")
        assert refused.value.retry_after_s == 7.0

    with_fake(scenario)


def test_a_list_that_changes_too_much_between_pages_is_asked_for_in_one() -> None:
    async def scenario(fake: KubeFake, api: KubeApi) -> None:
        page = {**LIST, "metadata": {"resourceVersion": "5", "continue": "900:1"}}
        fake.answers.append(web.json_response(page))
        assert [pod.name for pod in (await api.list_pods("app")).pods] == ["d0"]
        assert len(fake.calls) == 3

    with_fake(scenario)


def test_a_watch_ends_with_a_bookmark() -> None:
    async def scenario(fake: KubeFake, api: KubeApi) -> None:
        listed = await api.list_pods("app")
        fake.put_pod("unseen")
        events = [event async for event in api.watch_pods("app", listed.resource_version, 1)]
        assert [(event.kind, event.resource_version) for event in events] == [("bookmark", str(fake.store.version))]

    with_fake(scenario)


def test_something_that_speaks_no_http() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            api = open_api(Access(url=f"http://127.0.0.1:{port}"), timeout_s=10)
            with pytest.raises((BadAnswerError, KubeUnavailableError)):
                await api.list_pods("app")
            await api.close()

    asyncio.run(main())


def test_a_token_that_is_replaced_is_used(tmp_path: Path) -> None:
    """Kubernetes writes a pod's token anew about every hour; the old one stops working."""

    async def scenario(fake: KubeFake, _: KubeApi) -> None:
        token = tmp_path / "token"
        token.write_text(fake.rules.admin_token + "\n")
        api = open_api(Access(url=fake.url, token_file=token, namespace="default"))
        await api.list_pods("app")
        fake.rules.admin_token = "admin-2"
        with pytest.raises(UnauthorizedError):
            await api.list_pods("app")
        token.write_text("admin-2")
        await api.list_pods("app")
        token.write_text("")
        with pytest.raises(UnauthorizedError, match="token is empty"):
            await api.list_pods("app")
        token.unlink()
        with pytest.raises(UnauthorizedError, match="cannot be read"):
            await api.list_pods("app")
        await api.close()

    with_fake(scenario)


def kubeconfig(path: Path, url: str, token: str, namespace: str | None = "prod") -> str:
    context = {"cluster": "c", "user": "u", **({"namespace": namespace} if namespace else {})}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": context}],
    }
    path.write_text(json.dumps(document))
    return str(path)


def test_a_kubeconfig_says_where_and_who(tmp_path: Path) -> None:
    async def scenario(fake: KubeFake, _: KubeApi) -> None:
        fake.put_pod("in-prod", "prod", labels={"app": "a"})
        for namespace, names in (("prod", ["in-prod"]), (None, ["d0"])):
            path = kubeconfig(tmp_path / "config", fake.url, fake.rules.admin_token, namespace)
            api = open_api(Access(kubeconfig=path))
            assert api.namespace == (namespace or "default")
            assert [pod.name for pod in (await api.list_pods("app")).pods] == names
            await api.close()
        assert open_api(Access(kubeconfig=path), "other").namespace == "other"

    with_fake(scenario)


@pytest.mark.parametrize("text", ["", "{", "[]", "a: b", "contexts: 3\ncurrent-context: x"])
def test_a_broken_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="config does not say how to reach"):
        open_api(Access(kubeconfig=str(path)))


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        api = open_api(Access(url="https://127.0.0.1:1", ca_file=tmp_path / "ca.crt"))
        with pytest.raises(ConfigurationError, match=r"ca\.crt does not say"):
            await api.list_pods("app")
        await api.close()

    asyncio.run(main())


def test_a_server_whose_certificate_is_nobodys(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key", tmp_path / "crt"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    command += ["-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)

    async def main() -> None:
        trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        trust.load_cert_chain(certificate, key)
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=trust)
        async with server:
            port = server.sockets[0].getsockname()[1]
            api = open_api(Access(url=f"https://127.0.0.1:{port}"), timeout_s=10)
            with pytest.raises(KubeUnavailableError, match=r"certificate is not accepted.*check the CA"):
                await api.list_pods("app")
            await api.close()

    asyncio.run(main())


def test_without_the_package_it_says_what_to_install() -> None:
    """And nothing is imported before somebody wants it."""
    code = """
import sys
sys.modules["kubernetes"] = None
from tandem.core.errors import ConfigurationError
from tandem.kube.access import Access
from tandem.kube.api import open_api
import tandem.process.discovery_kubernetes, tandem.router.process
try:
    open_api(Access(url="http://h"))
except ConfigurationError as error:
    assert "pip install 'tandem[kubernetes]'" in str(error), error
    assert "torch" not in sys.modules
    print("said")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "said\n", done.stderr
