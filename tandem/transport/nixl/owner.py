"""Owner thread of an agent, the only thread that uses it: posts reads, polls them, and ends them.

A read that fails while NIXL may still be writing is failed with `is_over=False` and polled further; it is over when
NIXL reports it, or when the agent has been destroyed. A *fence* does that, `FENCE_AFTER_S` past its deadline, and
builds another agent; so does `close`, without another.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError, TransportError
from tandem.transport.nixl.agent import NixlAgent, RemoteAgent
from tandem.transport.nixl.flight import Flight, Part, PeerLink
from tandem.transport.transfer import TransferState

Answer = TypeVar("Answer")

FENCE_AFTER_S = 30.0  # after the deadline of a read that is not over
CLOSE_GRACE_S = 1.0  # in which reads may end before the agent is destroyed
REBUILD_PAUSE_S = 1.0  # between two attempts to build an agent
MAX_INFLIGHT_BYTES = 128 << 20  # per peer
_MIN_PAUSE_S, _MAX_PAUSE_S = 20e-6, 1e-3  # between two polls

logger = logging.getLogger(__name__)


class AgentOwner:
    """Owns the agents created by `build`. Thread-safe.

    Raises:
        ConfigurationError: the first agent cannot be built.
    """

    def __init__(self, build: Callable[[], NixlAgent], clock: Clock, fence_after_s: float = FENCE_AFTER_S) -> None:
        self._build, self._clock, self._fence_after_s = build, clock, fence_after_s
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._flights: list[Flight] = []
        self._links: set[PeerLink] = set()  # whose peers the agent knows
        self._agent: NixlAgent | None = None
        self._may_rebuild_s = 0.0
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_working = True
        self._thread = threading.Thread(target=self._work, name="kv-nixl", daemon=True)
        self._thread.start()
        try:
            self.call(self._rebuild)
        except ConfigurationError:
            self.close()
            raise

    def call(self, command: Callable[[], Answer]) -> Answer:
        """Run `command` on the owner thread; returns its result or raises its error."""
        if threading.current_thread() is self._thread:
            return command()
        future: Future[Answer] = Future()
        self._send(lambda: _resolve(future, command))
        return future.result()

    def agent(self) -> NixlAgent:
        """The current agent, for commands only. If building one after a fence failed, it is tried again."""
        if self._agent is None and self._clock.now_s() >= self._may_rebuild_s:
            with suppress(ConfigurationError):
                self._rebuild()
        if self._agent is None:
            raise TransportError("NIXL could not be started again after its last agent was destroyed")
        return self._agent

    def link(self, add: Callable[[NixlAgent], RemoteAgent]) -> PeerLink:
        """Returns a link to the peer that `add` adds to the agent."""
        return self.call(lambda: self._link(add))

    def submit(self, flight: Flight) -> None:
        """Submit a read; returns at once. Raises `TransportError` after `close`."""
        self._send(lambda: self._flights.append(flight))

    def drop(self, link: PeerLink) -> None:
        """End a peer's reads and remove it as soon as none of them is in flight."""
        self._send(lambda: self._break(link, "the peer was disconnected"))

    def fence(self) -> None:
        """Destroy the agent and build another. Every read is over on return; every peer has to connect again, with a
        new card of ours where it reads from us.
        """
        assert threading.current_thread() is not self._thread, "a callback cannot fence: it runs on the agent's thread"
        self.call(self._fence)

    def close(self) -> None:
        """End every read, destroy the agent and the thread; every read is over on return."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(self._shut_down)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _link(self, add: Callable[[NixlAgent], RemoteAgent]) -> PeerLink:
        link = PeerLink(add(self.agent()))
        self._links.add(link)
        return link

    def _send(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise TransportError("this worker's nixl transport is closed")
            self._commands.put(command)

    def _work(self) -> None:
        pause_s = _MIN_PAUSE_S
        while self._is_working:
            has_news = self._run_commands(pause_s if self._flights else None)
            has_news |= self._advance_all()
            pause_s = _MIN_PAUSE_S if has_news else min(2 * pause_s, _MAX_PAUSE_S)

    def _run_commands(self, timeout_s: float | None) -> bool:
        """Wait for a command, then run all that are queued; returns whether there was one."""
        try:
            command = self._commands.get(timeout=timeout_s)
        except Empty:
            return False
        command()
        while self._is_working and not self._commands.empty():
            self._commands.get()()
        return True

    def _advance_all(self) -> bool:
        """Advance every read as far as possible, or until a command waits; returns whether anything changed."""
        has_news = False
        for flight in list(self._flights):
            has_news |= self._advance(flight)
            if has_news and not self._commands.empty():  # NOTE: posting copies on CPU paths, so a pass can be long
                break
        now_s = self._clock.now_s()
        if any(now_s > flight.deadline_s + self._fence_after_s for flight in self._flights):
            self._fence_by_itself()
        return has_news

    def _fence_by_itself(self) -> None:
        logger.error("a NIXL read is not over %g s after its deadline: destroying the agent", self._fence_after_s)
        try:
            self._fence()
        except ConfigurationError as error:
            logger.error("no KV blocks can be read until NIXL starts again, which is tried: %s", error)

    def _advance(self, flight: Flight) -> bool:
        try:
            has_news = self._poll(flight)
            self._check(flight)
            if self._post(flight):
                has_news |= self._poll(flight)
        except TransportError as error:
            flight.waiting.clear()
            self._finish(flight, error)
            return True
        if not flight.posted and not flight.waiting:
            self._finish(flight, None)
        return has_news

    def _poll(self, flight: Flight) -> bool:
        """Poll the posted parts of a read; returns whether any has ended."""
        agent = self.agent()
        num_posted = len(flight.posted)
        for handle in list(flight.posted):
            try:
                is_done = agent.is_done(handle)
            except TransportError as error:
                self._land(flight, handle)
                self._break(flight.link, str(error))
                raise
            if is_done:
                self._land(flight, handle)
        return len(flight.posted) < num_posted

    def _check(self, flight: Flight) -> None:
        is_unfinished = bool(flight.posted or flight.waiting)
        if is_unfinished and flight.transfer.state is TransferState.PENDING:
            if flight.link.broken is not None:
                raise TransportError(flight.link.broken)
            if self._clock.now_s() > flight.deadline_s:
                raise TransportError(f"a read of {flight.transfer.num_bytes} bytes missed its deadline")

    def _post(self, flight: Flight) -> bool:
        link, has_posted = flight.link, False
        while flight.waiting and (
            not link.inflight_bytes or link.inflight_bytes + flight.waiting[0].num_bytes <= MAX_INFLIGHT_BYTES
        ):
            if flight.first_posted_s is None:
                flight.first_posted_s = self._clock.now_s()
            part = flight.waiting.popleft()
            try:
                handle = part.start(self.agent(), link.remote)
            except TransportError as error:
                self._break(link, str(error))
                raise
            flight.posted[handle] = part
            link.inflight_bytes += part.num_bytes
            has_posted = True
        return has_posted

    def _land(self, flight: Flight, handle: int) -> Part:
        """Remove a posted part that has ended."""
        part = flight.posted.pop(handle)
        flight.link.inflight_bytes -= part.num_bytes
        self.agent().release(handle)
        return part

    def _finish(self, flight: Flight, error: TransportError | None) -> None:
        """Complete or fail the read's transfer, and remove the read unless NIXL still works on it."""
        transfer, is_over = flight.transfer, not flight.posted
        if transfer.state is TransferState.PENDING:
            started_s = flight.first_posted_s
            seconds = None if error or started_s is None else self._clock.now_s() - started_s
            flight.link.pace.end(transfer.num_bytes, seconds)
        if is_over:
            self._flights.remove(flight)
        if error is not None:
            transfer.fail(error, is_over=is_over)
        elif transfer.state is TransferState.PENDING:
            transfer.succeed()
        else:
            transfer.settle()
        if flight.link.broken is not None:
            self._forget(flight.link)

    def _break(self, link: PeerLink, reason: str) -> None:
        if link.broken is None:
            link.broken = reason
            self._forget(link)

    def _forget(self, link: PeerLink) -> None:
        """Release a broken peer's descriptors once none of its reads is in flight."""
        if link in self._links and not any(flight.link is link for flight in self._flights):
            self._links.remove(link)
            self.agent().remove_remote(link.remote)

    def _fence(self) -> None:
        self._end_all(TransportError("the NIXL agent was destroyed to end reads that would not end; connect again"))
        self._rebuild()

    def _rebuild(self) -> None:
        try:
            self._agent = self._build()
        finally:
            self._may_rebuild_s = self._clock.now_s() + REBUILD_PAUSE_S

    def _end_all(self, error: TransportError) -> None:
        """Destroy the agent: every read is then over, and all peers are gone."""
        if self._agent is not None:
            self._agent.destroy()
            self._agent = None
        for link in self._links:
            link.broken = str(error)
        self._links.clear()
        flights, self._flights = self._flights, []
        for flight in flights:
            if flight.transfer.state is TransferState.PENDING:
                flight.link.pace.end(flight.transfer.num_bytes, None)
            flight.transfer.fail(error)

    def _shut_down(self) -> None:
        self._is_working = False
        closed = TransportError("this worker's nixl transport was closed while a read was under way")
        for flight in list(self._flights):
            self._break(flight.link, str(closed))
        limit_s = self._clock.now_s() + CLOSE_GRACE_S
        while self._flights and self._clock.now_s() < limit_s:
            if not self._advance_all():
                threading.Event().wait(_MAX_PAUSE_S)
        self._end_all(closed)


def _resolve(future: "Future[Answer]", command: Callable[[], Answer]) -> None:
    try:
        future.set_result(command())
    except (TransportError, ConfigurationError) as error:
        future.set_exception(error)
