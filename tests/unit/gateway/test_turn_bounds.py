"""Bounds of what a known conversation costs beside its tokens: time of the event loop, and memory."""

import asyncio
import json
import random
import time
import tracemalloc
from asyncio import events
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.gateway.dialect import DialectContext, RequestLimits
from tandem.gateway.known_conversations import KnownConversations
from tandem.gateway.known_prefixes import KnownPrefixes, Piece
from tandem.gateway.model import ServedModel
from tandem.gateway.openai.chat import ChatDialect
from tandem.rpc.messages import ModelInfo
from tests.unit.gateway.test_known_conversations import INFO, context_of, read, unread

DEMO = Path("demo/tandem-demo")
MOST_AT_ONCE_S = 0.005


def demo_context(max_known_bytes: int) -> DialectContext:
    model = ServedModel.load(str(DEMO), "m", 0, max_known_bytes=max_known_bytes)
    long = replace(INFO, max_model_len=2**22, vocab_size=4096)

    async def info() -> ModelInfo:
        return long

    return DialectContext(model, SimpleNamespace(get=info), RequestLimits(8, 100_000))  # type: ignore[arg-type]


def body_of(messages: list[dict[str, Any]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


@pytest.mark.slow
@pytest.mark.parametrize("max_known_mib", [128, 4], ids=["kept", "forgotten each time"])
def test_no_turn_of_a_very_long_chat_holds_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, max_known_mib: int
) -> None:
    """Processor time of the loop's thread for each callback; of several turns the quickest, as others disturb.

    800,000 tokens in 4.6 MB.
    """
    context, rng = demo_context(max_known_mib * 2**20), random.Random(3)
    words = [f" {word}" for word in Path("docs/api.md").read_text().split() if word.isalpha()]
    took_s: list[float] = []
    run = events.Handle._run

    def timed(self: events.Handle) -> None:
        started_s = time.thread_time()
        run(self)
        took_s.append(time.thread_time() - started_s)

    monkeypatch.setattr(events.Handle, "_run", timed)

    def message(number: int, num_words: int) -> dict[str, Any]:
        return {"role": ("user", "assistant")[number % 2], "content": "".join(rng.choices(words, k=num_words))}

    async def story() -> list[float]:
        messages, longest = [message(number, 400) for number in range(1601)], []
        for _ in range(5):
            body = body_of(messages)
            await asyncio.sleep(0)  # NOTE: making the body is another callback
            took_s.clear()
            await asyncio.create_task(ChatDialect(context).read(body, "r", lambda scope: scope))
            longest.append(max(took_s))
            messages += [message(1, 200), message(0, 300)]
        return longest[1:]

    longest = asyncio.run(story())
    context.model.encoder.close()
    assert min(longest) < MOST_AT_ONCE_S, longest


def test_what_is_kept_takes_the_memory_that_it_is_charged_for() -> None:
    known, rng = KnownPrefixes(2**30), random.Random(1)
    sizes = [rng.randrange(200, 700) for _ in range(4000)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number, size in enumerate(sizes):
        known.add([rng.randbytes(32)], [Piece(rng.randbytes(4 * size), rng.randbytes(32 * (size // 16)))])
        assert len(known) == number + 1
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.9 * known.num_bytes < taken < 1.1 * known.num_bytes


def test_a_chat_of_english_takes_six_bytes_a_token_and_little_beside() -> None:
    """1.5 bytes a character where a token has five; this model's small vocabulary has three."""
    context = demo_context(2**27)
    text = Path("docs/api.md").read_text()[:60_000]
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text[start : start + 1500]}
        for number, start in enumerate(range(0, len(text), 1500))
    ][:39]

    async def story() -> int:
        num_tokens = 0
        for end in range(31, 40, 2):
            found = await ChatDialect(context).read(body_of(messages[:end]), "r", lambda scope: scope)
            assert found.encoding is not None
            num_tokens = found.encoding.num_tokens
        return num_tokens

    num_tokens = asyncio.run(story())
    known = context.model.encoder.known
    num_characters = sum(len(message["content"]) for message in messages)
    assert known.num_bytes < 6 * num_tokens + 0.3 * num_characters
    context.model.encoder.close()


def test_what_a_model_cannot_show_is_refused_by_its_number_in_the_whole(tmp_path: Path) -> None:
    context = context_of(tmp_path, (DEMO / "chat_template.jinja").read_text())
    long = [{"role": ("user", "assistant")[number % 2], "content": f"{number} " + "x" * 1500} for number in range(9)]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    async def story() -> None:
        assert unread(await read(context, body_of(long))) == 0
        more = [*long, {"role": "assistant", "content": "so"}]
        assert unread(await read(context, body_of([*more, {"role": "user", "content": "and?"}]))) > 0
        refused = await read(context, body_of([*more, {"role": "user", "content": [picture]}]))
        assert isinstance(refused, str)
        assert "messages[10].content[0]" in refused

    asyncio.run(story())
    context.model.encoder.close()


def test_another_system_prompt_shares_nothing(tmp_path: Path) -> None:
    context = context_of(tmp_path, (DEMO / "chat_template.jinja").read_text())
    long = [{"role": ("user", "assistant")[number % 2], "content": f"{number} " + "x" * 1500} for number in range(9)]

    async def story() -> None:
        for words in ("be kind", "be Kind"):
            found = await read(context, body_of([{"role": "system", "content": words + " " * 1100}, *long]))
            assert unread(found) == 0
            assert not isinstance(found, str)
            assert found.encoding is not None
            assert found.encoding.num_known_tokens == 0

    asyncio.run(story())
    context.model.encoder.close()


def test_looking_for_what_another_tenant_asked_takes_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if anything is looked for, or compared, without the scope: that would take time which tells of a hit."""
    context = context_of(tmp_path, (DEMO / "chat_template.jinja").read_text())
    long = [{"role": ("user", "assistant")[number % 2], "content": f"{number} " + "x" * 1500} for number in range(9)]
    steps: list[tuple[str, int]] = []
    find, leading = KnownConversations.find, KnownPrefixes.leading

    def noted_find(self: KnownConversations, *given: Any) -> Any:
        found = find(self, *given)
        steps.append(("find", 0 if found is None else 1))
        return found

    def noted_leading(self: KnownPrefixes, keys: Any) -> Any:
        found = leading(self, keys)
        steps.append(("leading", len(found)))
        return found

    monkeypatch.setattr(KnownConversations, "find", noted_find)
    monkeypatch.setattr(KnownPrefixes, "leading", noted_leading)

    async def story() -> list[list[tuple[str, int]]]:
        taken = []
        for tenant, words in (("a", "x"), ("b", "x"), ("c", "y"), ("b", "x")):
            asked = [{**message, "content": message["content"].replace("x", words)} for message in long]
            steps.clear()
            await read(context, body_of(asked), tenant)
            taken.append(list(steps))
        return taken

    first, same, other, again = asyncio.run(story())
    assert first == same == other
    assert again != first
    context.model.encoder.close()
