"""A text may be cut only where its parts give the tokens of the whole."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from tandem.text.chat_template import ChatTemplate
from tandem.text.cuts import CutRule, cut_tokens
from tandem.text.tokenizer import Tokenizer
from tests.unit.text import checkpoints
from tests.unit.text.templates import CHATML

BUILDERS: dict[str, Callable[[Path], Path]] = {
    "byte-level": checkpoints.byte_level,
    "prefix space": checkpoints.sentencepiece,
    "no prefix space": lambda path: checkpoints.sentencepiece(path, strips=False),
}
FRAGMENTS = [
    *(
        "a",
        "Z",
        "7",
        "_",
        " ",
        "  ",
        "\n",
        "\t",
        "é",
        "e\u0301",
        "👩\u200d👩",
        "\u200d",
        "漢",
        "▁",
        "<",
        "|",
        ">",
        "<|",
        "|>",
    ),
    *("<|user|>", "<tool>", "<mask>", "lazy dogs", "lazy", "<s>", "</s>", "<|begin|>", "<|user", "user|>", "Hello "),
]


def backend(*added: AddedToken) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_tokens(list(added))
    return made


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("num_texts", [300, pytest.param(100_000, marks=pytest.mark.slow)])
def test_parts_give_the_tokens_of_the_whole(tmp_path: Path, builder: str, num_texts: int) -> None:
    tokenizer = Tokenizer.load(BUILDERS[builder](tmp_path))
    tokens = sorted(cut_tokens(tokenizer.backend))
    assert {"<|user|>", "<tool>"} <= set(tokens)
    assert not {"<mask>", "lazy dogs"} & set(tokens)
    rng = random.Random(num_texts)
    for _ in range(num_texts):
        before, after = ("".join(rng.choices(FRAGMENTS, k=rng.randrange(8))) for _ in range(2))
        after = rng.choice(tokens) + after
        parts = tokenizer.encode_each([before, after])
        assert tokenizer.encode(before + after, add_special_tokens=False) == parts[0] + parts[1], (before, after)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ((AddedToken("x<a>", normalized=False),), "contains it"),
        ((AddedToken("<a>>", normalized=False),), "continues it"),
        ((AddedToken("x<", normalized=False),), "overlaps its beginning"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_token_that_another_may_swallow_is_no_cut(others: tuple[AddedToken, ...], why: str) -> None:
    alone = AddedToken("<a>", normalized=False)
    assert cut_tokens(backend(alone)) == {"<a>"}
    assert "<a>" not in cut_tokens(backend(alone, *others)), why


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<a>", normalized=True),
        AddedToken("<a>", normalized=False, single_word=True),
        AddedToken("<a>", normalized=False, lstrip=True),
        AddedToken("word", normalized=False),
        AddedToken("__", normalized=False),
    ],
    ids=["normalised", "single word", "takes space before it", "begins as a word", "overlaps itself"],
)
def test_a_token_that_its_surroundings_may_change_is_no_cut(token: AddedToken) -> None:
    assert cut_tokens(backend(token)) == frozenset()


def test_special_tokens_that_are_read_as_text_are_no_cuts() -> None:
    made = backend(AddedToken("<a>", normalized=False, special=True), AddedToken("<b>", normalized=False))
    made.encode_special_tokens = True
    assert cut_tokens(made) == {"<b>"}


def test_random_encoding_has_no_cuts() -> None:
    made = backend(AddedToken("<a>", normalized=False))
    made.model.dropout = 0.1
    assert cut_tokens(made) == frozenset()


def test_the_rule_is_the_token_that_begins_a_chats_messages() -> None:
    demo = Path("demo/tandem-demo")
    assert CutRule.find(Tokenizer.load(demo), ChatTemplate.find(demo)) == CutRule("<|im_start|>")


def test_a_model_without_a_cut_says_why(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoints.byte_level(tmp_path))
    assert "no chat template" in CutRule.find(tokenizer, None).reason
    refusing = ChatTemplate({"default": "{{ raise_exception('no') }}"}, {})
    assert "refuses" in CutRule.find(tokenizer, refusing).reason
    assert "no added token" in CutRule.find(tokenizer, ChatTemplate({"default": CHATML}, {})).reason
