"""Owns turning the corpus into rows of token ids with labels, in an order fixed by the seed.

A label of `IGNORED` is not learnt: that is everything a user or system says, and padding. A row of chats starts with
the beginning of a chat, as at inference, and every chat is tokenised piece by piece at the end of its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.demo_corpus import Conversation, Document
from tools.demo_questions import Turn
from tools.demo_tokenizer import END_OF_TEXT

IGNORED = -100
NUM_LOOKAHEAD = 32


@dataclass(frozen=True)
class Sample:
    """Token ids of one text and what is learnt of it; both lists have the same length."""

    ids: list[int]
    labels: list[int]

    def cut(self, length: int) -> Sample:
        return Sample(self.ids[:length], self.labels[:length])


def encode_document(tokenizer: PreTrainedTokenizerFast, document: Document) -> Sample:
    """The whole file and an end-of-text token; everything is learnt."""
    ids = tokenizer.encode(document.text + END_OF_TEXT)
    return Sample(ids, ids)


def encode_conversation(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Sample:
    """The template's exact rendering and an end-of-text token; only assistant turns and their end are learnt."""
    ids: list[int] = []
    labels: list[int] = []
    rendered = ""
    for index, turn in enumerate(conversation.turns):
        if turn.role != "assistant":
            continue
        prompt = render(tokenizer, conversation.turns[:index], add_generation_prompt=True)
        assert prompt.startswith(rendered)
        answer = f"{turn.content}{tokenizer.eos_token}"
        prompt_ids, answer_ids = tokenizer.encode(prompt.removeprefix(rendered)), tokenizer.encode(answer)
        ids += prompt_ids + answer_ids
        labels += [IGNORED] * len(prompt_ids) + answer_ids
        rendered = prompt + answer
    end = tokenizer.encode("\n" + END_OF_TEXT)
    return Sample(ids + end, labels + [IGNORED] * len(end))


def render(tokenizer: PreTrainedTokenizerFast, turns: Sequence[Turn], *, add_generation_prompt: bool) -> str:
    """The chat template applied to `turns`, as text."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert isinstance(text, str)
    return text


@dataclass
class DocumentRows:
    """Endless windows of `length` consecutive tokens; an epoch visits every window of the joined files once."""

    samples: Sequence[Sample]
    order: random.Random
    length: int
    stream: list[int] = field(init=False)
    starts: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.stream = [token for sample in self.samples for token in sample.ids]

    def next_row(self) -> Sample:
        """The next window; each epoch starts its windows at another offset."""
        if not self.starts:
            phase = self.order.randrange(self.length)
            self.starts = list(range(phase, len(self.stream) - self.length, self.length))
            self.order.shuffle(self.starts)
        start = self.starts.pop()
        ids = self.stream[start : start + self.length]
        return Sample(ids, ids)


@dataclass
class ConversationRows:
    """Endless rows of whole chats packed behind one another; what does not fit waits for a later row."""

    samples: Sequence[Sample]
    order: random.Random
    length: int
    pending: list[Sample] = field(init=False, default_factory=list)

    def next_row(self) -> Sample:
        """One row of at most `length` tokens; only a chat that is alone in its row is ever cut."""
        row = self._take(0).cut(self.length)
        while (index := self._fitting(self.length - len(row.ids))) is not None:
            sample = self._take(index)
            row = Sample(row.ids + sample.ids, row.labels + sample.labels)
        return row

    def _fitting(self, room: int) -> int | None:
        fitting = (i for i, sample in enumerate(self.pending[:NUM_LOOKAHEAD]) if len(sample.ids) <= room)
        return next(fitting, None)

    def _take(self, index: int) -> Sample:
        if len(self.pending) <= NUM_LOOKAHEAD:
            epoch = list(self.samples)
            self.order.shuffle(epoch)
            self.pending += epoch
        return self.pending.pop(index)


def batch_tensors(rows: Sequence[Sample], length: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-token labels, padded to `length` tokens a row: two int64 tensors [num_rows, length - 1]."""
    ids = torch.tensor([row.ids + [0] * (length - len(row.ids)) for row in rows])
    labels = torch.tensor([row.labels + [IGNORED] * (length - len(row.labels)) for row in rows])
    return ids[:, :-1], labels[:, 1:]


def evaluation_rows(samples: Sequence[Sample], length: int) -> Iterator[Sample]:
    """Every sample cut into rows of at most `length` + 1 tokens, each token predicted at most once."""
    for sample in samples:
        for start in range(0, len(sample.ids) - 1, length):
            end = start + length + 1
            yield Sample(sample.ids[start:end], sample.labels[start:end])
