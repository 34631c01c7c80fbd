"""A conversation's next turn is encoded from its longest known beginning, with the tokens and hashes of the whole."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.scope import CacheScope
from tandem.gateway.errors import RequestError
from tandem.gateway.known_prefixes import MIN_PIECE_BYTES, CutPrompt, KnownPrefixes, Piece
from tandem.gateway.prompt_encoder import ChainRoot, EncodedPrompt, PromptEncoder
from tandem.text.cuts import CutRule
from tandem.text.tokenizer import Tokenizer
from tests.unit.text import checkpoints

BLOCK_SIZE = 16
TOKEN = "<|user|>"
WORDS = [
    "tool ",
    "<tool>",
    TOKEN,
    "<mask>",
    " ",
    "\n\n",
    "lazy dogs",
    "é",
    "e\u0301",
    "👩\u200d👩",
    "漢字 ",
    "x",
    "<|",
    "▁",
]
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "byte-level": checkpoints.byte_level,
    "prefix space": checkpoints.sentencepiece,
}


def root_of(salt: str = "") -> ChainRoot:
    digest = root_hash(CacheScope(salt=salt), model_fingerprint="f" * 32, block_size=BLOCK_SIZE)
    return ChainRoot(digest, BLOCK_SIZE)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(checkpoints.byte_level(tmp_path))


@pytest.fixture
def encoder(tokenizer: Tokenizer) -> Iterator[PromptEncoder]:
    made = PromptEncoder(tokenizer, CutRule(TOKEN))
    yield made
    made.close()


async def encode(encoder: PromptEncoder, text: str, salt: str = "", max_model_len: int = 10**6) -> EncodedPrompt:
    return await encoder.encode_chat(text, max_model_len, root_of(salt), add_special_tokens=False)


def turns(rng: random.Random, num_turns: int) -> list[str]:
    return ["".join(rng.choices(WORDS, k=rng.choice((0, 1, 40, 400)))) for _ in range(num_turns)]


def written(messages: list[str]) -> str:
    return "".join(f"{TOKEN}{message}" for message in messages)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("num_talks", [25, pytest.param(2_000, marks=pytest.mark.slow)])
def test_equals_the_whole_however_a_conversation_goes_on(tmp_path: Path, builder: str, num_talks: int) -> None:
    """Grown turn by turn, and edited in the middle, in a cache so small that pieces are lost all the time."""
    tokenizer = Tokenizer.load(BUILDERS[builder](tmp_path))
    rng = random.Random(num_talks)

    async def run() -> int:
        encoder = PromptEncoder(tokenizer, CutRule(TOKEN), KnownPrefixes(64 * 1024))
        num_known = 0
        for _ in range(num_talks):
            messages = turns(rng, 4)
            for _ in range(8):
                messages += turns(rng, rng.randrange(3))
                if rng.random() < 0.3:
                    messages[rng.randrange(len(messages))] = turns(rng, 1)[0]
                text = written(messages)
                found = await encode(encoder, text)
                whole = tokenizer.encode(text, add_special_tokens=False)
                hashes: list[bytes] = []
                extend_hashes(root_of().digest, hashes, whole, BLOCK_SIZE)
                assert found.token_ids.tolist() == whole
                assert found.hashes == b"".join(hashes)
                assert found.ends[-1] == len(whole)
                num_known += found.counts.num_known_tokens
        encoder.close()
        return num_known

    assert asyncio.run(run()) > 0


def test_only_what_is_new_is_encoded(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    each = Tokenizer.encode_each

    def noted(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        sizes.append(sum(map(len, texts)))
        return each(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_each", noted)
    before = written(["hello " * 400] * 50)

    async def run() -> EncodedPrompt:
        await encode(encoder, before)
        sizes.clear()
        return await encode(encoder, f"{before}{TOKEN}one more")

    found = asyncio.run(run())
    assert sum(sizes) < 2 * 2400 + MIN_PIECE_BYTES
    assert found.counts.num_known_tokens / found.counts.num_tokens > 0.97
    assert found.counts.num_known_blocks == found.counts.num_known_tokens // BLOCK_SIZE


def test_tenants_find_nothing_of_each_other(encoder: PromptEncoder) -> None:
    text = written(["hello " * 400] * 4)

    async def run() -> list[int]:
        found = [await encode(encoder, text, salt) for salt in ("a", "a", "b")]
        return [prompt.counts.num_known_tokens for prompt in found]

    first, again, other = asyncio.run(run())
    assert (first, other) == (0, 0)
    assert again > 0


def test_a_prefix_that_differs_in_its_last_byte_is_not_taken() -> None:
    cuts = [CutPrompt.of("x" * 1200 + last + TOKEN + "more", TOKEN, b"root") for last in "ab"]
    assert [len(cut.keys) for cut in cuts] == [1, 1]
    assert cuts[0].keys != cuts[1].keys
    assert b"".join(cuts[0].pieces).decode() == "x" * 1200 + "a" + TOKEN + "more"


def test_places_are_counted_as_in_the_whole(encoder: PromptEncoder, tokenizer: Tokenizer) -> None:
    text = written(turns(random.Random(5), 30))
    ends = tokenizer.token_ends(text, add_special_tokens=False)
    places = [0, 1, len(text) // 3, len(text) - 1, len(text), *(text.index(TOKEN, at) for at in (500, 2000, 4000))]

    async def run() -> list[int]:
        prompt = await encode(encoder, text)
        assert len(prompt.pieces) > 2
        return await encoder.count_tokens(prompt, places, add_special_tokens=False)

    assert asyncio.run(run()) == [sum(end <= place for end in ends) for place in places]


@pytest.mark.parametrize("rule", [CutRule(TOKEN), CutRule(None, "none")], ids=["cut", "whole"])
def test_a_known_prompt_is_refused_where_it_does_not_fit(tokenizer: Tokenizer, rule: CutRule) -> None:
    text = written(["hello " * 400] * 4)

    async def run() -> None:
        encoder = PromptEncoder(tokenizer, rule)
        num_tokens = len((await encode(encoder, text)).token_ids)
        assert len((await encode(encoder, text, max_model_len=num_tokens + 1)).token_ids) == num_tokens
        with pytest.raises(RequestError, match=rf"too long: {num_tokens} tokens > {num_tokens - 1} maximum"):
            await encode(encoder, text, max_model_len=num_tokens)
        encoder.close()

    asyncio.run(run())


def test_the_least_recently_used_go_first_and_never_the_beginning_of_a_prompt() -> None:
    piece = Piece(b"\0" * 400, b"\0" * 32)
    known = KnownPrefixes(5 * piece.num_bytes)
    old, new = [b"o1", b"o2", b"o3"], [b"n1", b"n2", b"n3"]
    known.add(old, [piece] * 3)
    known.add(new, [piece] * 3)
    assert (len(known), known.num_bytes) == (5, 5 * piece.num_bytes)
    assert [len(known.leading(keys)) for keys in (old, new)] == [2, 3]
    known.add([b"m1", b"m2", b"m3", b"m4"], [piece] * 4)
    assert [len(known.leading(keys)) for keys in (old, new)] == [0, 1]
