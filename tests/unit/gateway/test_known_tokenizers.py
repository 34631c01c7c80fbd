"""Known conversations have the token ids and block hashes of the whole with every kind of tokenizer, template and API.

The slow run compares 100,000 conversations, nine of ten with short texts only: some 80 minutes of a core.
"""

import asyncio
import random
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.hashing import extend_hashes
from tandem.gateway.dialect import DialectContext, RequestLimits
from tandem.gateway.known_conversations import KnownConversations
from tandem.gateway.known_prefixes import KnownPrefixes
from tandem.gateway.model import ServedModel
from tandem.gateway.prompt_encoder import ChainRoot, EncodedPrompt, PromptEncoder
from tandem.rpc.messages import ModelInfo
from tandem.text.cuts import CutRule
from tests.helpers.chat_tokenizers import CHAT_TOKENIZERS, write_chat_tokenizer
from tests.unit.gateway import test_known_apis as apis
from tests.unit.gateway import test_known_conversations as conversations

TEMPLATES = conversations.RESUMED | conversations.WHOLE | apis.TEMPLATES
WORDS = [
    *conversations.WORDS,
    *("lazy dogs", "  <mask> ", "<after>  ", "<|im_start|>assistant\n", "<think>", "</think>", "<|endoftext|>"),
    *("\u0301", "\u200d", "🏽", "\u1100\u1161", "ﬁ", "Ǆ", "\x00", "\u2028", "\ufeff", "\u202e", "\t ", " ", "x" * 50),
]
NUM_WORDS = conversations.NUM_WORDS
INFO = replace(conversations.INFO, vocab_size=5000)
Contexts = tuple[DialectContext, DialectContext, DialectContext]


class CheckedEncoder(PromptEncoder):
    """Compares the hashes of every prompt with those of its token ids."""

    async def encode_chat(self, text: str, max_model_len: int, root: ChainRoot, **options: Any) -> EncodedPrompt:
        prompt = await super().encode_chat(text, max_model_len, root, **options)
        hashes: list[bytes] = []
        extend_hashes(root.digest, hashes, array("I", prompt.token_ids), root.block_size)
        assert prompt.hashes == b"".join(hashes)
        return prompt


def context_of(path: Path, kind: str, template: str, max_known_bytes: int) -> DialectContext:
    path.mkdir()
    write_chat_tokenizer(path, kind)
    (path / "chat_template.jinja").write_text(template)
    model = ServedModel.load(str(path), "m", 0)
    model.encoder.close()
    rule = CutRule.find(model.tokenizer, model.template)
    assert rule.token is not None, rule.reason
    rule = rule if max_known_bytes else CutRule(None, "the whole is what others are compared with")
    encoder = CheckedEncoder(model.tokenizer, rule, KnownPrefixes(max_known_bytes))
    model = replace(model, encoder=encoder, conversations=KnownConversations(max_known_bytes // 8, min_body_bytes=0))

    async def info() -> ModelInfo:
        return INFO

    return DialectContext(model, SimpleNamespace(get=info), RequestLimits(8, 64))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CHAT_TOKENIZERS)
@pytest.mark.parametrize(
    "num_talks", [3, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(12 * 3600)])]
)
def test_equals_the_whole(tmp_path: Path, kind: str, num_talks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large cache and in one that forgets all the time; the bodies of one conversation in turn, or all at once."""
    monkeypatch.setattr(conversations, "WORDS", WORDS)
    rng = random.Random(kind)
    made: dict[str, Contexts] = {}

    def contexts(name: str) -> Contexts:
        if name not in made:
            sizes = {"plain": 0, "known": 2**26, "few": 60_000}
            plain, known, few = (
                context_of(tmp_path / f"{len(made)} {size}", kind, TEMPLATES[name], sizes[size]) for size in sizes
            )
            made[name] = plain, known, few
        return made[name]

    async def run() -> int:
        num_unread = 0
        names = rng.sample(list(TEMPLATES), k=len(TEMPLATES) if num_talks > 3 else 2)
        for _ in range(num_talks):
            is_short = num_talks > 3 and rng.random() < 0.9
            monkeypatch.setattr(conversations, "NUM_WORDS", NUM_WORDS[:-1] if is_short else NUM_WORDS)
            name, api = rng.choice(names), rng.choice(["edited", *apis.APIS])
            plain, *caches = contexts(name)
            cached = rng.choice(caches)
            if api == "edited":
                api, bodies = "chat", conversations.grown(rng)
            else:
                bodies = apis.bodies(rng, api, has_tools=name == "demo")
            wanted = [apis.told(await apis.read(api, plain, body)) for body in bodies]
            if rng.random() < 0.2:
                found = await asyncio.gather(*(apis.read(api, cached, body) for body in bodies))
            else:
                found = [await apis.read(api, cached, body) for body in bodies]
            assert [apis.told(each) for each in found] == wanted
            num_unread += sum(
                each.encoding.num_unread_messages for each in found if not isinstance(each, str) and each.encoding
            )
        return num_unread

    assert asyncio.run(run()) > 0 or num_talks == 3
    for each in made.values():
        for context in each:
            context.model.encoder.close()
