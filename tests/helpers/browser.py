"""A real Chromium for tests of the web pages: one browser and one event loop, a tab and a cluster for each story.

A story fails when the browser reports an error or a breach of the page's policy that the story did not provoke.
"""

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.fake_backend import MODEL
from tests.helpers.page_backend import PageCluster, page_cluster

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--no-proxy-server",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE, PHONE = (1280, 800), (390, 844)
SHOWN_MS = 30_000


@dataclass
class Stage:
    """One browser and one event loop for all stories."""

    runner: asyncio.Runner
    browser: "Browser"

    def tell(self, directory: Path, story: "Story", size: tuple[int, int] = WIDE, **settings: Any) -> None:
        self.runner.run(self._tell(directory, story, size, settings))

    async def _tell(self, directory: Path, story: "Story", size: tuple[int, int], settings: dict[str, Any]) -> None:
        async with page_cluster(directory, **settings) as cluster, self._tab(cluster.url, size) as tab:
            async with asyncio.timeout(120):
                await story(cluster, tab)
            assert await tab.page.evaluate("window.hacked") is None
            assert not [words for words in tab.complaints if not any(map(words.__contains__, tab.expected))]

    @contextlib.asynccontextmanager
    async def _tab(self, url: str, size: tuple[int, int]) -> AsyncIterator["Tab"]:
        context = await self.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            base_url=url,
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(SHOWN_MS)
        page = await context.new_page()
        tab = Tab(page)
        page.on("console", tab.hear)
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        try:
            yield tab
        finally:
            await context.close()


@dataclass
class Tab:
    """A page of its own. `expected`: parts of complaints that a story provokes."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def hear(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    async def playground(self) -> None:
        await self.page.goto("/")
        await self.sees("#model", MODEL)

    async def say(self, words: str) -> None:
        await self.page.fill("#draft", words)
        await self.page.press("#draft", "Enter")

    async def sees(self, selector: str, words: str | re.Pattern[str] | None = None) -> None:
        await self.page.locator(selector, has_text=words).first.wait_for(state="visible")

    async def texts(self, selector: str) -> list[str]:
        return await self.page.locator(selector).all_inner_texts()

    async def answered(self) -> None:
        """The last answer is whole and has its timeline."""
        await self.page.locator(".turn:last-child .timeline").wait_for(state="attached")

    async def overflow(self) -> int:
        """Pixels that the page is wider than the screen."""
        found: int = await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return found


Story = Callable[[PageCluster, Tab], Coroutine[Any, Any, None]]


@contextlib.contextmanager
def open_stage() -> Iterator[Stage]:
    """For the time of the block; skips where playwright is missing."""
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    with asyncio.Runner() as runner:
        player = runner.run(api.async_playwright().start())
        browser = runner.run(player.chromium.launch(executable_path=CHROMIUM, args=FLAGS))
        yield Stage(runner, browser)
        runner.run(browser.close())
        runner.run(player.stop())
