"""Takes the pictures of docs/pages.md from a running gateway: talks to its model in a browser, as a user would.

    python -m tools.page_pictures http://127.0.0.1:8000 docs/figures

Each run shows other words and figures. Only the answer in the picture of the tools is made up, since few small models
call tools.
"""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.async_api import Browser, Page, Route, async_playwright

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
CALLS = ({"city": "Oslo"}, {"city": "Lima"})
Scheme = Literal["light", "dark"]


@asynccontextmanager
async def opened(browser: Browser, url: str, size: tuple[int, int], scheme: Scheme) -> AsyncIterator[Page]:
    """A tab of its own, with an empty history."""
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        base_url=url,
        color_scheme=scheme,
        device_scale_factor=2 if size == PHONE else 1,
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
    is_folded = await page.locator("#panel > summary").is_visible()
    if is_folded:
        await page.click("#panel > summary")
    await page.fill("[name=maxTokens]", "200")
    if is_folded:
        await page.click("#panel > summary")
    for number, words in enumerate(prompts):
        if number:
            await page.click("#fresh")
        await ask(page, words)


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    """An event of a chat completion's stream."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


async def answer_with_calls(route: Route) -> None:
    """A made-up answer that calls the example tool."""
    calls = [
        {"index": index, "id": f"call_{index}", "function": {"name": "get_weather", "arguments": json.dumps(arguments)}}
        for index, arguments in enumerate(CALLS)
    ]
    thought = {"reasoning_content": "They ask for two cities, so I look up both."}
    text = {"content": "I look up both cities."}
    events = [chunk(thought), chunk(text), chunk({"tool_calls": calls}), chunk({}, "tool_calls")]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    await route.fulfill(body=body, headers={"content-type": "text/event-stream"})


async def take(browser: Browser, url: str, folder: Path) -> None:
    """Every picture, under the name that documents use."""
    async with opened(browser, url, WIDE, "light") as page:
        await playground(page, PROMPTS[2:3])  # NOTE: first of all, so that a prefill worker computes it
        await page.goto(str(await page.locator(".timeline .alone").first.evaluate("node => node.href")))
        await page.locator(".lane").first.wait_for()
        await page.set_viewport_size({"width": WIDE[0], "height": 500})
        await page.screenshot(path=folder / "page-trace.png")
    async with opened(browser, url, WIDE, "light") as page:
        await playground(page, PROMPTS[1:3] + PROMPTS[:1])
        await page.screenshot(path=folder / "page-playground.png")
    async with opened(browser, url, WIDE, "light") as page:
        await page.route("**/v1/chat/completions", answer_with_calls)
        await page.goto("/")
        await page.click("summary:has-text('Tools')")
        await page.click("#example")
        await page.fill("#draft", "What is the weather in Oslo and in Lima?")
        await page.press("#draft", "Enter")
        await page.locator(".continue").wait_for()
        await page.locator(".call textarea").first.fill("3 °C, rain")
        await page.screenshot(path=folder / "page-tools.png")
    async with opened(browser, url, WIDE, "dark") as page:
        await playground(page, PROMPTS[3:])
        await page.screenshot(path=folder / "page-playground-dark.png")
        await operations(page)
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
