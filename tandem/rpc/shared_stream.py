"""Caller's side of a shared stream: one stream on which a worker serves all requests of this process.

Updates of many requests from one engine step travel in one message, which costs less than a message for each.
Invariant: a request behaves as on a call of its own, with its own order, errors and end. If the stream breaks, all its
requests are lost. A request whose updates are not read receives at most `CREDIT_TOKENS` and delays no other.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count, islice

from tandem.core.errors import InvalidRequestError, TandemError, WorkerLostError
from tandem.core.output import RequestOutput
from tandem.rpc import methods
from tandem.rpc.form import TOKEN_BYTES
from tandem.rpc.messages import GenerateCall, GenerateUpdate
from tandem.rpc.network import RpcConnection
from tandem.rpc.plain_updates import is_plain, merged
from tandem.rpc.serve_messages import CallStatus, Credit, RequestStart, ServeCall, ServeUpdate
from tandem.rpc.status import TRACE_KEY, error_of_status

CREDIT_TOKENS = 1024  # of one request that the worker may send ahead of its reader
MAX_STARTS = 64  # in one message
MAX_CALL_BYTES = 256 << 10  # of an encoded request; 64 of them are a quarter of the longest message


def short_form(call: GenerateCall) -> bytes | None:
    """Encodes a request if it and its updates are small enough for the shared stream, else returns None.

    The stream's messages have a maximum size. A prompt that is too long by itself is not encoded at all.

    Raises:
        InvalidRequestError: as `Form.encode`.
    """
    if call.params.logprobs is not None or call.params.prompt_logprobs is not None:
        return None
    if len(call.prompt_token_ids) > MAX_CALL_BYTES // TOKEN_BYTES:
        return None
    data = methods.GENERATE.request.encode(call)
    return data if len(data) <= MAX_CALL_BYTES else None


class _Inbox:
    """Updates of one request that its caller has not read yet; plain ones are merged. Bounded by the request's
    credit.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_untold = 0
        self._updates: deque[GenerateUpdate] = deque()
        self._end: TandemError | None = None
        self._has_ended = False
        self._has_any = asyncio.Event()

    def put_plain(self, token_ids: tuple[int, ...], text: str) -> None:
        update = GenerateUpdate(RequestOutput(self.request_id, 0, token_ids, text))
        if self._updates and is_plain(self._updates[-1]):
            self._updates[-1] = merged(self._updates[-1], update)
        else:
            self.put(update)

    def put(self, update: GenerateUpdate) -> None:
        self._updates.append(update)
        self._has_any.set()

    def end(self, error: TandemError | None) -> None:
        """Ends the updates, with the error that `get` raises after the last one; None = success."""
        self._end, self._has_ended = error, True
        self._has_any.set()

    async def get(self) -> GenerateUpdate | None:
        """Waits for the next update; None at the end. Raises the error with which the request ended."""
        await self._has_any.wait()
        if not self._updates:
            if self._end is not None:
                raise self._end
            return None
        update = self._updates.popleft()
        if not self._updates and not self._has_ended:
            self._has_any.clear()
        return update


class SharedStream:
    """A shared stream on one channel of a connection. Call `start` first, in the event loop.

    If the stream has ended, or the connection uses another channel, a new one is needed.
    """

    def __init__(self, connection: RpcConnection) -> None:
        self._connection = connection
        self._numbers = count(1)
        self._inboxes: dict[int, _Inbox] = {}
        self._starts: dict[int, RequestStart] = {}
        self._credits: list[Credit] = []
        self._left: list[int] = []
        self._has_messages = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel_number = connection.channel_number
        self._is_retired = False
        self.has_ended = False
        self.was_answered = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"shared stream to {self._connection.address}")

    async def close(self) -> None:
        """Ends the stream; its requests are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def accepts_requests(self) -> bool:
        """Whether new requests may use this stream."""
        return not self.has_ended and self._channel_number == self._connection.channel_number

    def retire(self) -> None:
        """Accepts no more requests and ends after the last running one."""
        self._is_retired = True
        self._end_if_unused()

    async def generate(self, call: bytes, request_id: str) -> AsyncGenerator[GenerateUpdate, None]:
        """Like `WorkerClient.generate`, of an encoded call."""
        assert not self.has_ended
        number = next(self._numbers)
        inbox = self._inboxes[number] = _Inbox(request_id)
        traceparent = dict(self._connection.own_metadata).get(TRACE_KEY, "")
        self._starts[number] = RequestStart(number, call, traceparent, CREDIT_TOKENS)
        self._has_messages.set()
        self._connection.num_calls += 1
        try:
            while (update := await inbox.get()) is not None:
                self._grant_credit(number, inbox, len(update.output.token_ids))
                yield update
        finally:
            self._connection.num_calls -= 1
            if self._inboxes.pop(number, None) is not None:
                self._leave(number)
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._inboxes and self._task is not None:
            self._task.cancel()

    def _leave(self, number: int) -> None:
        """Cancels a request; one whose start has not been sent never starts."""
        if self._starts.pop(number, None) is None:
            self._left.append(number)
            self._has_messages.set()

    def _grant_credit(self, number: int, inbox: _Inbox, num_tokens: int) -> None:
        """Counts read tokens, and grants them as new credit from time to time.

        NOTE: granted by halves, so that messages are rare and credit never runs out while updates are read.
        """
        inbox.num_untold += num_tokens
        if 2 * inbox.num_untold >= CREDIT_TOKENS and number in self._inboxes:
            self._credits.append(Credit(number, inbox.num_untold))
            inbox.num_untold = 0
            self._has_messages.set()

    async def _run(self) -> None:
        error: TandemError = WorkerLostError(f"{self._connection.address} ended the stream of all requests")
        try:
            async with aclosing(self._connection.bidirectional(methods.SERVE, self._messages())) as answers:
                async for update in answers:
                    self.was_answered = True
                    self._deliver(update)
        except TandemError as lost:
            error = lost
        except asyncio.CancelledError:
            error = WorkerLostError(f"Generate at {self._connection.address}: this side has closed the connection")
            raise
        finally:
            self.has_ended = True
            inboxes, self._inboxes = self._inboxes, {}
            for inbox in inboxes.values():
                inbox.end(error)

    async def _messages(self) -> AsyncGenerator[ServeCall, None]:
        """Yields messages to the worker as they become due."""
        while True:
            await self._has_messages.wait()
            self._has_messages.clear()
            starts = [self._starts.pop(number) for number in list(islice(self._starts, MAX_STARTS))]
            granted, self._credits = self._credits, []
            left, self._left = self._left, []
            if self._starts:
                self._has_messages.set()
            yield ServeCall(tuple(starts), tuple(granted), tuple(left))

    def _deliver(self, update: ServeUpdate) -> None:
        """NOTE: updates of cancelled requests are ignored."""
        for plain in update.plain:
            if (inbox := self._inboxes.get(plain.number)) is not None:
                inbox.put_plain(plain.token_ids, plain.text)
        for other in update.others:
            if other.number in self._inboxes:
                self._take(other.number, other.update, other.status)

    def _take(self, number: int, data: bytes, status: CallStatus | None) -> None:
        try:
            if data:
                self._inboxes[number].put(methods.GENERATE.answer.decode(data))
        except InvalidRequestError as error:
            nonsense = WorkerLostError(f"{self._connection.address} answered nonsense: {error}")
            self._inboxes.pop(number).end(nonsense)
            self._leave(number)
            return
        if status is not None:
            self._inboxes.pop(number).end(error_of_status(status, self._connection.address, "Generate"))
