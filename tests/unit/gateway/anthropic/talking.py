"""A worker that says what it is told to, and a template that shows tools and thinking, behind a served gateway."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
from anthropic import Anthropic, AsyncAnthropic

from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.types import FinishReason
from tandem.rpc.messages import GenerateCall, GenerateUpdate
from tests.helpers.fake_backend import FakeCluster, running_cluster
from tests.helpers.fake_worker import FakeWorker

NUM_CACHED = 3
TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\nCall one as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""


@dataclass(eq=False)
class TalkingWorker(FakeWorker):
    """Says the next of `answers`, `burst` characters a message, and keeps what it is asked to keep.

    matched: the stop string that ended it.
    """

    answers: list[str] = field(default_factory=list)
    matched: str | None = None

    async def _script(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        text, arrival_s = self.answers.pop(0), time.monotonic()
        num_tokens = min(len(text), call.params.max_tokens or len(text))
        is_cut = num_tokens < len(text)
        for start in range(0, max(1, num_tokens), self.burst):
            piece = text[start : min(start + self.burst, num_tokens)]
            is_last = start + self.burst >= num_tokens
            reason = (FinishReason.LENGTH if is_cut else FinishReason.STOP) if is_last else None
            times_s = (arrival_s, arrival_s, arrival_s, arrival_s)
            num_prompt = len(call.prompt_token_ids)
            metrics = RequestMetrics(*times_s, num_prompt, num_tokens, NUM_CACHED, 0, call.pins)
            token_ids = tuple(self.tokenizer.encode(piece, add_special_tokens=False)) if piece else ()
            matched = self.matched if is_last and not is_cut else None
            output = RequestOutput(
                call.request_id, 0, token_ids, piece, None, None, reason, matched, metrics if is_last else None
            )
            yield GenerateUpdate(output, ())

    @property
    def last_prompt(self) -> str:
        """Text of the prompt of the last call."""
        return self.tokenizer.decode(self.calls[-1].prompt_token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Scene:
    """A served gateway whose one worker talks."""

    cluster: FakeCluster
    worker: TalkingWorker
    client: httpx.AsyncClient

    def sdk(self) -> AsyncAnthropic:
        return AsyncAnthropic(**self._options())

    def blocking_sdk(self) -> Anthropic:
        """For use in a thread."""
        return Anthropic(**self._options())

    def num_tokens(self, text: str) -> int:
        return len(self.worker.tokenizer.encode(text, add_special_tokens=False))

    def _options(self) -> dict[str, Any]:
        return {
            "base_url": self.cluster.url,
            "api_key": "none",
            "max_retries": 0,
            "timeout": 20,
            "_strict_response_validation": True,
        }


Act = Callable[[Scene], Awaitable[None]]


def play(directory: Path, story: Act, *answers: str, burst: int = 4, template: str = TEMPLATE) -> None:
    """Run `story` against a served gateway whose worker gives `answers`, one a request."""

    async def run() -> None:
        (directory / "chat_template.jinja").write_text(template)
        async with (
            running_cluster(directory, num_workers=1) as cluster,
            httpx.AsyncClient(base_url=cluster.url, timeout=20, verify=False) as client,
        ):
            worker = TalkingWorker("talker", cluster.workers[0].tokenizer, answers=list(answers), burst=burst)
            await worker.serve()
            cluster.routers[0].workers[:] = [worker]
            try:
                await story(Scene(cluster, worker, client))
            finally:
                await worker.kill()

    asyncio.run(run())


def events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream, by name."""
    frames = [frame.split(b"\n") for frame in body.split(b"\n\n") if frame]
    return [(lines[0].removeprefix(b"event: ").decode(), orjson.loads(lines[1][6:])) for lines in frames]
