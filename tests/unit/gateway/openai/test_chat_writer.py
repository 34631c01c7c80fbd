"""A chat answer written whole, and choices of one in the order in which a stream begins them."""

from typing import cast

import orjson
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from tandem.core.reasoning import Reasoning, ReasoningState
from tandem.core.types import FinishReason
from tandem.gateway.openai.chat_writer import ChatWriter
from tandem.gateway.openai.envelope import Envelope
from tandem.gateway.openai.fields import ChatBody
from tandem.gateway.parsing.thinking_parser import ThinkingParser
from tandem.gateway.parts import PlainParser
from tandem.gateway.request import ChoiceResult
from tandem.rpc.messages import ModelInfo
from tandem.text.tokenizer import Tokenizer
from tests.helpers.outputs import output_of

INFO = ModelInfo(name="m", fingerprint="f", max_model_len=4096, vocab_size=256, block_size=16)
CHAT = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})


@pytest.mark.parametrize("reasoning", [None, ReasoningState(Reasoning((1,), (2,)))])
def test_thoughts_are_shown_whether_or_not_tokens_tell_of_them(reasoning: ReasoningState | None) -> None:
    parser = ThinkingParser("<think>", "</think>", PlainParser(), is_open=False)
    result = ChoiceResult(4, keep=True, parser=parser, reasoning=reasoning)
    result.add(result.read(output_of(0, (1, 5, 2, 6), "<think>hm</think>yes", finish_reason=FinishReason.STOP)))
    writer = ChatWriter(Envelope.of(CHAT, "a", "chat.completion", INFO, [result], 1), CHAT, cast(Tokenizer, None), [1])
    message = orjson.loads(writer.whole())["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("hm", "hm", "yes")


def test_choices_begin_in_order_whichever_has_the_first_token() -> None:
    results = [ChoiceResult(4, keep=False) for _ in range(3)]
    envelope = Envelope.of(CHAT, "a", "chat.completion", INFO, results, 3)
    writer = ChatWriter(envelope, CHAT, cast(Tokenizer, None), [1])
    accumulated = ChatCompletionStreamState()  # NOTE: it finds choices by their place among those that have begun
    for index in (2, 0, 1):
        update = results[index].read(output_of(index, (5,), f"text {index}", finish_reason=FinishReason.STOP))
        for text in writer.chunk([update]).decode().split("\n\n")[:-1]:
            accumulated.handle_chunk(ChatCompletionChunk.model_validate_json(text.removeprefix("data: ")))
    choices = accumulated.get_final_completion().choices
    assert [choice.message.content for choice in choices] == ["text 0", "text 1", "text 2"]
    assert [choice.message.role for choice in choices] == ["assistant"] * 3
