"""A model's answer on the page: Markdown as elements, and nothing that runs, loads or leads astray."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import CHROMIUM, PHONE, Stage, Tab, open_stage
from tests.helpers.page_answers import ATTACK
from tests.helpers.page_backend import PageCluster

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; make browser installs one")
SAID = ".turn.assistant .said"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with open_stage() as found:
        yield found


async def answer(cluster: PageCluster, tab: Tab, *pieces: str) -> None:
    cluster.worker.answers = [pieces]
    await tab.playground()
    await tab.say("go")
    await tab.answered()


def test_markdown_becomes_elements(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        table = "| name | size |\n|:--|--:|\n| one | `1` |\n| two | 2 |\n\n"
        lists = "- a\n  - b\n    1. c\n    2. d\n\n7. seven\n8. eight\n\n"
        rest = "> said\n> > before\n\n---\n\n~~gone~~ [link](https://a.example/b?c=1&d=2) https://bare.example\nnext\n"
        await answer(cluster, tab, table, lists[:9], lists[9:], rest)
        assert await tab.texts(f"{SAID} th") == ["name", "size"]
        assert await tab.texts(f"{SAID} td") == ["one", "1", "two", "2"]
        assert await tab.texts(f"{SAID} td.to-right code") == ["1"]
        assert await tab.texts(f"{SAID} > ul > li > ul > li > ol > li") == ["c", "d"]
        assert await tab.page.get_attribute(f"{SAID} > ol", "start") == "7"
        assert await tab.texts(f"{SAID} > blockquote > blockquote") == ["before"]
        assert await tab.page.locator(f"{SAID} > hr").count() == 1
        assert await tab.texts(f"{SAID} s") == ["gone"]
        links = tab.page.locator(f"{SAID} a")
        assert await links.all_inner_texts() == ["link", "https://bare.example"]
        assert await links.first.get_attribute("href") == "https://a.example/b?c=1&d=2"
        assert [await links.first.get_attribute(name) for name in ("target", "rel")] == [
            "_blank",
            "noopener noreferrer",
        ]
        assert await tab.page.locator(f"{SAID} > p br").count() == 1

    stage.tell(tmp_path, story)


HOSTILE = [
    "[js](javascript:window.hacked=1)",
    "[js](JaVaScRiPt:window.hacked=1)",
    "[js](java\tscript:window.hacked=1)",
    "[js](&#106;avascript:window.hacked=1)",
    "[js](javascript&colon;window.hacked=1)",
    "<javascript:window.hacked=1>",
    "[vb](vbscript:x)",
    "[data](data:text/html,<script>window.hacked=1</script>)",
    "[blob](blob:null/x)",
    "[file](file:///etc/passwd)",
    "[here](/admin/overview)",
    "[ref][r]\n\n[r]: javascript:window.hacked=1",
    "![pic](data:image/svg+xml;base64,PHN2Zy8+)",
    '![pic](x" onerror="window.hacked=1)',
    "<svg onload=window.hacked=1>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "`<img src=x onerror=window.hacked=1>`",
    f"```{ATTACK}\n{ATTACK}\n```",
    f"| {ATTACK} |\n|---|\n| {ATTACK} |",
    f"- > {ATTACK}",
]


def test_hostile_markdown_makes_nothing_that_runs_loads_or_leads_astray(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        asked: list[str] = []
        await answer(cluster, tab, "\n\n".join(HOSTILE))
        tab.page.on("request", lambda request: asked.append(request.url))
        every = await tab.page.eval_on_selector_all(f"{SAID} *", "nodes => nodes.map(node => node.localName)")
        known = {"p", "a", "span", "code", "pre", "figure", "figcaption", "button", "div", "table", "thead", "tbody"}
        assert set(every) <= known | {"tr", "th", "td", "ul", "li", "blockquote", "br"}
        assert await tab.page.locator(f"{SAID} a").count() == 0
        attributes = "nodes => [...new Set(nodes.flatMap(node => node.getAttributeNames()))]"
        names = await tab.page.eval_on_selector_all(f"{SAID} *", attributes)
        assert set(names) <= {"class", "tabindex", "role", "aria-label", "type", "title"}
        for node in await tab.page.locator(f"{SAID} .unlinked").all():
            await node.click()
        assert asked == []
        assert await tab.page.evaluate("window.hacked") is None

    stage.tell(tmp_path, story)


def test_a_picture_is_named_and_never_loaded(stage: Stage, tmp_path: Path) -> None:
    """A model that was talked into it could send what it knows in the address of a picture."""

    async def story(cluster: PageCluster, tab: Tab) -> None:
        asked: list[str] = []
        tab.page.on("request", lambda request: asked.append(request.url))
        await answer(cluster, tab, "![a *cat*](https://pictures.example/cat.png?secret)")
        assert await tab.texts(f"{SAID} a") == ["a cat"]
        assert await tab.page.locator(f"{SAID} img").count() == 0
        assert not [url for url in asked if "pictures.example" in url]

    stage.tell(tmp_path, story)


@pytest.mark.parametrize("text", [">" * 20_000, "- " * 2_000, "[" * 20_000, "_a*" * 20_000, "![a" * 10_000])
def test_an_answer_that_is_costly_to_parse_does_not_stop_the_page(stage: Stage, tmp_path: Path, text: str) -> None:
    """Parsers that descend without a limit overflow their stack here, and one took a minute for the fourth."""

    async def story(cluster: PageCluster, tab: Tab) -> None:
        await answer(cluster, tab, f"{text}\n\nend")
        assert (await tab.texts(f"{SAID} > p"))[-1] == "end"

    stage.tell(tmp_path, story)


def test_code_and_whole_answers_are_copied_as_they_were_written(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        text = "Say **this**:\n\n```py\nif a < b:\n    print('<b>')\n```\n"
        await answer(cluster, tab, text)
        await tab.page.get_by_role("button", name="Copy the py code").click()
        await tab.sees(f"{SAID} .copy", "Copied")
        assert await tab.page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('<b>')"

    stage.tell(tmp_path, story)


def test_blocks_that_did_not_change_keep_their_elements_while_an_answer_grows(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["one\n\n```\ncode\n```\n\ntw", "o\n\nthree"]]
        cluster.worker.hold_at = 1
        await tab.playground()
        await tab.say("go")
        await tab.sees(f"{SAID} p", re.compile("^tw$"))
        pre = await tab.page.query_selector(f"{SAID} pre")
        assert pre is not None
        cluster.worker.go.set()
        await tab.answered()
        assert await tab.texts(f"{SAID} > p") == ["one", "two", "three"]
        assert await pre.evaluate("node => node.isConnected")

    stage.tell(tmp_path, story)


def test_an_address_that_comes_last_makes_a_link_of_earlier_words(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["see [x]\n\nthen\n\n", "[x]: https://late.example\n"]]
        cluster.worker.hold_at = 1
        await tab.playground()
        await tab.say("go")
        await tab.sees(f"{SAID} p", "then")
        assert await tab.page.locator(f"{SAID} a").count() == 0
        cluster.worker.go.set()
        await tab.sees(f"{SAID} a", "x")
        assert await tab.page.get_attribute(f"{SAID} a", "href") == "https://late.example/"

    stage.tell(tmp_path, story)


def test_a_wide_table_scrolls_inside_a_phone(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await answer(cluster, tab, "|" + "a long heading|" * 9 + "\n|" + "--|" * 9 + "\n|" + "value|" * 9)
        assert await tab.overflow() <= 0
        assert await tab.page.eval_on_selector(f"{SAID} .table", "node => node.scrollWidth > node.clientWidth")
        assert await tab.page.eval_on_selector(".turns", "node => node.scrollWidth <= node.clientWidth")

    stage.tell(tmp_path, story, PHONE)
