"""The `anthropic` SDK in strict mode: messages, streams, counts, tools, the tool runner, cache breakpoints, errors."""

from typing import Any

import anthropic
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

from tools.clients.checks import Checks, equal, holds

QUESTION: Any = [{"role": "user", "content": "What does os.path.join do?"}]
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}  # NOTE: made to call, the demo would go on
GREEDY: Any = {"temperature": 0}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Answer(BaseModel):
    """Expected result of `parse`."""

    is_python: bool
    digit: int


@beta_tool
def double(number: int) -> str:
    """Twice a number.

    Args:
        number: the number.
    """
    return str(2 * number)


def check_messages(checks: Checks, client: Anthropic) -> None:
    with checks.that("messages, whole and streamed, are equal"):
        asked: Any = {"model": checks.model, "messages": QUESTION, "max_tokens": 24, "extra_body": GREEDY}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        equal([block.text for block in whole.content if block.type == "text"], [text])
        equal(final.usage.output_tokens, whole.usage.output_tokens)
        holds(whole.stop_reason in ("end_turn", "max_tokens"), f"stop_reason {whole.stop_reason}")
    with checks.that("messages, raw events in order"):
        events = client.messages.create(model=checks.model, messages=QUESTION, max_tokens=6, stream=True)
        kinds = [event.type for event in events]
        equal(kinds[:2], ["message_start", "content_block_start"])
        equal(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"])
    with checks.that("system blocks, stop sequence, metadata"):
        answer = client.messages.create(
            model=checks.model,
            system=[{"type": "text", "text": "Be brief."}],
            messages=QUESTION,
            max_tokens=64,
            stop_sequences=["e"],
            metadata={"user_id": "u"},
            extra_body=GREEDY,
        )
        equal((answer.stop_reason, answer.stop_sequence), ("stop_sequence", "e"))
    with checks.that("count_tokens is what a message uses"):
        count = client.messages.count_tokens(model=checks.model, messages=QUESTION, system="Be brief.")
        used = client.messages.create(model=checks.model, messages=QUESTION, system="Be brief.", max_tokens=1).usage
        cached = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
        equal(count.input_tokens, used.input_tokens + cached)


def check_tools(checks: Checks, client: Anthropic) -> None:
    with checks.that("tools: any, then the result"):
        asked: Any = {"model": checks.model, "max_tokens": 200, "tools": [TOOL], "extra_body": {"seed": 1}}
        answer = client.messages.create(messages=QUESTION, tool_choice=ONE_CALL, **asked)
        equal(answer.stop_reason, "tool_use")
        (use,) = (block for block in answer.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        again = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        holds(client.messages.create(messages=again, **asked).stop_reason, "a stop reason")
    with checks.that("tools, streamed: input arrives as JSON"):
        with client.messages.stream(messages=QUESTION, tool_choice=ONE_CALL, **asked) as stream:
            final = stream.get_final_message()
        holds([block for block in final.content if block.type == "tool_use" and block.input], "a call with its input")
    with checks.that("tool runner: goes on without threads"):
        runner = client.beta.messages.tool_runner(
            model=checks.model,
            messages=QUESTION,
            tools=[double],
            tool_choice=ONE_CALL,
            max_tokens=200,
            max_iterations=2,
            extra_body={"seed": 1},
        )
        messages = list(runner)
        equal(len(messages), 2)
        equal(messages[0].stop_reason, "tool_use")
    with checks.that("parse: a pydantic model"):
        parsed = client.messages.parse(
            model=checks.model, messages=QUESTION, max_tokens=200, output_format=Answer
        ).parsed_output
        holds(isinstance(parsed, Answer), "an Answer")


def check_cache(checks: Checks, client: Anthropic) -> None:
    with checks.that("cache breakpoints: written, then read"):
        text = "Tandem reads a long preface before it answers. " * 60
        system: Any = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        first, second = (
            client.messages.create(model=checks.model, system=system, messages=QUESTION, max_tokens=4).usage
            for _ in range(2)
        )
        checks.notes["cache"] = [first.model_dump(), second.model_dump()]
        assert first.cache_creation is not None
        written = first.cache_creation.ephemeral_1h_input_tokens
        holds(written, "tokens written for an hour")
        equal(second.cache_creation_input_tokens, 0)
        holds((second.cache_read_input_tokens or 0) >= written, "all read again")
    with checks.that("max_tokens 0 warms the cache"):
        warm = client.messages.create(model=checks.model, messages=QUESTION, max_tokens=0)
        equal((warm.content, warm.usage.output_tokens), ([], 0))


def check_errors(checks: Checks, client: Anthropic) -> None:
    with checks.that("models: list, retrieve"):
        equal([model.id for model in client.models.list()], [checks.model])
        equal(client.models.retrieve(checks.model).id, checks.model)
    wanted: list[tuple[str, type[anthropic.APIStatusError], Any]] = [
        ("an unknown model is a 404", anthropic.NotFoundError, {"model": "nobody", "max_tokens": 1}),
        ("a wrong value is a 400", anthropic.BadRequestError, {"model": checks.model, "max_tokens": -1}),
    ]
    for name, kind, body in wanted:
        with checks.that(name):
            try:
                client.messages.create(messages=QUESTION, **body)
            except kind as error:
                holds(isinstance(error.body, dict) and error.body["error"], "an error in Anthropic's shape")
            else:
                raise AssertionError("it was answered")


def main() -> None:
    checks = Checks.from_arguments()
    with Anthropic(
        base_url=checks.url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        check_messages(checks, client)
        check_tools(checks, client)
        check_cache(checks, client)
        check_errors(checks, client)
    checks.finish(["anthropic"])


if __name__ == "__main__":
    main()
