"""Decoders are taken apart exactly, or refused."""

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.text.decoder_rules import DecoderRules
from tandem.text.detokenizer import IncrementalDetokenizer
from tandem.text.tokenizer import Tokenizer

REPLACE = decoders.Replace("▁", " ")
SUPPORTED: list[Any] = [
    None,
    decoders.ByteLevel(),
    decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    decoders.Metaspace(prepend_scheme="always"),
    decoders.Metaspace(prepend_scheme="first"),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()]),
    decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
]
VOCAB = {token: token_id for token_id, token in enumerate(["a", "▁", "▁b", "▁▁c", "é", "Ġd", " e", "<0x41>", "你"])}


@pytest.mark.parametrize("decoder", SUPPORTED, ids=str)
def test_joined_pieces_are_the_whole_text(decoder: Any) -> None:
    backend = Backend(models.WordLevel(VOCAB, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    rules = DecoderRules.from_json(json.loads(backend.to_str())["decoder"])
    tokenizer = Tokenizer(backend, rules, {})
    rng = random.Random(3)
    for _ in range(400):
        ids = rng.choices(range(len(VOCAB)), k=rng.randrange(8))
        cut = rng.randrange(len(ids) + 1)
        if "\ufffd" in backend.decode(ids[:cut]):
            cut = 0
        before = backend.decode(ids[:cut])
        stream = IncrementalDetokenizer(tokenizer, ids[:cut])
        after = "".join([*(stream.add(token_id) for token_id in ids[cut:]), stream.flush()])
        assert before + after == backend.decode(ids)


def test_every_byte_level_character_is_known() -> None:
    rules = DecoderRules(byte_level=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(rules.piece(character) for character in alphabet) == [bytes([byte]) for byte in range(256)]
    for text in ("\x00 \n~é\x7f", "你🙂"):
        [(encoded, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert rules.piece(encoded) == text.encode()


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC"},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}]},
        {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "ByteFallback"}]},
    ],
    ids=str,
)
def test_what_cannot_be_streamed_is_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="supported"):
        DecoderRules.from_json(decoder)


@pytest.mark.parametrize("decoder", [{}, {"type": 3}, {"type": "Sequence", "decoders": ["Fuse"]}], ids=str)
def test_a_decoder_of_the_wrong_shape_is_corrupt(decoder: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError):
        DecoderRules.from_json(decoder)
