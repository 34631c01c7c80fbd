"""The next body of a known conversation is read from its last known messages on, with the tokens of the whole.

What it is compared with keeps nothing, but is cut as well; `test_known_tokenizers` compares with what is not cut.
"""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.gateway.dialect import DialectContext, ParsedRequest, RequestLimits
from tandem.gateway.known_conversations import (
    MAX_ALIKE,
    MAX_BODY_BYTES,
    MIN_BODY_BYTES,
    BodyDigest,
    KnownBeginning,
    KnownConversation,
    KnownConversations,
)
from tandem.gateway.known_prefixes import CutBeginning
from tandem.gateway.message_spans import MessageSpans
from tandem.gateway.model import ServedModel
from tandem.gateway.openai.chat import ChatDialect
from tandem.gateway.prompt_encoder import ChainRoot
from tandem.rpc.messages import ModelInfo
from tandem.text.resumption import LoopInputs, Resumption
from tests.helpers.tokenizers import CHAT_TEMPLATE, NUM_TOKENS, write_byte_tokenizer
from tests.unit.text.templates import HEADERS, INSTRUCTIONS, TURNS
from tests.unit.text.turn_templates import ALTERNATING, CARRIED, LAST_QUESTION, LOOKAHEAD, MACROS

DEMO = Path("demo/tandem-demo/chat_template.jinja").read_text()
SETS = (
    "{% set mark = '#' %}{% for message in messages %}{% set mark = mark ~ message.role %}<|im_start|>{{ mark }}"
    "{% for part in message.content.split('e') %}{{ part | trim }}{% if not loop.last %}e{% endif %}{% endfor %}"
    "{% if loop.last %}!{% endif %}<|im_end|>{% endfor %}{{ mark }}"
)
BEFORE_FIRST = (
    "{% for message in messages %}<|im_start|>{{ messages[loop.index0 - 1].role }}{{ message.content }}<|im_end|>"
    "{% endfor %}"
)
COUNTED = (
    "{% set ns = namespace(n=0) %}{% for message in messages %}{% set ns.n = ns.n + 1 %}<|im_start|>{{ ns.n }}"
    "{{ message.content }}<|im_end|>{% endfor %}"
)
REWRITES = (
    "{% for message in messages %}<|im_start|>{% if loop.index0 > messages | length - 3 %}{{ message.content }}"
    "{% else %}short{% endif %}<|im_end|>{% endfor %}"
)
TAKES_WHOLE = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for message in messages %}"
    "<|im_start|>{{ message.content }}{% if message == asked[-1] %}!{% endif %}<|im_end|>{% endfor %}"
)
HIDES_RESULTS = (
    "{% for message in messages %}{% if message.role != 'tool' %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)
RESUMED = {
    "demo": DEMO,
    "plain": CHAT_TEMPLATE,
    "sets": SETS,
    "counted": COUNTED,
    "headers": HEADERS.replace("<|start_header_id|>", "<|im_start|>"),
}
RESUMED |= {"last question": LAST_QUESTION, "macros": MACROS, "carried": CARRIED, "alternating": ALTERNATING}
RESUMED |= {"lookahead": LOOKAHEAD}
WHOLE = {"before first": BEFORE_FIRST, "rewrites": REWRITES, "takes whole": TAKES_WHOLE}
WHOLE |= {"turns": TURNS.replace("<start_of_turn>", "<|im_start|>")}  # reads the loop's length
WHOLE |= {"instructions": INSTRUCTIONS.replace("[INST]", "<|im_start|>")}  # compares messages with the last question
INFO = ModelInfo(name="m", fingerprint="f" * 32, max_model_len=200_000, vocab_size=NUM_TOKENS, block_size=16)
WORDS = [
    "hello ",
    "<|im_start|>",
    "<|im_end|>\n",
    "<|im_",
    "é",
    "e\u0301",
    "👩\u200d👩",
    '"\\',
    "\n",
    "1",
    '"}],"',
    "漢字",
]
NOTHING_SEEN = Resumption(LoopInputs(b"", 0, {}, {}), {}, ())
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

NUM_WORDS = (1, 3, 40, 400)  # of a text, one of them


def context_of(directory: Path, template: str, max_known_bytes: int = 2**26, max_messages: int = 64) -> DialectContext:
    directory.mkdir(exist_ok=True)
    write_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    model = ServedModel.load(str(directory), "m", 0, max_known_bytes=max_known_bytes)
    model = replace(model, conversations=KnownConversations(max_known_bytes // 8, min_body_bytes=0))

    async def info() -> ModelInfo:
        return INFO

    return DialectContext(model, SimpleNamespace(get=info), RequestLimits(8, max_messages))  # type: ignore[arg-type]


async def read(context: DialectContext, body: bytes, tenant: str = "") -> ParsedRequest | str:
    """The request, or the words of its refusal."""

    def isolate(scope: CacheScope) -> CacheScope:
        return CacheScope(salt=f"{tenant}/{scope.salt}" if tenant else scope.salt)

    try:
        return await ChatDialect(context).read(body, "r", isolate)
    except InvalidRequestError as error:
        return f"{type(error).__name__}: {error}"


def ids_of(found: ParsedRequest | str) -> list[int] | str:
    return found if isinstance(found, str) else found.request.choices[0].prompt_token_ids.tolist()


def unread(found: ParsedRequest | str) -> int:
    assert not isinstance(found, str), found
    assert found.encoding is not None
    return found.encoding.num_unread_messages


def text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.choice(NUM_WORDS)))


def turn(rng: random.Random, number: int) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "user", "content": text(rng)}]
    for step in range(rng.choice([0, 0, 1, 2])):
        number = 10 * number + step
        call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": '{"a": 12345678901}'}}
        result: dict[str, Any] = {"role": "tool", "tool_call_id": f"c{number}", "content": text(rng)}
        said += [{"role": "assistant", "content": rng.choice([None, text(rng)]), "tool_calls": [call]}, result]
        said += [dict(result)] * rng.randrange(2)
        if rng.random() < 0.5 and said[-2]["role"] == "assistant":
            said[-2]["reasoning_content"] = text(rng)
    if rng.random() < 0.1:
        said[0]["content"] = [{"type": "text", "text": text(rng)}, {"type": "text", "text": "more"}]
    return [*said, {"role": "assistant", "content": text(rng)}]


def body_of(rng: random.Random, messages: list[dict[str, Any]], tools: bool, place: int, indent: int | None) -> bytes:
    fields: list[tuple[str, Any]] = [("model", "m"), ("stop", []), ("max_tokens", rng.choice([1, 5]))]
    fields.insert(place, ("messages", messages))
    if tools:
        fields.append(("tools", TOOLS))
    chance = rng.random()
    if chance < 0.05:
        fields.append(("cache_salt", "own"))
    elif chance < 0.1:
        fields.append(("chat_template_kwargs", {"add_vision_id": rng.choice([True, 1])}))
    elif chance < 0.15:
        fields.append(("metadata", {"messages": [{"role": "user"}]}))
    written = json.dumps(dict(fields), ensure_ascii=False, indent=indent)
    if chance > 0.97:
        written = written[:-1] + ', "messages"    : [{"role": "user", "content": "last wins"}]}'
    return written.encode() if chance < 0.95 or chance > 0.96 else written.encode()[:-1]


def grown(rng: random.Random) -> list[bytes]:
    """The bodies of one conversation, which is edited here and there, and of which some are wrong."""
    messages = [{"role": "system", "content": text(rng)}] if rng.random() < 0.5 else []
    messages += [message for number in range(3) for message in turn(rng, number)]
    tools, place, indent, bodies = rng.random() < 0.3, rng.randrange(3), rng.choice([None, 1]), []
    for number in range(3, 9):
        messages += turn(rng, number)
        if rng.random() < 0.15:
            edited = rng.randrange(len(messages))
            messages[edited] = {**messages[edited], "content": text(rng)}
        if rng.random() < 0.02:
            messages = [*messages, {"role": "system", "content": "late"}]
        if rng.random() < 0.02:
            messages = [*messages, {"role": "tool", "tool_call_id": "never", "content": "x"}]
        tools ^= rng.random() < 0.05
        ends = [end for end in range(len(messages) - 4, len(messages)) if messages[end]["role"] in ("user", "tool")]
        for end in [*ends[-2:], *([len(messages) - 1] if rng.random() < 0.1 else [])]:
            bodies.append(body_of(rng, messages[: end + 1], tools, place, indent))
        if rng.random() < 0.05:
            messages = messages[:-2]
    return bodies


@pytest.mark.parametrize("name", [*RESUMED, *WHOLE])
@pytest.mark.parametrize("num_talks", [10, pytest.param(9_000, marks=pytest.mark.slow)])
def test_equals_the_whole_however_a_conversation_goes_on(tmp_path: Path, name: str, num_talks: int) -> None:
    """Also where the cache is so small that entries and pieces are lost all the time."""
    template = (RESUMED | WHOLE)[name]
    plain = context_of(tmp_path / "plain", template, 0)
    known = [context_of(tmp_path / "known", template), context_of(tmp_path / "few", template, 60_000)]
    rng = random.Random(name)

    async def run() -> int:
        num_unread = 0
        for _ in range(num_talks):
            for body in grown(rng):
                wanted = ids_of(await read(plain, body))
                for each in known:
                    found = await read(each, body)
                    assert ids_of(found) == wanted
                    num_unread += 0 if isinstance(found, str) else unread(found)
        return num_unread

    assert (asyncio.run(run()) > 50) == (name in RESUMED)
    for each in [plain, *known]:
        each.model.encoder.close()


def test_block_hashes_are_those_of_the_whole(tmp_path: Path) -> None:
    context = context_of(tmp_path, DEMO)
    model, rng = context.model, random.Random(4)
    root = root_hash(UNSCOPED, model_fingerprint=INFO.fingerprint, block_size=INFO.block_size)

    async def run() -> None:
        messages = [message for number in range(4) for message in turn(rng, number)]
        for number in range(4, 12):
            messages += turn(rng, number)
            found = await read(context, json.dumps({"model": "m", "messages": messages}).encode())
            assert unread(found) == 0 if number == 4 else unread(found) > 0
        assert not isinstance(found, str)
        ids = found.request.choices[0].prompt_token_ids
        hashes: list[bytes] = []
        extend_hashes(root, hashes, ids, INFO.block_size)
        text = model.tokenizer.decode(ids, skip_special_tokens=False)
        again = await model.encoder.encode_chat(text, 10**6, ChainRoot(root, INFO.block_size), add_special_tokens=False)
        assert again.counts.num_known_tokens > 0.9 * len(ids)
        assert again.hashes == b"".join(hashes)

    asyncio.run(run())
    model.encoder.close()


def test_of_a_long_conversation_only_its_end_is_read(tmp_path: Path) -> None:
    """Counts bytes parsed, messages rendered and tokens made."""
    context = context_of(tmp_path, DEMO)
    long = "x" * 1500
    messages = [{"role": ("user", "assistant")[index % 2], "content": f"{index} {long}"} for index in range(41)]

    async def run() -> ParsedRequest | str:
        await read(context, json.dumps({"model": "m", "messages": messages}).encode())
        more = [*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}]
        body = json.dumps({"model": "m", "messages": more}).encode()
        (entry,) = [context.model.conversations.find(body, BodyDigest(body), UNSCOPED, "chat")]
        assert entry is not None
        assert len(entry.shortened(body)) < 4 * 1600
        return await read(context, body)

    found = asyncio.run(run())
    assert unread(found) == 38
    assert not isinstance(found, str)
    assert found.encoding is not None
    assert found.encoding.num_tokens - found.encoding.num_known_tokens < 2 * 1600
    assert found.encoding.num_blocks - found.encoding.num_known_blocks <= 2 * 1600 // INFO.block_size
    context.model.encoder.close()


def test_a_breakpoint_that_is_not_shown_pins_nothing(tmp_path: Path) -> None:
    """Regression: where a conversation was resumed, all before the last known message was pinned, and billed."""
    contexts = [context_of(tmp_path / "plain", HIDES_RESULTS, 0), context_of(tmp_path / "known", HIDES_RESULTS)]
    long = "x" * 1500

    def body(num_rounds: int, **mark: Any) -> bytes:
        messages: list[dict[str, Any]] = []
        for number in range(num_rounds):
            call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages += [
                {"role": "user", "content": f"{number} {long}"},
                {"role": "assistant", "content": long, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{number}", "content": "seen"},
            ]
        messages[-1]["content"] = [{"type": "text", "text": "seen", **mark}]
        return json.dumps({"model": "m", "messages": messages}).encode()

    async def run() -> None:
        for num_rounds in (3, 4):
            marked = body(num_rounds, prompt_cache_breakpoint={"mode": "explicit"})
            for found in [await read(context, marked) for context in contexts]:
                assert not isinstance(found, str)
                assert found.request.pins == ()
        assert unread(await read(contexts[1], body(5))) > 0

    asyncio.run(run())
    for context in contexts:
        context.model.encoder.close()


def test_neither_tenants_nor_salts_find_each_others_conversations(tmp_path: Path) -> None:
    context = context_of(tmp_path, DEMO)
    messages = [{"role": "user", "content": f"{index}" + "x" * 1500} for index in range(8)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    salted = json.dumps({"model": "m", "messages": messages, "cache_salt": "own"}).encode()

    async def run() -> list[int]:
        return [unread(await read(context, *each)) for each in ((body, "a"), (body, "b"), (salted, "a"), (body, "a"))]

    assert asyncio.run(run()) == [0, 0, 0, 5]
    assert len(context.model.conversations) == 2, "nothing is kept of a salted one"
    context.model.encoder.close()


def test_a_body_that_differs_in_the_last_byte_of_the_beginning_is_read_as_a_whole(tmp_path: Path) -> None:
    context = context_of(tmp_path, DEMO)
    messages = [{"role": "user", "content": f"{index}" + "x" * 1500} for index in range(8)]

    async def run() -> None:
        await read(context, json.dumps({"model": "m", "messages": messages}).encode())
        other = [*messages[:-1], {"role": "user", "content": messages[-1]["content"][:-1] + "y"}]
        found = await read(context, json.dumps({"model": "m", "messages": [*other, messages[0]]}).encode())
        assert unread(found) == 0
        assert not isinstance(found, str)
        assert found.encoding is not None
        assert found.encoding.num_known_tokens > 9000, "pieces of the prompt are known all the same"

    asyncio.run(run())
    context.model.encoder.close()


def test_limits_count_messages_that_are_not_read(tmp_path: Path) -> None:
    context = context_of(tmp_path, DEMO, max_messages=9)
    messages = [{"role": "user", "content": f"{index}" + "x" * 1500} for index in range(8)]

    async def run() -> list[ParsedRequest | str]:
        return [
            await read(context, json.dumps({"model": "m", "messages": messages + messages[:more]}).encode())
            for more in range(3)
        ]

    first, second, third = asyncio.run(run())
    assert (unread(first), unread(second)) == (0, 5)
    assert third == "RequestError: messages has 10 entries; at most 9 are taken"
    context.model.encoder.close()


@pytest.mark.parametrize(
    ("body", "spans"),
    [
        (b'{"messages": [{"a": [{}]} , {}]}', [b'{"a": [{}]}', b"{}"]),
        (b'{"x": {"messages": [{}]}, "messages":[{"b":"]}\\""}]}', [b'{"b":"]}\\""}']),
        (b'{"messages": [], "messages" : []}', None),
        (b'{"mess\\u0061ges": [{}], "messages": [{}]}', None),
        (b'{"messages": [{}], "messages"' + b" " * 100 + b": 1}", None),
        (b'{"messages": ["a"]}', None),
        (b'{"messages": "a"}', None),
    ],
)
def test_messages_are_found_in_a_body(body: bytes, spans: list[bytes] | None) -> None:
    found = MessageSpans.find(body)
    told = None if found is None else [body[a:b] for a, b in zip(found.starts, found.ends, strict=True)]
    assert told == spans


def test_entries_are_bounded() -> None:
    beginning = KnownBeginning(9, CutBeginning((), (), b"x" * 500), 1, b"", NOTHING_SEEN)
    entry = KnownConversation(3000, 100, 200, 6, {"call": ""}, beginning)
    known = KnownConversations(10 * entry.memory_bytes, min_body_bytes=0)
    bodies = [f"{number:04}".encode() * 1000 for number in range(30)]
    for body in bodies:
        known.add(body, BodyDigest(body), UNSCOPED, "chat", entry)
    assert (len(known), known.num_bytes) == (10, 10 * entry.memory_bytes)
    assert [known.find(body, BodyDigest(body), UNSCOPED, "chat") is not None for body in bodies] == [False] * 20 + [
        True
    ] * 10
    alike = KnownConversations(2**30, min_body_bytes=0)
    for number in range(2 * MAX_ALIKE):
        body = b"x" * 2000 + f"{number:04}".encode() * 1000
        alike.add(body, BodyDigest(body), UNSCOPED, "chat", entry)
    assert len(alike) == MAX_ALIKE


def test_looking_for_a_conversation_reads_a_bounded_number_of_bytes() -> None:
    """An agent's messages may all end alike, so that only digests tell its conversations apart, in the event loop."""
    num_read: list[int] = []

    class Noted(BodyDigest):
        def of_first(self, num_bytes: int) -> bytes:
            num_read.append(num_bytes)
            return super().of_first(num_bytes)

    beginning = KnownBeginning(9, CutBeginning((), (), b""), 1, b"", NOTHING_SEEN)
    known = KnownConversations(2**30)
    body = b"x" * MAX_BODY_BYTES
    for number in range(MAX_ALIKE):
        entry = KnownConversation(len(body) // 2 + number, 100, 200, 6, {}, beginning)
        other = body[:2000] + b"y" + body[2001:]
        known.add(other, BodyDigest(other), UNSCOPED, "chat", entry)
    assert known.find(body, Noted(body), UNSCOPED, "chat") is None
    assert 1 < len(num_read) < MAX_ALIKE
    assert sum(num_read) < 3 * MAX_BODY_BYTES


@pytest.mark.parametrize("num_bytes", [MIN_BODY_BYTES - 1, MAX_BODY_BYTES + 1])
def test_neither_short_nor_very_long_bodies_are_kept(num_bytes: int) -> None:
    body = b"x" * (num_bytes + 5)
    beginning = KnownBeginning(9, CutBeginning((), (), b""), 1, b"", NOTHING_SEEN)
    entry = KnownConversation(num_bytes, 100, 200, 6, {}, beginning)
    known = KnownConversations(2**30)
    known.add(body, BodyDigest(body), UNSCOPED, "chat", entry)
    assert len(known) == known.num_bytes == 0
