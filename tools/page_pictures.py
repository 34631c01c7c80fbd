"""Takes the pictures of docs/pages.md from a running gateway: talks to its model in a browser, as a user would.

    python -m tools.page_pictures http://127.0.0.1:8000 docs/figures

Nothing in them is made up, so each run shows other words and figures.
"""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, Page, async_playwright

FLAGS = ["--headless", "--no-sandbox", "--no-proxy-server", "--disable-gpu"]
WIDE, PHONE = (1280, 900), (390, 844)
ANSWER_MS = 180_000
NOTES = "Read these notes.\n\n" + 45 * "Mars is called the red planet because of the rust in its soil.\n"
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    f"{NOTES}\nSummarize the notes.",
    "Write a Python function that reverses a string, and explain it.",
)
Scheme = Literal["light", "dark"]


@asynccontextmanager
async def opened(browser: Browser, url: str, size: tuple[int, int], scheme: Scheme) -> AsyncIterator[Page]:
    """A tab of its own, with an empty history."""
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]}, base_url=url, color_scheme=scheme, device_scale_factor=2
    )
    context.set_default_timeout(ANSWER_MS)
    page = await context.new_page()
    yield page
    await context.close()


async def ask(page: Page, words: str) -> None:
    """Say `words` and wait for the whole answer with its timeline."""
    await page.fill("#draft", words)
    await page.press("#draft", "Enter")
    await page.locator("#send").wait_for(state="visible")
    await page.locator(".turn:last-child .timeline").wait_for(state="attached")


async def playground(page: Page, prompts: tuple[str, ...]) -> None:
    """A conversation for each prompt; the last one stays open."""
    await page.goto("/")
    await page.locator("#model", has_not_text="…").wait_for()
    if await page.locator("[name=temperature]").is_visible():
        await page.fill("[name=temperature]", "0")
        await page.fill("[name=maxTokens]", "200")
    for number, words in enumerate(prompts):
        if number:
            await page.click("#fresh")
        await ask(page, words)


async def take(browser: Browser, url: str, folder: Path) -> None:
    """Every picture, under the name that documents use."""
    async with opened(browser, url, WIDE, "light") as page:
        await playground(page, PROMPTS[1:3] + PROMPTS[:1])
        await page.screenshot(path=folder / "page-playground.png")
        await page.goto(str(await page.locator(".timeline .alone").first.evaluate("node => node.href")))
        await page.locator(".lane").first.wait_for()
        await page.screenshot(path=folder / "page-trace.png")
    async with opened(browser, url, WIDE, "dark") as page:
        await playground(page, PROMPTS[3:])
        await page.screenshot(path=folder / "page-playground-dark.png")
        await operations(page)
        await page.screenshot(path=folder / "page-operations-dark.png")
        await page.click("#range [value=hour]")
        await page.screenshot(path=folder / "page-operations-hour.png")
    async with opened(browser, url, WIDE, "light") as page:
        await operations(page)
        await page.screenshot(path=folder / "page-operations.png", full_page=True)
    async with opened(browser, url, PHONE, "dark") as page:
        await playground(page, PROMPTS[:1])
        await page.screenshot(path=folder / "page-playground-phone.png")
    async with opened(browser, url, PHONE, "light") as page:
        await operations(page)
        await page.screenshot(path=folder / "page-operations-phone.png")


async def operations(page: Page) -> None:
    """The page with its figures."""
    await page.goto("/operations")
    await page.locator("#workers-table td").first.wait_for()


async def main(url: str, folder: Path) -> None:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as player:
        browser = await player.chromium.launch(executable_path=executable, args=FLAGS)
        await take(browser, url, folder)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
