"""Nothing is shown that was not judged; all that passes is shown, in order, however it was cut."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.types import FinishReason, TokenLogprobs
from tandem.gateway.moderation.base import ModerationVerdict, Moderator
from tandem.gateway.moderation.blocklist import Blocklist
from tandem.gateway.moderation.moderated import ModeratedAnswer
from tandem.gateway.parts import CallArguments, CallBegun, ContentText, Part, Thought
from tandem.gateway.request import ChoiceUpdate


def told(moderator: Moderator, pieces: Sequence[Sequence[Part]]) -> tuple[list[Part], bool]:
    """The parts that came through, and whether it was stopped."""

    async def run() -> tuple[list[Part], bool]:
        answer, shown = ModeratedAnswer(moderator), list[Part]()
        for index, parts in enumerate(pieces):
            reason = FinishReason.STOP if index == len(pieces) - 1 else None
            update = await answer.pass_on(ChoiceUpdate(0, parts, (), finish_reason=reason))
            shown += update.parts
            if answer.is_stopped:
                break
        return shown, answer.is_stopped

    return asyncio.run(run())


def text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if not isinstance(part, CallBegun))


@given(st.lists(st.text("abd .w", max_size=6), max_size=12), st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_a_text_is_stopped_exactly_when_the_whole_of_it_would_be(texts: list[str], kinds: list[int]) -> None:
    blocklist = Blocklist(["bad", "a b"])
    makers = (ContentText, Thought, lambda piece: CallArguments(0, piece))
    pieces = [[makers[kind](piece)] for piece, kind in zip(texts, kinds, strict=False)] + [[]]
    whole = "".join(texts)
    shown, is_stopped = told(blocklist, pieces)
    assert is_stopped is (not asyncio.run(blocklist.judge(whole)).passes)
    assert whole.startswith(text(shown))
    if is_stopped:
        assert asyncio.run(blocklist.judge(text(shown), may_go_on=True)).passes
    else:
        assert text(shown) == whole


class Listener:
    """Lets everything pass and notes it."""

    window = 1
    overlap = 0

    def __init__(self) -> None:
        self.judged: list[tuple[str, int]] = []

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> ModerationVerdict:
        self.judged.append((text, num_judged))
        return ModerationVerdict()

    async def close(self) -> None: ...


def test_a_moderator_without_an_overlap_judges_each_piece_once() -> None:
    """Regression: it was asked about the whole answer again with every piece."""
    listener = Listener()
    shown, _ = told(listener, [[ContentText(piece)] for piece in ("one ", "two ", "three")])
    assert text(shown) == "one two three"
    assert listener.judged == [("one ", 0), ("two ", 0), ("three", 0)]


def scored(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, ())


@pytest.mark.parametrize("word", ["secret", "public"])
@pytest.mark.parametrize("lag", [0, 1])
def test_tokens_tell_nothing_that_the_text_may_not(word: str, lag: int) -> None:
    """`lag`: pieces by which the text comes after its tokens."""
    words = ["The ", "password ", "is ", "a ", word, " of", " ours"]

    async def run() -> tuple[str, list[int], list[int], bool]:
        answer, text, ids, logprobs = ModeratedAnswer(Blocklist(["secret"])), "", list[int](), list[int]()
        for index in range(len(words)):
            is_last = index == len(words) - 1
            said = words[max(0, index - lag) : len(words) if is_last else max(0, index - lag) + (index >= lag)]
            update = await answer.pass_on(
                ChoiceUpdate(
                    0,
                    [ContentText(piece) for piece in said],
                    (index,),
                    (scored(index),),
                    finish_reason=FinishReason.STOP if is_last else None,
                )
            )
            text += update.text
            ids += update.token_ids
            logprobs += [entry.token_id for entry in update.logprobs or ()]
            if answer.is_stopped:
                break
        return text, ids, logprobs, answer.is_stopped

    text, ids, logprobs, is_stopped = asyncio.run(run())
    assert is_stopped is (word == "secret")
    assert ids == logprobs == ([] if is_stopped else list(range(len(words))))
    assert "".join(words).startswith(text)
    assert is_stopped or text == "".join(words)


def test_parts_keep_their_order_and_kind() -> None:
    call: list[Part] = [CallBegun(0, "id", "f"), CallArguments(0, "{}")]
    pieces: list[list[Part]] = [[Thought("hm"), ContentText("one")], call, []]
    shown, is_stopped = told(Blocklist(["never"]), pieces)
    assert not is_stopped
    merged: list[Part] = []
    for part in shown:
        previous = merged[-1] if merged else None
        if isinstance(part, ContentText) and isinstance(previous, ContentText):
            merged[-1] = ContentText(previous.text + part.text)
        elif isinstance(part, Thought) and isinstance(previous, Thought):
            merged[-1] = Thought(previous.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(previous, CallArguments):
            merged[-1] = CallArguments(0, previous.text + part.text)
        else:
            merged.append(part)
    assert merged == [Thought("hm"), ContentText("one"), CallBegun(0, "id", "f"), CallArguments(0, "{}")]


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_word_across_two_pieces_is_found_before_any_of_it_is_shown(cut: int) -> None:
    whole = "this is a secret of ours"
    pieces = [[ContentText(whole[: 5 + cut])], [ContentText(whole[5 + cut :])], []]
    shown, is_stopped = told(Blocklist(["secret"]), pieces)
    assert is_stopped
    assert "s" not in text(shown)[10:]
