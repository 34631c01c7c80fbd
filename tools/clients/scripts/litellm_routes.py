"""`litellm`: its `openai/`, `text-completion-openai/` and `anthropic/` routes, whole and streamed, with usage."""

from typing import Any

import litellm

from tools.clients.checks import Checks, equal, holds

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


def check_route(checks: Checks, name: str, route: dict[str, Any]) -> None:
    with checks.that(f"{name}: whole, with usage"):
        answer = litellm.completion(messages=QUESTION, max_tokens=16, temperature=0, **route)
        holds(answer.choices[0].message.content, "text")
        holds(answer.usage.total_tokens, "usage")
    with checks.that(f"{name}: streamed, with usage"):
        stream = litellm.completion(
            messages=QUESTION,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **route,
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        equal(text, answer.choices[0].message.content)
        rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
        equal(rebuilt.usage.completion_tokens, answer.usage.completion_tokens)
    for is_streamed in (False, True):
        with checks.that(f"{name}: a call{', streamed' if is_streamed else ''}, and the turn after it"):
            called = call_tool(route, is_streamed)
            equal(called.tool_calls[0].function.name, "get_weather")
            result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "It rains."}
            told = [*QUESTION, called, result]
            answer = litellm.completion(messages=told, tools=[TOOL], max_tokens=8, temperature=0, **route)
            holds(answer.usage.completion_tokens, "an answer")


def call_tool(route: dict[str, Any], is_streamed: bool) -> Any:
    """The message that calls it, as LiteLLM keeps it."""
    asked: Any = {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    answer = litellm.completion(**asked, parallel_tool_calls=False, stream=is_streamed, **route)
    whole = litellm.stream_chunk_builder(list(answer)) if is_streamed else answer
    return whole.choices[0].message


def main() -> None:
    checks = Checks.from_arguments()
    common: dict[str, Any] = {"api_key": "none", "num_retries": 0, "timeout": 60}
    check_route(checks, "openai/", common | {"model": f"openai/{checks.model}", "api_base": f"{checks.url}/v1"})
    check_route(
        checks, "hosted_vllm/", common | {"model": f"hosted_vllm/{checks.model}", "api_base": f"{checks.url}/v1"}
    )
    check_route(checks, "anthropic/", common | {"model": f"anthropic/{checks.model}", "api_base": checks.url})
    with checks.that("text-completion-openai/: whole"):
        route = common | {"model": f"text-completion-openai/{checks.model}", "api_base": f"{checks.url}/v1"}
        answer = litellm.text_completion(prompt="import os", max_tokens=8, temperature=0, **route)
        holds(answer.choices[0].text, "text")
    with checks.that("an unknown model is NotFoundError"):
        try:
            litellm.completion(
                messages=QUESTION, **(common | {"model": "openai/nobody", "api_base": f"{checks.url}/v1"})
            )
        except litellm.NotFoundError:
            pass
        else:
            raise AssertionError("it was answered")
    checks.finish(["litellm"])


if __name__ == "__main__":
    main()
