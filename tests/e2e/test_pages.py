"""The web pages in a real Chromium, over a real gateway with made-up workers behind it."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tandem.core.errors import CapacityError, TandemError, UnavailableError
from tandem.core.process_usage import ProcessUsage
from tandem.routing.snapshot import Role
from tandem.rpc.messages import Decision
from tandem.rpc.rank_messages import RankReport
from tests.helpers.browser import CHROMIUM, PHONE, WIDE, Stage, Tab, open_stage
from tests.helpers.fake_backend import MODEL, eventually
from tests.helpers.page_answers import (
    ANTHROPIC_CALLS,
    ANTHROPIC_END,
    ANTHROPIC_SENT,
    ATTACK,
    OPENAI_CALLS,
    OPENAI_END,
    OPENAI_SENT,
)
from tests.helpers.page_backend import PageCluster, listing
from tests.unit.gateway.parsing.shapes import QWEN

if TYPE_CHECKING:
    from playwright.async_api import Route

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; make browser installs one")
POLL_MS = 2000


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with open_stage() as found:
        yield found


# --- playground -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_an_answer_appears_as_it_is_generated_and_ends_with_its_figures(stage: Stage, tmp_path: Path, api: str) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["Once ", "upon ", "a ", "time"]]
        cluster.worker.hold_at = 2
        await tab.playground()
        await tab.page.check(f"[name=api][value={api}]", force=True)
        await tab.say("Tell me a story")
        await tab.sees(".turn.assistant.streaming .said", re.compile(r"^Once upon\s*$"))
        await tab.sees("#stop")
        cluster.worker.go.set()
        await tab.sees(".turn.assistant .said", "Once upon a time")
        await tab.answered()
        (figures,) = await tab.texts(".figures")
        assert re.search(r"\d+ ms to the first token", figures)
        assert re.search(r"\d+ prompt tokens \(3 cached\)", figures)
        assert "16 output tokens" in figures
        assert await tab.texts(".turn.user .said") == ["Tell me a story"]
        assert not await tab.page.locator("#stop").is_visible()

    stage.tell(tmp_path, story)


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_the_settings_reach_the_worker(stage: Stage, tmp_path: Path, api: str) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["one"], ["two"]]
        await tab.playground()
        await tab.page.check(f"[name=api][value={api}]", force=True)
        wanted = {"temperature": "0.5", "topP": "0.9", "maxTokens": "17", "seed": "4", "stop": "END | ###"}
        for name, value in {**wanted, "system": "Be brief."}.items():
            await tab.page.fill(f"[name={name}]", value)
        await tab.say("first")
        await tab.answered()
        await tab.say("second")
        await tab.sees(".turn:last-child .said", "two")
        params = cluster.worker.calls[0].params
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.9, 17, 4)
        assert set(params.stop) == {"END", "###"}
        prompt = cluster.worker.tokenizer.decode(cluster.worker.calls[1].prompt_token_ids)
        assert [prompt.index(words) for words in ("Be brief.", "first", "one", "second")] == sorted(
            prompt.index(words) for words in ("Be brief.", "first", "one", "second")
        )

    stage.tell(tmp_path, story)


def test_stop_ends_the_work_behind_it_and_what_came_stays(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["half ", "of it"], ["again"]]
        cluster.worker.hold_at = 1
        await tab.playground()
        await tab.say("go")
        await tab.sees(".turn.assistant .said", "half")
        await tab.page.click("#stop")
        await eventually(lambda: len(cluster.worker.cancelled_at_s) == 1)
        await tab.sees(".figures .stopped")
        assert await tab.texts(".turn.assistant .said") == ["half"]
        cluster.worker.hold_at = None
        await tab.say("once more")
        await tab.sees(".turn.assistant .said", "again")

    stage.tell(tmp_path, story)


def test_a_reload_keeps_the_conversation_the_settings_and_what_had_come(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["whole answer"], ["partial ", "never"]]
        await tab.playground()
        await tab.page.fill("[name=system]", "Be brief.")
        await tab.page.check("[name=api][value=anthropic]", force=True)
        await tab.say("one")
        await tab.answered()
        cluster.worker.hold_at = 1
        await tab.say("two")
        await tab.sees(".turn.assistant .said", "partial")
        await tab.playground()
        assert await tab.texts(".turn .said") == ["one", "whole answer", "two", "partial"]
        await tab.sees(".turn:last-child .figures .stopped")
        assert await tab.page.input_value("[name=system]") == "Be brief."
        assert await tab.page.is_checked("[name=api][value=anthropic]")
        await eventually(lambda: cluster.worker.num_open == 0)
        await tab.page.click("#fresh")
        await tab.playground()
        assert await tab.texts(".turn") == []

    stage.tell(tmp_path, story)


def test_the_timeline_has_a_lane_for_every_process_and_for_the_transfer(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["done"]]
        await tab.playground()
        await tab.say("go")
        await tab.answered()
        lanes = await tab.texts(".lane .who")
        assert set(lanes) == {"gateway", "router", "prefill-0", "prefill-0 → decode-0", "decode-0"}
        for lane, kind in (("router", "pair"), ("prefill-0", "prefill-chunk"), ("decode-0", "decode")):
            row = tab.page.locator(".lane", has=tab.page.get_by_text(lane, exact=True))
            box = await row.locator(f".stage.{kind}").first.bounding_box()
            track = await row.locator(".track").bounding_box()
            assert box is not None
            assert track is not None
            assert track["x"] - 1 <= box["x"] <= box["x"] + box["width"] <= track["x"] + track["width"] + 4
        await tab.page.click(".every > summary")
        cells = await tab.texts(".stages td")
        assert "prefill chunk" in "".join(cells)
        by_position = "1: 5 of 6, 2: 4 of 6"
        counts = "9 accepted, 12 drafted, 6 steps, time saved 21 ms, tokens per step 2.5"
        assert {"30 tokens", "35 MB, source prefill-0", f"accepted by position {by_position}, {counts}"} <= set(cells)
        figures = await tab.page.inner_text(".figures")
        assert "9 of 12 drafted tokens accepted" in figures
        assert f"{by_position} by position of the draft" in figures
        assert "2.50 tokens per decode step" in figures
        assert "21 ms saved by drafts" in figures

    stage.tell(tmp_path, story)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (CapacityError("every worker is full", 3.0), "Every worker is full. Try again in 3 s."),
        (UnavailableError("no live decode worker is left", 2.0), "No live decode worker is left. Try again in 2 s."),
    ],
)
def test_a_refusal_is_shown_in_words_and_can_be_tried_again(
    stage: Stage, tmp_path: Path, error: TandemError, words: str
) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        tab.expected = ["Failed to load resource"]
        cluster.worker.answers = [["better now"]]
        cluster.router.refuse = error
        await tab.playground()
        await tab.say("go")
        await tab.sees(".problem", words)
        cluster.router.refuse = None
        await tab.page.click(".problem button")
        await tab.sees(".turn.assistant .said", "better now")
        assert await tab.page.locator(".problem").count() == 0

    stage.tell(tmp_path, story, failover_timeout_s=0)


def test_what_breaks_off_keeps_its_words_and_says_why(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["so far ", "no further"]]
        cluster.worker.fail_at, cluster.worker.failure = 1, TandemError("the engine broke")
        await tab.playground()
        await tab.say("go")
        await tab.sees(".problem", re.compile("the engine broke"))
        assert await tab.texts(".turn.assistant .said") == ["so far"]

    stage.tell(tmp_path, story, failover_timeout_s=0.1)


def test_a_gateway_that_is_away_is_said(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        tab.expected = ["Failed to load resource"]
        await tab.playground()
        await tab.page.route("**/v1/**", lambda route: route.abort())
        await tab.say("go")
        await tab.sees(".problem", "The gateway cannot be reached")

    stage.tell(tmp_path, story)


def test_a_mistake_in_the_settings_is_shown_where_it_is_and_nothing_is_sent(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.playground()
        for name, value, words in (
            ("schema", "{", "This is not JSON"),
            ("tools", '[{"type": "function"}]', "Every tool needs a name"),
        ):
            await tab.page.eval_on_selector(f"[name={name}]", "node => node.closest('details').open = true")
            await tab.page.fill(f"[name={name}]", value)
            await tab.say("go")
            await tab.sees(".wrong", words)
            assert await tab.page.get_attribute(f"[name={name}]", "aria-invalid") == "true"
            await tab.page.fill(f"[name={name}]", "")
        assert cluster.worker.calls == []
        assert await tab.texts(".turn") == []

    stage.tell(tmp_path, story)


def test_markdown_becomes_elements_and_markup_stays_words(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [
            ["# Ti", "tle\n\nSome **bold** and `code`", ".\n\n- one\n- two\n\n```py\nx = '<b>'\n``", f"`\n\n{ATTACK}"]
        ]
        await tab.playground()
        await tab.say(f"say {ATTACK}")
        await tab.answered()
        said = ".turn.assistant .said"
        assert await tab.texts(f"{said} h3") == ["Title"]
        assert await tab.texts(f"{said} strong") == ["bold"]
        assert await tab.texts(f"{said} li") == ["one", "two"]
        assert await tab.texts(f"{said} pre code") == ["x = '<b>'"]
        assert (await tab.texts(f"{said} > p"))[-1] == ATTACK
        assert await tab.page.locator(".turns img, .turns script").count() == 0

    stage.tell(tmp_path, story)


@pytest.mark.parametrize(
    ("api", "path", "answers", "sent"),
    [
        ("openai", "chat/completions", [OPENAI_CALLS, OPENAI_END], OPENAI_SENT),
        ("anthropic", "messages", [ANTHROPIC_CALLS, ANTHROPIC_END], ANTHROPIC_SENT),
    ],
    ids=["openai", "anthropic"],
)
def test_thinking_is_folded_and_tools_are_answered_by_hand(
    stage: Stage, tmp_path: Path, api: str, path: str, answers: list[list[dict[str, Any]]], sent: list[dict[str, Any]]
) -> None:
    """The stream is written by hand: names and arguments that no parser would let through."""
    bodies: list[dict[str, Any]] = []

    async def answer(route: "Route") -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        frames = "".join(f"data: {json.dumps(event)}\n\n" for event in answers[len(bodies) - 1])
        await route.fulfill(body=frames, headers={"content-type": "text/event-stream"})

    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.page.route(f"**/v1/{path}", answer)
        await tab.playground()
        await tab.page.check(f"[name=api][value={api}]", force=True)
        await tab.page.eval_on_selector("[name=tools]", "node => node.closest('details').open = true")
        await tab.page.click("#example")
        await tab.page.select_option("[name=effort]", "low")
        await tab.say("Weather?")
        await tab.sees(".thought summary", "Thought for 5 tokens")
        assert not await tab.page.locator(".turn:last-child .thought .body").is_visible()
        await tab.page.click(".turn:last-child .thought summary")
        await tab.sees(".thought .body", ATTACK)
        assert await tab.texts(".call .name") == ["get_weather", ATTACK]
        assert json.loads((await tab.texts(".call pre"))[1]) == {"x": ATTACK}
        for number, result in enumerate(("rain", "nothing")):
            await tab.page.locator(".call textarea").nth(number).fill(result)
        await tab.page.click(".continue")
        await tab.sees(".turn:last-child .said", "It rains.")
        assert await tab.page.locator(".continue:visible").count() == 0
        await tab.playground()
        assert await tab.page.locator(".call textarea").nth(0).input_value() == "rain"
        assert bodies[1]["messages"] == sent
        tool = bodies[0]["tools"][0]
        assert tool.get("function", tool)["name"] == "get_weather"
        effort = bodies[0].get("reasoning_effort") or bodies[0]["output_config"]["effort"]
        assert effort == "low"

    stage.tell(tmp_path, story)


@pytest.mark.parametrize("api", [pytest.param("openai", marks=pytest.mark.slow), "anthropic"])
def test_a_model_that_thinks_and_calls_tools_goes_on_with_the_result(stage: Stage, tmp_path: Path, api: str) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        cluster.worker.answers = [["<think>\nThey want ", "it.\n</think>\n\nI look.\n", call], ["It rains."]]
        await tab.playground()
        await tab.page.check(f"[name=api][value={api}]", force=True)
        await tab.page.eval_on_selector("[name=tools]", "node => node.closest('details').open = true")
        await tab.page.click("#example")
        await tab.say("Weather?")
        await tab.sees(".thought summary", re.compile(r"Thought for \d+ tokens"))
        assert (
            await tab.page.locator(".turn:last-child .thought .body").text_content() or ""
        ).strip() == "They want it."
        assert (await tab.texts(".turn.assistant .said")) == ["I look."]
        assert await tab.texts(".call .name") == ["get_weather"]
        assert json.loads((await tab.texts(".call pre"))[0]) == {"city": "Oslo"}
        await tab.page.fill(".call textarea", "rain")
        await tab.page.click(".continue")
        await tab.sees(".turn:last-child .said", "It rains.")
        prompt = cluster.worker.tokenizer.decode(cluster.worker.calls[1].prompt_token_ids)
        assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt
        assert "<tool_response>\nrain\n</tool_response>" in prompt

    stage.tell(tmp_path, story, chat_template=QWEN)


def test_the_key_is_sent_kept_for_the_tab_and_never_written_down(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        keys: list[str | None] = []
        tab.page.on("request", lambda request: keys.append(request.headers.get("authorization")))
        cluster.worker.answers = [["yes"], ["curled"]]
        await tab.playground()
        await tab.page.fill("#key", "sk-secret")
        await tab.say("it's $HOME `x`")
        await tab.answered()
        assert keys[-1] == "Bearer sk-secret"
        assert "sk-secret" not in await tab.page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert await tab.page.evaluate("sessionStorage['tandem.key']") == "sk-secret"
        await tab.page.click("#curl")
        await tab.sees("#note", "Copied")
        line = await tab.page.evaluate("navigator.clipboard.readText()")
        assert "sk-secret" not in line
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            f"{line} -sS --noproxy '*'",
            stdout=subprocess.PIPE,
            env={**os.environ, "TANDEM_API_KEY": "sk-secret"},
        )
        output, _ = await asyncio.wait_for(process.communicate(), 20)
        assert b"curled" in output
        assert output.endswith(b"data: [DONE]\n\n")
        asked = cluster.worker.tokenizer.decode(cluster.worker.calls[1].prompt_token_ids)
        assert "it's $HOME `x`" in asked

    stage.tell(tmp_path, story)


def test_the_policy_stops_what_gets_past_the_page(stage: Stage, tmp_path: Path) -> None:
    """A page that made markup of words would not run it: the browser refuses strings as markup, and inline scripts."""

    async def story(cluster: PageCluster, tab: Tab) -> None:
        tab.expected = ["TrustedHTML", "TrustedScript", "Content Security Policy"]
        await tab.playground()
        for deed in ("document.body.innerHTML = '<p>'", "document.body.setAttribute('onclick', 'window.hacked=1')"):
            tried = f"() => {{ try {{ {deed}; return 'done'; }} catch (error) {{ return error.name; }} }}"
            assert await tab.page.evaluate(tried) == "TypeError"
        assert await tab.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"

    stage.tell(tmp_path, story)


# --- operations -------------------------------------------------------------------------------------------------------


def test_a_worker_of_several_processes_shows_each_of_them(stage: Stage, tmp_path: Path) -> None:
    """A rank that has not been heard for a while is marked; without such workers there is no table."""

    async def story(cluster: PageCluster, tab: Tab) -> None:
        await tab.page.goto("/operations")
        await tab.sees("#workers-table td", "decode-0")
        assert not await tab.page.locator("#ranks").is_visible()
        report = RankReport(
            (70, 71, 12, 13), 2, hosts=("", "", "host 1 (10.0.0.7)", "host 1 (10.0.0.7)"), silent_s=(0.0, 0.2, 0.1, 1.4)
        )
        cluster.router.told = [listing(cluster.worker, "decode-9", ranks=report)]
        await tab.sees("#ranks-table td", "host 1 (10.0.0.7)")
        rows = [words.split("\t") for words in await tab.texts("#ranks-table tbody tr")]
        assert [row[1:5] for row in rows] == [
            ["0", "the worker's", "70", "heads 1 of 4"],
            ["1", "the worker's", "71", "heads 2 of 4"],
            ["2", "host 1 (10.0.0.7)", "12", "heads 3 of 4"],
            ["3", "host 1 (10.0.0.7)", "13", "heads 4 of 4"],
        ]
        assert [row[-1] for row in rows] == ["leads", "0.2 s ago", "0.1 s ago", "1.4 s ago"]
        assert await tab.texts("#ranks-table .state.warn") == ["1.4 s ago"]
        assert await tab.texts("#workers-table tr:has-text('decode-9') td[data-title=Ranks]") == ["4"]

    stage.tell(tmp_path, story)


def test_the_cluster_is_shown_as_it_changes_and_who_vanishes_is_gone(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        other = listing(cluster.worker, "prefill-0", Role.PREFILL, num_links=3)
        cluster.router.told = [other, listing(cluster.worker, f"decode-{ATTACK}")]
        cluster.router.decided = [
            Decision(request_id="req-1", age_s=1.0, policy="p", decode_id="decode-0", predicted_ms={"ttft": 12.0}),
            Decision(request_id=ATTACK, age_s=0.5, policy="p", refusal=ATTACK),
        ]
        await tab.page.goto("/operations")
        await tab.sees("#workers-table td", "prefill-0")
        assert f"decode-{ATTACK}" in await tab.texts("#workers-table td:first-child")
        assert await tab.texts("#pools h2") == ["prefill pool", "decode pool"]
        assert await tab.page.locator("#links-table tbody tr").count() == 3
        await tab.sees("#decisions-table .state", "refused")
        kept = await tab.page.query_selector("#workers-table tr:has-text('prefill-0')")
        cluster.router.told = [replace(other, age_s=5.0, is_alive=False)]
        await tab.sees("#workers-table tr.gone", "prefill-0")
        await tab.sees("#workers-table tr.gone", "decode-<img")
        await tab.sees("#pools .tile", "0 of 1 alive")
        cluster.router.told = [other]
        await tab.sees("#workers-table tr:not(.gone)", "prefill-0")
        assert kept is not None
        assert await kept.evaluate("node => node.isConnected")

    stage.tell(tmp_path, story)


@pytest.mark.parametrize("state", ["starting", "recovering", "draining"])
def test_a_worker_that_reports_and_is_given_nothing_is_not_gone(stage: Stage, tmp_path: Path, state: str) -> None:
    """Its state is shown, and what it runs counts: it was called gone, though it was heard."""

    async def story(cluster: PageCluster, tab: Tab) -> None:
        report = RankReport((70, 71), 2, silent_s=(0.0, 0.1))
        told = listing(cluster.worker, "prefill-9", Role.PREFILL, ranks=report, lifecycle=state)
        cluster.router.told = [replace(told, is_alive=False)]
        await tab.page.goto("/operations")
        await tab.sees("#workers-table tr:not(.gone) .state", state)
        await tab.sees("#pools .tile", "1 of 1 alive")
        accepted, waiting = told.status.state.num_running, told.status.num_waiting
        assert f"{accepted - waiting} running · {waiting} waiting" in (await tab.texts("#pools .tile"))[0]
        await tab.sees("#ranks-table td", "prefill-9")
        cluster.router.told = [replace(told, is_alive=False, age_s=5.0)]
        await tab.sees("#workers-table tr.gone .state", "gone")

    stage.tell(tmp_path, story)


def test_live_figures_move_pause_holds_them_and_a_lost_gateway_is_said(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        tab.expected = ["Failed to load resource"]
        cluster.worker.answers = [["some words"]]
        await tab.playground()
        await tab.say("go")
        await tab.answered()
        recent = cluster.fake.gateway.gateway.metrics.recent
        await eventually(lambda: recent.as_json()["ttft_ms"]["p50"] is not None)
        await tab.page.clock.install()
        await tab.page.goto("/operations")
        await tab.sees("#tiles .tile:has-text('Time to first token') .figure", re.compile(r"\d ms"))
        assert await tab.page.locator("#tiles .spark .line").count() >= 2
        await tab.page.click("#pause")
        await tab.sees("#fresh", "paused")
        asked: list[str] = []
        tab.page.on("request", lambda request: asked.append(request.url))
        cluster.router.told = [listing(cluster.worker, "decode-9")]
        await tab.page.clock.run_for(60_000)
        assert asked == []
        await tab.page.click("#pause")
        await tab.sees("#workers-table td", "decode-9")
        await tab.page.route("**/admin/**", lambda route: route.abort())
        await tab.page.clock.run_for(POLL_MS)
        await tab.sees("#banner", "The gateway cannot be reached")
        await tab.page.unroute("**/admin/**")
        await tab.page.clock.run_for(POLL_MS)
        await tab.page.wait_for_selector("#banner", state="hidden")

    stage.tell(tmp_path, story)


def test_blocks_in_use_and_cached_are_told_apart(stage: Stage, tmp_path: Path) -> None:
    """A pool half full of cached blocks read "0 %", as if it were empty."""

    async def story(cluster: PageCluster, tab: Tab) -> None:
        one = listing(cluster.worker, "prefill-0", Role.PREFILL, usage=ProcessUsage(1_500_000_000, 0.75))
        blocks = {"free": 39, "cached": 51, "used": 4, "leased": 3, "transferring": 1, "pinned": 1, "unheard of": 1}
        cluster.router.told = [replace(one, status=replace(one.status, blocks=blocks))]
        await tab.page.goto("/operations")
        row = tab.page.locator("#workers-table tr:has-text('prefill-0')")
        await row.locator(".shares span").first.wait_for()
        await tab.page.locator("#processes-table tr:has-text('gateway') [data-title=Memory]").wait_for()
        assert await row.locator(".shares span").all_inner_texts() == ["10 % in use", "51 % cached"]
        assert await tab.texts("#pools .tile:has-text('prefill') .shares span") == ["10 % in use", "51 % cached"]
        widths = "nodes => nodes.map(node => node.className + ' ' + node.style.width)"
        drawn = await row.locator(".kv .part").evaluate_all(widths)
        assert drawn == [
            *("part used 4%", "part leased 3%", "part transferring 1%", "part pinned 1%"),
            *("part cached 51%", "part other 1%"),
        ]
        assert await tab.page.locator("#legend [title*='another worker']").all_inner_texts() == ["leased"]
        assert await row.locator("td[data-title=CPU]").inner_text() == "0.75 cores"
        assert await row.locator("td[data-title=Memory]").inner_text() == "1.5 GB"
        silent = tab.page.locator("#workers-table tr:has-text('decode-0')")
        assert await silent.locator("td[data-title=CPU]").inner_text() == "\u2013"
        assert re.fullmatch(
            r"\d+ MB|\d\.\d GB",
            await tab.page.inner_text("#processes-table tr:has-text('gateway') [data-title=Memory]"),
        )

    stage.tell(tmp_path, story)


def test_lines_have_axes_and_show_a_minute_or_an_hour(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        recent = cluster.fake.gateway.gateway.metrics.recent
        for ttft_s in (0.9, 2.3):
            recent.note_arrival(100)
            recent.note_first(ttft_s)
        recent.note_prompt(200, 150)
        recent.note_error(is_ours=True, has_arrived=True)
        await eventually(lambda: recent.as_json()["num_requests"] == 2)
        await tab.page.goto("/operations")
        ttft = tab.page.locator("#tiles .tile:has-text('Time to first token') .spark")
        await ttft.wait_for()
        assert await ttft.locator("span").all_inner_texts() == ["1 s", "0", "60 s ago", "now"]
        assert await ttft.get_by_role("img", name="Time to first token, last minute").count() == 1
        figures = {await one.inner_text() for one in await tab.page.locator("#tiles .figure b").all()}
        assert {"50 %", "75 %"} <= figures
        await tab.sees("#tiles .notes", "1 failed")
        await tab.page.focus("#range [value=hour]")
        await tab.page.keyboard.press("Enter")
        assert await ttft.locator("figcaption span").all_inner_texts() == ["1 h ago", "now"]
        assert await tab.page.get_attribute("#range [value=hour]", "aria-pressed") == "true"
        assert await tab.page.get_attribute("#tiles", "aria-label") == "last hour"

    stage.tell(tmp_path, story)


def test_one_request_a_minute_is_no_rate_of_zero(stage: Stage, tmp_path: Path) -> None:
    async def story(_cluster: PageCluster, tab: Tab) -> None:
        async def slowed(route: "Route") -> None:
            answer = await route.fetch()
            told = await answer.json()
            told["live"]["requests_per_s"] = 1 / 60
            await route.fulfill(response=answer, json=told)

        await tab.page.route("**/admin/overview", slowed)
        await tab.page.goto("/operations")
        await tab.sees("#tiles .tile:has-text('Requests per second') .figure", "0.02")

    stage.tell(tmp_path, story)


def test_a_pairing_leads_to_its_request_and_its_timeline(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        tab.expected = ["Failed to load resource"]
        cluster.worker.answers = [["done"]]
        await tab.playground()
        await tab.say("go")
        await tab.answered()
        own = await tab.page.get_attribute(".timeline .alone", "href")
        request_id = (await tab.page.inner_text(".timeline summary .mono")).strip()
        assert own == f"trace#{request_id}"
        cluster.router.decided = [
            Decision(request_id=f"{request_id}/0", age_s=1.0, policy="p", decode_id="decode-0"),
            Decision(request_id="another's", age_s=2.0, policy="p", decode_id="decode-0"),
        ]
        await tab.page.goto("/operations")
        await tab.page.locator("#decisions-table a", has_text=request_id[:13]).click()
        await tab.sees("#request", request_id)
        assert "prefill-0 → decode-0" in await tab.texts(".lane .who")
        assert "done" in await tab.texts("#facts dd")
        await tab.page.go_back()
        await tab.page.locator("#decisions-table a", has_text="another's").click()
        await tab.sees("#banner", re.compile("'another's' is unknown here|unknown here"))
        assert await tab.page.locator(".lane").count() == 0
        await tab.page.goto("/trace#%E0%A4%A")
        await tab.page.reload()
        await tab.sees("#banner", "URI")

    stage.tell(tmp_path, story)


def test_many_workers_are_sorted_filtered_and_folded(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.router.told = [listing(cluster.worker, f"decode-{number}") for number in range(1, 64)]
        await tab.page.goto("/operations")
        await tab.sees("#workers-table td", "decode-0")
        names = await tab.texts("#workers-table td:first-child")
        assert names == [f"decode-{number}" for number in range(24)]
        await tab.page.click("text=Show all 64")
        assert await tab.page.locator("#workers-table tbody tr").count() == 64
        await tab.page.click("#workers-table th button:has-text('Running')")
        running = [int(words) for words in await tab.texts("#workers-table td:nth-child(5)")]
        assert running == sorted(running, reverse=True)
        assert await tab.page.get_attribute("#workers-table th:nth-child(5)", "aria-sort") == "descending"
        await tab.page.fill("#filter", "decode-63")
        assert await tab.texts("#workers-table td:first-child") == ["decode-63"]
        await tab.page.fill("#filter", "nobody")
        await tab.sees("#workers-table .none", "No worker matches")

    stage.tell(tmp_path, story)


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_no_page_is_wider_than_the_screen(stage: Stage, tmp_path: Path, size: tuple[int, int]) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        word = "a" * 300
        cluster.worker.answers = [[f"{word} `{word}`\n\n```\n{word}\n```\n\n- {word}"]]
        cluster.router.told = [listing(cluster.worker, f"decode-{word}", num_links=2)]
        cluster.router.decided = [Decision(request_id=word, age_s=1.0, policy="p", decode_id=word, prefill_id=word)]
        await tab.playground()
        await tab.say(word)
        await tab.answered()
        assert await tab.overflow() <= 0
        inner = "[...document.querySelectorAll('.turns')].every(node => node.scrollWidth <= node.clientWidth)"
        assert await tab.page.evaluate(inner)
        if size == PHONE:
            await tab.page.click(".timeline > summary")
            await tab.page.click("#panel > summary")
            assert await tab.overflow() <= 0
        request_id = (await tab.page.inner_text(".timeline summary .mono")).strip()
        await tab.page.goto("/operations")
        await tab.sees("#workers-table td", "decode-0")
        assert await tab.overflow() <= 0
        await tab.page.goto(f"/trace#{request_id}")
        await tab.sees("#facts dd", "done")
        assert await tab.overflow() <= 0

    stage.tell(tmp_path, story, size)


def test_everything_has_a_name_and_is_reached_by_keyboard(stage: Stage, tmp_path: Path) -> None:
    async def story(cluster: PageCluster, tab: Tab) -> None:
        cluster.worker.answers = [["yes"]]
        await tab.playground()
        await tab.page.keyboard.press("Tab")
        await tab.page.keyboard.press("Enter")
        await tab.page.keyboard.type("typed")
        await tab.page.keyboard.press("Shift+Enter")
        await tab.page.keyboard.type("on two lines")
        await tab.page.keyboard.press("Enter")
        await tab.answered()
        assert await tab.texts(".turn.user .said") == ["typed\non two lines"]
        request_id = (await tab.page.inner_text(".timeline summary .mono")).strip()
        for path in ("/", "/operations", f"/trace#{request_id}"):
            await tab.page.goto(path)
            await tab.sees("#model", MODEL)
            nameless = await tab.page.evaluate(
                """() => [...document.querySelectorAll('button, input, select, textarea, a, [role=img]')]
                    .filter(it => !(it.labels?.length || it.ariaLabel || it.textContent.trim()))
                    .map(it => it.outerHTML)"""
            )
            assert nameless == []
            assert await tab.page.evaluate("document.documentElement.lang") == "en"

    stage.tell(tmp_path, story)
