"""`langchain-anthropic`: invoke, stream, usage with its cache split, tools, structured output and thinking."""

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel, SecretStr

from tools.clients.checks import Checks, equal, holds

QUESTION = [SystemMessage("Be brief."), HumanMessage("What does os.path.join do?")]


class Answer(BaseModel):
    """Expected result of structured output."""

    is_python: bool
    digit: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


WEATHER = tool(get_weather)


def check_chat(checks: Checks, chat: ChatAnthropic) -> None:
    with checks.that("invoke, with usage"):
        answer = chat.invoke(QUESTION)
        holds(answer.content, "text")
        assert answer.usage_metadata is not None
        details = answer.usage_metadata["input_token_details"]
        holds(answer.usage_metadata["input_tokens"] >= details["cache_read"], "cached tokens are among the input")
    with checks.that("stream equals invoke, with usage"):
        total: AIMessageChunk | None = None
        for chunk in chat.stream(QUESTION):
            assert isinstance(chunk, AIMessageChunk)
            total = chunk if total is None else total + chunk
        assert total is not None
        equal(total.text, chat.invoke(QUESTION).text)
        holds(total.usage_metadata and total.usage_metadata["output_tokens"], "usage")
    with checks.that("a cached system prompt"):
        block: dict[str, Any] = {"type": "text", "text": "Be brief. " * 300, "cache_control": {"type": "ephemeral"}}
        usage = chat.invoke([SystemMessage([block]), *QUESTION[1:]]).usage_metadata
        assert usage is not None
        checks.notes["cache"] = usage


def check_structure(checks: Checks, chat: ChatAnthropic) -> None:
    with checks.that("bind_tools, any, and the result sent back"):
        called = chat.bind_tools([WEATHER], tool_choice="any").invoke(QUESTION)
        equal(called.tool_calls[0]["name"], "get_weather")
        result = WEATHER.invoke(called.tool_calls[0])
        holds(chat.bind_tools([WEATHER]).invoke([*QUESTION, called, result]).response_metadata, "an answer")
    with checks.that("bind_tools, streamed"):
        chunks = list(chat.bind_tools([WEATHER], tool_choice="any").stream(QUESTION))
        total = chunks[0]
        for chunk in chunks[1:]:
            total = total + chunk
        holds(total.tool_calls, "a call")
    for method in ("function_calling", "json_schema"):
        with checks.that(f"with_structured_output, {method}"):
            holds(isinstance(chat.with_structured_output(Answer, method=method).invoke(QUESTION), Answer), "an Answer")


def main() -> None:
    checks = Checks.from_arguments()
    chat = ChatAnthropic(
        base_url=checks.url,
        api_key=SecretStr("none"),
        model_name=checks.model,
        max_tokens_to_sample=200,
        temperature=0,
        max_retries=0,
    )
    check_chat(checks, chat)
    check_structure(checks, chat)
    checks.finish(["langchain-anthropic", "langchain-core"])


if __name__ == "__main__":
    main()
