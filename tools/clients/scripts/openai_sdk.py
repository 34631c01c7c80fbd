"""The `openai` SDK in strict mode: chats, completions, streams, `parse`, tools, models and errors."""

from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel

from tools.clients.checks import Checks, equal, holds

QUESTION: Any = [{"role": "user", "content": "What does os.path.join do?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Answer(BaseModel):
    """Expected result of `parse`."""

    is_python: bool
    digit: int


def check_chat(checks: Checks, client: OpenAI) -> None:
    with checks.that("chat, whole"):
        answer = client.chat.completions.create(
            model=checks.model, messages=QUESTION, max_completion_tokens=12, temperature=0
        )
        holds(answer.choices[0].message.content, "text")
        assert answer.usage is not None
        equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
    with checks.that("chat, n, seed, logprobs, stop"):
        asked: dict[str, Any] = {"n": 2, "seed": 3, "logprobs": True, "top_logprobs": 2, "stop": ["\n\n\n"]}
        first, second = (
            client.chat.completions.create(model=checks.model, messages=QUESTION, max_tokens=8, **asked)
            for _ in range(2)
        )
        equal([c.message.content for c in first.choices], [c.message.content for c in second.choices])
        for choice in first.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            holds(all(len(token.top_logprobs) >= 2 for token in choice.logprobs.content), "two alternatives a token")
    with checks.that("chat, stream"):
        stream = client.chat.completions.create(
            model=checks.model,
            messages=QUESTION,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        whole = client.chat.completions.create(model=checks.model, messages=QUESTION, max_tokens=12, temperature=0)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        equal(text, whole.choices[0].message.content)
        equal(chunks[-1].choices, [])
        holds(chunks[-1].usage, "usage in the last chunk")
    with checks.that("chat, stream helper"):
        with client.chat.completions.stream(model=checks.model, messages=QUESTION, max_tokens=12, seed=1) as helper:
            kinds = {event.type for event in helper}
            final = helper.current_completion_snapshot  # NOTE: the final one raises where the length ended it
        holds({"chunk", "content.delta", "content.done"} <= kinds, f"events {kinds}")
        holds(final.choices[0].message.content, "text")


def check_structure(checks: Checks, client: OpenAI) -> None:
    with checks.that("parse: a pydantic model"):
        parsed = client.chat.completions.parse(
            model=checks.model, messages=QUESTION, response_format=Answer, max_tokens=200
        )
        holds(isinstance(parsed.choices[0].message.parsed, Answer), "an Answer")
    once: Any = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    with checks.that("tools, required, then the result"):
        answer = client.chat.completions.create(model=checks.model, messages=QUESTION, tools=[TOOL], **once)
        message = answer.choices[0].message
        equal(answer.choices[0].finish_reason, "tool_calls")
        assert message.tool_calls
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        again = [*QUESTION, message.model_dump(exclude_none=True), result]
        after = client.chat.completions.create(model=checks.model, messages=again, tools=[TOOL], max_tokens=8)
        holds(after.choices[0].finish_reason, "a finish reason")
    with checks.that("tools, stream helper"):
        with client.chat.completions.stream(model=checks.model, messages=QUESTION, tools=[TOOL], **once) as helper:
            done = [event for event in helper if event.type == "tool_calls.function.arguments.done"]
        holds(done, "a finished call")


def check_others(checks: Checks, client: OpenAI) -> None:
    with checks.that("completions, whole and streamed, text and ids"):
        whole = client.completions.create(model=checks.model, prompt="import os", max_tokens=8, temperature=0)
        # NOTE: the SDK's type of a chunk knows no missing finish reason, which OpenAI itself sends; so not strict here.
        lenient = OpenAI(base_url=f"{checks.url}/v1", api_key="none", max_retries=0, timeout=60)
        stream = lenient.completions.create(
            model=checks.model, prompt="import os", max_tokens=8, temperature=0, stream=True
        )
        equal("".join(chunk.choices[0].text for chunk in stream if chunk.choices), whole.choices[0].text)
        ids = client.completions.create(model=checks.model, prompt=[[5, 6], [7]], max_tokens=2, echo=True)
        equal(len(ids.choices), 2)
    with checks.that("models: list, retrieve"):
        equal([model.id for model in client.models.list()], [checks.model])
        equal(client.models.retrieve(checks.model).id, checks.model)
    with checks.that("responses: create, stream, retrieve, chain"):
        first = client.responses.create(model=checks.model, input="What is a list?", max_output_tokens=16)
        equal(client.responses.retrieve(first.id).id, first.id)
        with client.responses.stream(
            model=checks.model, input="And a tuple?", previous_response_id=first.id, max_output_tokens=16
        ) as helper:
            kinds = [event.type for event in helper]
        equal(kinds[0], "response.created")
        holds(kinds[-1] in ("response.completed", "response.incomplete"), "an end")
    check_errors(checks, client)


def check_errors(checks: Checks, client: OpenAI) -> None:
    wanted: list[tuple[str, type[Exception], Any]] = [
        ("embeddings are a clean 404", openai.NotFoundError, lambda: client.embeddings.create(model="x", input="a")),
        (
            "an unknown model is a 404",
            openai.NotFoundError,
            lambda: client.chat.completions.create(model="nobody", messages=QUESTION),
        ),
        (
            "a wrong value is a 400",
            openai.BadRequestError,
            lambda: client.chat.completions.create(model=checks.model, messages=QUESTION, temperature=-1),
        ),
    ]
    for name, kind, call in wanted:
        with checks.that(name):
            try:
                call()
            except kind as error:
                holds(isinstance(error, openai.APIStatusError) and error.body, "an error in OpenAI's shape")
            else:
                raise AssertionError("it was answered")


def main() -> None:
    checks = Checks.from_arguments()
    with OpenAI(
        base_url=f"{checks.url}/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        check_chat(checks, client)
        check_structure(checks, client)
        check_others(checks, client)
    checks.finish(["openai"])


if __name__ == "__main__":
    main()
