"""Usage in every chunk of a stream: exact, and at a cost that does not grow with its choices."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, cast, overload

import orjson
import pytest

from tandem.core.output import RequestOutput
from tandem.core.pins import Pin
from tandem.core.reasoning import Reasoning, ReasoningState
from tandem.core.types import FinishReason
from tandem.gateway.openai.chat_writer import ChatWriter
from tandem.gateway.openai.completions import CompletionWriter, EchoedPrompt
from tandem.gateway.openai.envelope import Envelope
from tandem.gateway.openai.fields import ChatBody, CompletionBody
from tandem.gateway.parts import ContentText
from tandem.gateway.prompt_split import LivePins
from tandem.gateway.request import ChoiceResult
from tandem.rpc.messages import ModelInfo
from tandem.text.tokenizer import Tokenizer
from tests.helpers.outputs import output_of

INFO = ModelInfo(name="m", fingerprint="f", max_model_len=4096, vocab_size=256, block_size=16)
NO_TOKENIZER = cast(Tokenizer, None)  # no logprobs are asked for
STREAM = {"model": "m", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Watched(Sequence[ChoiceResult]):
    """Results that note which of them are looked at."""

    def __init__(self, results: list[ChoiceResult]) -> None:
        self._results = results
        self.seen: set[int] = set()

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[ChoiceResult]:
        self.seen |= set(range(len(self)))
        return iter(self._results)

    @overload
    def __getitem__(self, index: int) -> ChoiceResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChoiceResult]: ...
    def __getitem__(self, index: int | slice) -> ChoiceResult | list[ChoiceResult]:
        at = range(len(self))[index]
        self.seen |= {at} if isinstance(at, int) else set(at)
        return self._results[index]


def writer_of(kind: str, results: Sequence[ChoiceResult], num_per_prompt: int) -> ChatWriter | CompletionWriter:
    if kind == "chat":
        chat = ChatBody.model_validate(STREAM | {"messages": [{"role": "user", "content": "hi"}]})
        envelope = Envelope.of(chat, "a", "chat.completion", INFO, results, num_per_prompt)
        return ChatWriter(envelope, chat, NO_TOKENIZER, [1])
    body = CompletionBody.model_validate(STREAM | {"prompt": "hi"})
    envelope = Envelope.of(body, "a", "text_completion", INFO, results, num_per_prompt)
    return CompletionWriter(envelope, body, NO_TOKENIZER, [EchoedPrompt("hi", [1], NO_TOKENIZER)] * len(results))


def expected_usage(results: list[ChoiceResult], num_per_prompt: int) -> dict[str, Any]:
    prompts = results[::num_per_prompt]
    num_prompt = sum(result.num_prompt_tokens for result in prompts)
    num_output = sum(result.num_output_tokens for result in results)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.split.num_read for result in prompts),
            "cache_write_tokens": sum(result.split.num_written for result in prompts),
        },
        "completion_tokens_details": {"reasoning_tokens": sum(result.num_reasoning_tokens for result in results)},
    }


def usages(frames: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(line[6:])["usage"] for line in frames.split(b"\n\n") if line.startswith(b"data: {")]


def news_of(rng: random.Random, index: int) -> RequestOutput:
    return output_of(
        index,
        tuple(rng.choices(range(9), k=rng.randint(1, 3))),
        "x",
        num_cached_tokens=rng.choice([0, 8, 32]),
        pins=rng.choice([None, (), (Pin(16, 60),)]),
        finish_reason=rng.choice([None, None, None, FinishReason.STOP]),
    )


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_of_a_batch_says_what_all_choices_used_up_to_it(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    num_per_prompt = rng.choice([1, 2, 3])
    results = [
        ChoiceResult(40, False, live=LivePins(8, 0), reasoning=ReasoningState(Reasoning((), (2,), is_open=True)))
        for _ in range(num_per_prompt * rng.randint(1, 4))
    ]
    writer = writer_of(kind, results, num_per_prompt)
    for _ in range(12):
        batch = [news_of(rng, rng.randrange(len(results))) for _ in range(rng.randint(1, 5))]
        updates = [results[output.index].read(output) for output in batch]
        said = usages(writer.chunk(updates))
        assert len(said) >= len(batch)
        assert all(usage == expected_usage(results, num_per_prompt) for usage in said)
    assert usages(writer.end()) == [expected_usage(results, num_per_prompt)]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_chunk_looks_at_the_choices_it_tells_of_alone(kind: str) -> None:
    results = Watched([ChoiceResult(4, False) for _ in range(256)])
    writer = writer_of(kind, results, 1)
    update = results[7].read(output_of(7, (1,), "x"))
    assert update.parts == [ContentText("x")]
    results.seen.clear()
    (usage, *_) = usages(writer.chunk([update]))
    assert usage["total_tokens"] == 4 * 256 + 1
    assert results.seen == {7}
