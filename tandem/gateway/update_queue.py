"""Queue of updates from all choices of one request to its client. Invariant: bounded; order is kept."""

import asyncio
from dataclasses import replace

from tandem.core.output import RequestMetrics, RequestOutput
from tandem.gateway.pace import StreamPacer

MAX_UPDATES = 2048


class UpdateQueue:
    """Queue with many writers and one reader, which receives everything queued at once. Owned by one event loop."""

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self._error: BaseException | None = None
        self._has_updates = asyncio.Event()
        self._has_room = asyncio.Event()

    async def put(self, output: RequestOutput) -> None:
        """Adds an update; waits while the reader, a slow client, is far behind."""
        while len(self._outputs) >= MAX_UPDATES:
            self._has_room.clear()
            await self._has_room.wait()
        self._outputs.append(output)
        self._has_updates.set()

    def fail(self, error: BaseException) -> None:
        """Makes the reader raise `error` after the queued updates; only the first error counts."""
        self._error = self._error or error
        self._has_updates.set()

    async def get(self, pace: StreamPacer | None = None) -> list[RequestOutput]:
        """Waits for updates and returns all; consecutive ones of a choice are merged. Raises what `fail` was given."""
        await self._has_updates.wait()
        if pace is not None and self._error is None:
            await pace.wait()
        if not self._outputs:
            assert self._error is not None
            raise self._error
        outputs, self._outputs = self._outputs, []
        if self._error is None:
            self._has_updates.clear()
        self._has_room.set()
        return outputs if len(outputs) == 1 else _merged(outputs)


def _merged(outputs: list[RequestOutput]) -> list[RequestOutput]:
    merged = [outputs[0]]
    for item in outputs[1:]:
        if item.index == merged[-1].index:
            merged[-1] = _joined(merged[-1], item)
        else:
            merged.append(item)
    return merged


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    return RequestOutput(
        second.request_id,
        second.index,
        first.token_ids + second.token_ids,
        first.text + second.text,
        (first.logprobs or ()) + second.logprobs if second.logprobs is not None else first.logprobs,
        second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
        second.finish_reason,
        second.stop_reason,
        _later(first.metrics, second.metrics),
    )


def _later(first: RequestMetrics | None, second: RequestMetrics | None) -> RequestMetrics | None:
    """The second metrics if there are any, with the larger of both numbers of cached tokens."""
    if first is None or second is None:
        return second or first
    return replace(second, num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens))
