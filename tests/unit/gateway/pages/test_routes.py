"""Routes of the pages, what browsers may keep, and what a page may do."""

from pathlib import Path

import httpx
import pytest

from tandem.gateway.pages.assets import Assets
from tests.helpers.fake_backend import FakeCluster, tell


@pytest.mark.parametrize("path", ["/", "/playground", "/operations", "/trace"])
def test_a_page_is_asked_for_anew_but_sent_once(tmp_path: Path, path: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        page = await client.get(path)
        assert (page.status_code, page.headers["cache-control"]) == (200, "no-cache")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.text.startswith("<!doctype html>")
        again = await client.get(path, headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == page.headers["content-security-policy"]
        assert (await client.head(path)).status_code == 200

    tell(tmp_path, story)


def test_the_policy_lets_a_page_use_only_this_server(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        digest = Assets.load().digest
        for path in ("/", "/operations", "/trace", f"/pages/{digest}/base.css"):
            headers = (await client.get(path)).headers
            rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
            assert rules.pop("default-src") == "'none'"
            assert {rules.pop(f"{kind}-src") for kind in ("script", "style", "img", "connect")} == {"'self'"}
            assert {rules.pop(name) for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
            assert rules == {"require-trusted-types-for": "'script'", "trusted-types": "'none'"}
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"

    tell(tmp_path, story)


def test_files_of_this_version_are_kept_and_those_of_another_are_not(tmp_path: Path) -> None:
    """Gateways are upgraded one by one: a page of the one may ask the other for its files."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        own = await client.get(f"/pages/{Assets.load().digest}/playground.js")
        assert own.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert own.headers["content-type"] == "text/javascript; charset=utf-8"
        other = await client.get("/pages/0123456789abcdef/playground.js")
        assert (other.status_code, other.headers["cache-control"]) == (200, "no-store")
        assert other.content == own.content

    tell(tmp_path, story)


@pytest.mark.parametrize("name", ["missing.js", "..%2fassets.py", "%2e%2e", "routes.py"])
def test_nothing_else_is_served(tmp_path: Path, name: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        answer = await client.get(f"/pages/{Assets.load().digest}/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"

    tell(tmp_path, story)


def test_pages_are_no_part_of_the_api_but_the_overview_is(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        described = (await client.get("/openapi.json")).json()["paths"]
        assert "/admin/overview" in described
        assert not {"/", "/playground", "/operations", "/trace", "/pages/{digest}/{name}"} & described.keys()

    tell(tmp_path, story)
