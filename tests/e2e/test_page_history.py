"""Conversations that can be asked anew, asked otherwise, kept, opened again and deleted, by pointer and by keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import CHROMIUM, PHONE, WIDE, Stage, Tab, open_stage
from tests.helpers.page_backend import PageCluster

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; make browser installs one")
TITLES = "#history .title"

FILL = """([number, length]) => {
    for (let index = 0; index < number; index += 1) {
        const turns = [{ role: "user", text: "x".repeat(length), state: "done", calls: [], usage: {} }];
        const kept = { title: `old ${index}`, savedMs: index, turns };
        localStorage.setItem(`tandem.conversation.${index}`, JSON.stringify(kept));
    }
}"""
FILL_REST = """(length) => {
    try {
        for (;;) localStorage.rest = (localStorage.rest ?? "") + "x".repeat(length);
    } catch {}
}"""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with open_stage() as found:
        yield found


async def talk(cluster: PageCluster, tab: Tab, *words: str) -> None:
    """Say each of `words`, and be told `re: ` it."""
    for said in words:
        cluster.worker.answers = [[f"re: {said}"]]
        await tab.say(said)
        await tab.sees(".turn:last-child .said", f"re: {said}")
        await tab.answered()


def prompt(cluster: PageCluster) -> str:
    """Text of the last prompt that the worker received."""
    return cluster.worker.tokenizer.decode(cluster.worker.calls[-1].prompt_token_ids)


def test_an_answer_is_copied_as_it_was_written(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        cluster.worker.answers = [["re: **bold**\n- item"]]
        await tab.say("**bold**\n- item")
        await tab.answered()
        for name, text in (("Copy this answer", "re: **bold**\n- item"), ("Copy this message", "**bold**\n- item")):
            await tab.page.get_by_role("button", name=name).click()
            await tab.page.get_by_role("button", name=name).get_by_text("Copied").wait_for()
            assert await tab.page.evaluate("navigator.clipboard.readText()") == text

    stage.tell(tmp_path, story)


def test_regenerate_asks_the_same_again_and_only_for_the_latest_answer(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        await talk(cluster, tab, "one", "two")
        before = prompt(cluster)
        cluster.worker.answers = [["another"]]
        again = tab.page.get_by_role("button", name="Regenerate")
        assert await again.count() == 1
        await again.click()
        await tab.sees(".turn:last-child .said", "another")
        assert await tab.texts(".turn .said") == ["one", "re: one", "two", "another"]
        assert prompt(cluster) == before

    stage.tell(tmp_path, story)


def test_an_edited_message_is_sent_again_without_what_came_after_it(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        await talk(cluster, tab, "one", "two", "three")
        await tab.page.get_by_role("button", name="Edit").nth(1).focus()
        await tab.page.keyboard.press("Enter")
        await tab.page.keyboard.type(" and a half")
        await tab.page.keyboard.press("Escape")
        assert await tab.texts(".turn.user .said") == ["one", "two", "three"]
        await tab.page.keyboard.press("Enter")
        await tab.page.keyboard.press("End")
        await tab.page.keyboard.type(" or so")
        cluster.worker.answers = [["other"]]
        await tab.page.keyboard.press("Enter")
        await tab.sees(".turn:last-child .said", "other")
        assert await tab.texts(".turn .said") == ["one", "re: one", "two or so", "other"]
        assert "two or so" in prompt(cluster)
        assert "re: two" not in prompt(cluster)
        await tab.answered()
        await tab.playground()
        assert await tab.texts(".turn .said") == ["one", "re: one", "two or so", "other"]

    stage.tell(tmp_path, story)


def test_nothing_is_edited_or_asked_again_while_an_answer_comes(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        await talk(cluster, tab, "one")
        cluster.worker.answers, cluster.worker.hold_at = [["half ", "whole"]], 1
        await tab.say("two")
        await tab.sees(".turn:last-child .said", "half")
        assert not any([await one.is_visible() for one in await tab.page.locator(".turn .deeds button").all()])
        cluster.worker.go.set()
        await tab.answered()
        assert await tab.page.get_by_role("button", name="Edit").count() == 2

    stage.tell(tmp_path, story)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(WIDE, id="wide"),
        pytest.param((1000, 700), id="middle", marks=pytest.mark.slow),
        pytest.param(PHONE, id="phone"),
    ],
)
def test_conversations_are_listed_opened_and_deleted(stage: Stage, tmp_path: Path, size: tuple[int, int]) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        async def unfold() -> None:
            if size != WIDE:
                await tab.page.click("#past > summary")

        await tab.playground()
        await talk(cluster, tab, "first of one")
        await tab.page.click("#fresh")
        await talk(cluster, tab, "first of two")
        await unfold()
        assert await tab.texts(TITLES) == ["first of two", "first of one"]
        assert await tab.texts("#history [aria-current] .title") == ["first of two"]
        assert await tab.overflow() <= 0
        await tab.page.click("#history button:has-text('first of one')")
        await tab.sees(".turn.user .said", "first of one")
        await talk(cluster, tab, "second of one")
        assert "re: first of one" in prompt(cluster)
        await unfold()
        assert await tab.texts(TITLES) == ["first of one", "first of two"]
        await tab.page.get_by_role("button", name="Delete first of two").click()
        assert await tab.texts(TITLES) == ["first of one"]
        await tab.page.get_by_role("button", name="Delete first of one").click()
        assert await tab.texts(TITLES) == []
        assert await tab.texts(".turn") == []
        assert await tab.page.evaluate("Object.keys(localStorage)") == []

    stage.tell(tmp_path, story, size)


def test_all_are_deleted_after_a_question(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        answers: list[bool] = [False, True]
        asked: list[str] = []

        async def decide(dialog: object) -> None:
            asked.append(dialog.message)  # type: ignore[attr-defined]
            await (dialog.accept() if answers.pop(0) else dialog.dismiss())  # type: ignore[attr-defined]

        tab.page.on("dialog", decide)
        await tab.playground()
        await talk(cluster, tab, "one")
        await tab.page.click("#fresh")
        await talk(cluster, tab, "two")
        await tab.page.click("#clear")
        assert await tab.texts(TITLES) == ["two", "one"]
        await tab.page.click("#clear")
        await tab.sees("#history", "No conversation yet")
        assert asked == ["Delete all 2 conversations from this browser?"] * 2
        await tab.playground()
        assert await tab.texts(".turn") == []

    stage.tell(tmp_path, story)


def test_a_deleted_conversation_stays_deleted_though_its_answer_was_coming(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers, cluster.worker.hold_at = [["half ", "whole"]], 1
        await tab.playground()
        await tab.say("one")
        await tab.sees(".turn.assistant .said", "half")
        async with tab.page.expect_response("**/admin/requests/**"):
            await tab.page.click("#history .delete")
        await tab.playground()
        assert await tab.texts(TITLES) == []

    stage.tell(tmp_path, story)


def test_another_tab_sees_them_and_loses_what_is_deleted_here(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        other = Tab(await tab.page.context.new_page())
        await other.playground()
        await talk(cluster, tab, "from the first tab")
        await other.sees(TITLES, "from the first tab")
        assert await other.texts(".turn") == []
        await other.page.click("#history .open")
        await other.sees(".turn.user .said", "from the first tab")
        await talk(cluster, other, "from the second")
        await tab.sees(".turn.user .said", "from the second")
        await tab.page.click("#history .delete")
        await other.page.wait_for_selector(".turn", state="detached")
        assert await other.texts(TITLES) == []

    stage.tell(tmp_path, story)


def test_two_tabs_that_go_on_with_one_conversation_keep_both(stage: Stage, tmp_path: Path) -> None:
    """Regression: the tab that was answered last wrote over what the other had asked."""

    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        await talk(cluster, tab, "one")
        other = Tab(await tab.page.context.new_page())
        await other.playground()
        await other.page.click("#history button:has-text('one')")
        cluster.worker.answers, cluster.worker.hold_at = [["half ", "whole"], ["re: ", "three"]], 1
        await tab.say("two")
        await tab.sees(".turn:last-child .said", "half")
        await other.page.locator(".turn").nth(3).wait_for(state="attached")  # it has heard of "two" and its answer
        await other.say("three")
        await tab.page.locator("#history .title").nth(1).wait_for(state="attached")
        cluster.worker.go.set()
        await tab.answered()
        await other.answered()
        assert await tab.texts(".turn.user .said") == ["one", "two"]
        assert (await other.texts(".turn.user .said"))[-1] == "three"
        await tab.playground()
        assert await tab.texts(".turn.user .said") == ["one", "two"]
        # NOTE: three where both saved before they heard of each other: each goes on under a new name
        assert len(await tab.texts(TITLES)) in (2, 3)

    stage.tell(tmp_path, story)


def test_a_conversation_deleted_in_another_tab_stays_deleted_though_its_answer_was_coming(
    stage: Stage, tmp_path: Path
) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        cluster.worker.answers, cluster.worker.hold_at = [["half ", "whole"]], 1
        await tab.say("one")
        await tab.sees(".turn:last-child .said", "half")
        other = Tab(await tab.page.context.new_page())
        await other.playground()
        async with tab.page.expect_response("**/admin/requests/**"):
            await other.page.get_by_role("button", name="Delete one").click()
        await tab.page.locator(".turn").first.wait_for(state="detached")
        assert await tab.page.evaluate("Object.keys(localStorage)") == []

    stage.tell(tmp_path, story)


def test_a_deletion_that_a_tab_hears_of_after_it_saved_holds(stage: Stage, tmp_path: Path) -> None:
    """Regression: processes see each other's storage late, so a save came between deletion and event, and undid it."""

    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        cluster.worker.answers, cluster.worker.hold_at = [["half ", "whole"]], 1
        await tab.say("one")
        await tab.sees(".turn:last-child .said", "half")
        (key,) = await tab.page.evaluate("Object.keys(localStorage)")
        await tab.page.evaluate("key => dispatchEvent(new StorageEvent('storage', {key, newValue: null}))", key)
        await tab.page.locator(".turn").first.wait_for(state="detached")
        assert await tab.page.evaluate("Object.keys(localStorage)") == []

    stage.tell(tmp_path, story)


def test_the_oldest_make_room_and_their_number_is_bounded(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        await tab.page.evaluate(FILL, [120, 10])
        await talk(cluster, tab, "new")
        titles = await tab.texts(TITLES)
        assert (len(titles), titles[:2], titles[-1]) == (100, ["new", "old 119"], "old 21")
        await tab.page.evaluate("localStorage.clear()")
        await tab.page.evaluate(FILL, [5, 1_000_000])
        for length in (100_000, 10_000, 1_000, 100, 10, 1):
            await tab.page.evaluate(FILL_REST, length)
        await tab.page.click("#fresh")
        await talk(cluster, tab, "newer")
        assert await tab.texts(TITLES) == ["newer", "old 4", "old 3", "old 2", "old 1"]

    stage.tell(tmp_path, story)


def test_what_is_no_conversation_is_passed_over(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        for key, value in (("a", "{"), ("b", "null"), ("c", '{"turns": 3}')):
            await tab.page.evaluate(
                "([key, value]) => localStorage.setItem(key, value)", [f"tandem.conversation.{key}", value]
            )
        await tab.playground()
        await talk(cluster, tab, "one")
        assert await tab.texts(TITLES) == ["one"]

    stage.tell(tmp_path, story)
