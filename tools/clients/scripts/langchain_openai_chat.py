"""`langchain-openai`: invoke, stream, usage, tools and structured output, as its users write them."""

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
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


def check_chat(checks: Checks, chat: ChatOpenAI) -> None:
    with checks.that("invoke, with usage"):
        answer = chat.invoke(QUESTION)
        holds(answer.content, "text")
        holds(answer.usage_metadata and answer.usage_metadata["total_tokens"], "usage")
        equal(answer.response_metadata["model_name"], checks.model)
    with checks.that("stream equals invoke, with usage"):
        total: AIMessageChunk | None = None
        for chunk in chat.stream(QUESTION):
            assert isinstance(chunk, AIMessageChunk)
            total = chunk if total is None else total + chunk
        assert total is not None
        equal(total.content, chat.invoke(QUESTION).content)
        holds(total.usage_metadata and total.usage_metadata["output_tokens"], "usage")
    with checks.that("batch"):
        equal(len(chat.batch([QUESTION, QUESTION])), 2)


def check_structure(checks: Checks, chat: ChatOpenAI) -> None:
    with checks.that("bind_tools, any, and the result sent back"):
        called = chat.bind_tools([WEATHER], tool_choice="any").invoke(QUESTION)
        holds(called.tool_calls, "a call")
        equal(called.tool_calls[0]["name"], "get_weather")
        result = WEATHER.invoke(called.tool_calls[0])
        holds(chat.bind_tools([WEATHER]).invoke([*QUESTION, called, result]).response_metadata, "an answer")
    with checks.that("bind_tools, streamed"):
        chunks = list(chat.bind_tools([WEATHER], tool_choice="any").stream(QUESTION))
        total = chunks[0]
        for chunk in chunks[1:]:
            total = total + chunk
        holds(total.tool_calls, "a call")
    for method in ("json_schema", "function_calling"):
        with checks.that(f"with_structured_output, {method}"):
            holds(isinstance(chat.with_structured_output(Answer, method=method).invoke(QUESTION), Answer), "an Answer")


def check_others(checks: Checks, key: SecretStr) -> None:
    with checks.that("completions"):
        model = OpenAI(base_url=f"{checks.url}/v1", api_key=key, model=checks.model, max_tokens=8, temperature=0)
        equal("".join(model.stream("import os")), model.invoke("import os"))
    with checks.that("the Responses API"):
        model_of_responses = ChatOpenAI(
            base_url=f"{checks.url}/v1", api_key=key, model=checks.model, use_responses_api=True, max_tokens=16
        )
        holds(model_of_responses.invoke(QUESTION).text, "text")


def main() -> None:
    checks, key = Checks.from_arguments(), SecretStr("none")
    chat = ChatOpenAI(
        base_url=f"{checks.url}/v1",
        api_key=key,
        model=checks.model,
        temperature=0,
        max_tokens=200,
        max_retries=0,
        stream_usage=True,
    )
    check_chat(checks, chat)
    check_structure(checks, chat)
    check_others(checks, key)
    checks.finish(["langchain-openai", "langchain-core"])


if __name__ == "__main__":
    main()
