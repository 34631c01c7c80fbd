"""Another host of a group, as the leader uses it: the ranks there, and the link to them.

All that comes over the link is checked: a host speaks for its own ranks only, and for the present epoch (one set of
processes of all ranks). A host whose link ends is lost for good, since the KV of its ranks is.
"""

import logging
import pickle
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from queue import SimpleQueue
from typing import Any

from tandem.compute.native.links_mirror import HostPlace, LinksMirror
from tandem.core.errors import RanksLostError, TransportError
from tandem.ranks.frames import MAX_REASON_BYTES, NUMBER, PLACE, Frame, FrameKind
from tandem.ranks.kv_messages import Failed, KVAnswer, KVCall, ReadEnded
from tandem.ranks.link import Link
from tandem.ranks.messages import ToLeader, pack, unpack

_START_S = 60.0  # until a host has started its processes
_END_S = 60.0  # until they have ended, those of all its ranks
_MAX_UNREAD = 16  # messages of a rank that wait to be received
_MAX_RANK_MESSAGE_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 24  # to a call about KV

OnAnswer = Callable[[KVAnswer], None]

_log = logging.getLogger(__name__)


class RemoteRank:
    """Implements `RankProcess` for a process on another host; `RemoteHost` calls `take` and `end` as frames come."""

    def __init__(self, host: "RemoteHost", rank: int, epoch: int) -> None:
        self._host, self._rank, self._epoch = host, rank, epoch
        self._ours, self._theirs = socket.socketpair()
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.process_id = 0
        self.ending = f"but {host.name} has not said so"

    def fileno(self) -> int:
        return self._ours.fileno()

    @property
    def host(self) -> str:
        return self._host.name

    def send(self, packed: bytes) -> None:
        self._host.send(Frame(FrameKind.MESSAGE, self._rank, self._epoch, size=len(packed)), packed)

    def receive(self) -> ToLeader:
        data = self._messages.get()
        if data is None:
            self._messages.put(None)
            raise EOFError(self.ending)
        try:
            message: ToLeader = unpack(data)
        except pickle.UnpicklingError as error:
            self._host.lose(str(error))
            raise EOFError(self.ending) from error
        return message

    def kill(self) -> None:
        self._host.tell(Frame(FrameKind.KILL, self._rank, self._epoch))

    def wait(self, timeout_s: float | None) -> bool:
        """See `RankProcess.wait`. NOTE: a host that does not report the end in time is lost, and its ranks with it."""
        if timeout_s is None and not self._ended.wait(_END_S):
            self._host.lose(f"it has not ended rank {self._rank} within {_END_S:g} s")
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        self._host.end(self._epoch)
        self._ours.close()

    def take(self, data: bytes) -> None:
        """Receives a message from the rank. Raises `TransportError` if too many messages wait."""
        if self._messages.qsize() >= _MAX_UNREAD:
            raise TransportError(f"rank {self._rank} has said {_MAX_UNREAD} messages that nobody waits for")
        self._messages.put(data)

    def end(self, words: str) -> None:
        """Records that the rank has ended; `words`: the reason. Has no effect if repeated."""
        with self._lock:
            if self._ended.is_set():
                return
            self.ending = words
            self._ended.set()
        self._messages.put(None)
        self._theirs.close()


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch of a host's ranks. `others`: the hosts to which their exchanges are forwarded."""

    number: int
    mirror: LinksMirror
    ranks: Mapping[int, RemoteRank]
    others: Sequence["RemoteHost"]
    has_started: threading.Event


class RemoteHost:
    """A host that has joined, with the ranks of the group that `place` assigns to it.

    `on_lost` is called once on a thread of its own, `on_leaving` when it is to be stopped.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        place: HostPlace,
        on_lost: Callable[["RemoteHost"], None],
        on_leaving: Callable[["RemoteHost"], None],
    ) -> None:
        self.name, self._link = name, link
        self.place = place
        self._on_lost, self._on_leaving = on_lost, on_leaving
        self._lock = threading.Lock()
        self._epoch: _Epoch | None = None
        self._ended = -1  # the last epoch whose ranks it was told to end
        self._calls: dict[int, OnAnswer] = {}
        self._num_calls = 0
        self.lost: str | None = None
        self._does: dict[FrameKind, Callable[[Frame], None]] = {
            FrameKind.PUBLISH: self._publish,
            FrameKind.MESSAGE: self._take,
            FrameKind.BEATS: self._beat,
            FrameKind.STARTED: self._start,
            FrameKind.LOST: self._lose_rank,
            FrameKind.ENDED: self._end,
            FrameKind.LEAVING: self._leave,
            FrameKind.KV_ANSWER: self._take_answer,
        }
        self.tell(Frame(FrameKind.PLACE, size=PLACE.size), PLACE.pack(*astuple(place)))
        self._thread = threading.Thread(target=self._read, name="tandem-host", daemon=True)
        self._thread.start()

    def begin(self, number: int, mirror: LinksMirror, others: Sequence["RemoteHost"]) -> Mapping[int, RemoteRank]:
        """Starts the host's ranks of epoch `number`. Data that they publish go into `mirror`, for the ranks here, and
        to the hosts `others`. Raises `RanksLostError` if the host is lost.
        """
        with self._lock:
            self.check()
            ranks = {rank: RemoteRank(self, rank, number) for rank in self.place.ranks}
            epoch = self._epoch = _Epoch(number, mirror, ranks, others, threading.Event())
        self.tell(Frame(FrameKind.BEGIN, epoch=number))
        if not epoch.has_started.wait(_START_S):
            self.lose(f"it has not started its ranks within {_START_S:g} s")
        if self.lost is not None:
            for rank in ranks.values():
                rank.close()
        self.check()
        return ranks

    def check(self) -> None:
        """Raises `RanksLostError` if the host is lost."""
        if self.lost is not None:
            raise RanksLostError(
                f"{self.name} is lost, and the KV of its ranks with it: {self.lost}; this worker has to be started "
                "again, and waits for its hosts then"
            )

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """Sends a frame. Raises OSError if the host is lost."""
        try:
            self._link.send(frame, payload)
        except OSError as error:
            self.lose(f"nothing can be sent to it: {error}")
            raise

    def tell(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """Sends a frame without raising; a loss of the host is noticed elsewhere."""
        try:
            self.send(frame, payload)
        except OSError as error:
            _log.debug("%s was not told: %s", self.name, error)

    def end(self, number: int) -> None:
        """Ends the host's ranks of an epoch. Harmless if repeated."""
        with self._lock:
            if number <= self._ended:
                return
            self._ended = number
        self.tell(Frame(FrameKind.END, epoch=number))

    def call(self, call: KVCall, on_answer: OnAnswer) -> None:
        """Calls the host about its KV. `on_answer` gets each answer, on another thread, and `Failed` once the host is
        lost.
        """
        with self._lock:
            lost = self.lost
            self._num_calls += 1
            number = self._num_calls
            if lost is None:
                self._calls[number] = on_answer
        if lost is not None:
            on_answer(Failed(f"{self.name} is lost: {lost}"))
            return
        data = pack(call)
        self.tell(Frame(FrameKind.KV_CALL, number=number, size=len(data)), data)

    def ask(self, call: KVCall) -> "Future[KVAnswer]":
        """Like `call`, for a call with one answer."""
        future: Future[KVAnswer] = Future()
        self.call(call, future.set_result)
        return future

    def lose(self, why: str) -> None:
        """Gives the host up, for this reason: ends its link, ranks and calls."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost, epoch = why, self._epoch
            calls, self._calls = self._calls, {}
        self._link.close()
        for on_answer in calls.values():
            on_answer(Failed(f"{self.name} is lost: {why}"))
        if epoch is not None:
            for rank in epoch.ranks.values():
                rank.end(f"with {self.name}: {why}")
            epoch.has_started.set()
        self._on_lost(self)

    def close(self) -> None:
        """Ends the link and waits until its thread has ended."""
        self._link.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _read(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                does = self._does.get(frame.kind)
                if does is None:
                    raise TransportError(f"it says {frame.kind.name}, which is for leaders to say")
                does(frame)
        except (OSError, TransportError, ValueError) as error:
            self.lose(str(error))
        finally:
            self._link.release()

    def _current(self, frame: Frame) -> _Epoch | None:
        epoch = self._epoch
        return epoch if epoch is not None and epoch.number == frame.epoch else None

    def _rank(self, epoch: _Epoch, frame: Frame) -> RemoteRank:
        if frame.rank not in epoch.ranks:
            raise TransportError(f"it speaks for rank {frame.rank}, which it does not have")
        return epoch.ranks[frame.rank]

    def _publish(self, frame: Frame) -> None:
        epoch = self._current(frame)
        if epoch is None:
            self._link.receive_bytes(frame.size)
            return
        lane, mirror = frame.rank, epoch.mirror
        if mirror.rank_of(lane) not in epoch.ranks:
            raise TransportError(f"it speaks for rank {mirror.rank_of(lane)}, which it does not have")
        view = mirror.room_for(lane, frame.number, frame.size)
        self._link.receive_into(view)
        mirror.publish(lane, frame.size)
        for other in epoch.others:
            if mirror.is_read_by(lane, other.place.ranks):
                other.tell(frame, view)

    def _take(self, frame: Frame) -> None:
        if frame.size > _MAX_RANK_MESSAGE_BYTES:
            raise TransportError(f"it says a message of {frame.size} bytes for rank {frame.rank}")
        data = self._link.receive_bytes(frame.size)
        epoch = self._current(frame)
        if epoch is not None:
            self._rank(epoch, frame).take(data)

    def _beat(self, frame: Frame) -> None:
        """NOTE: without an epoch there are no counts."""
        if not frame.size:
            return
        counts = self._numbers(frame, self.place.num_ranks)
        epoch = self._current(frame)
        if epoch is not None:
            for rank in epoch.ranks:
                epoch.mirror.set_beats(rank, counts[rank])

    def _start(self, frame: Frame) -> None:
        process_ids = self._numbers(frame, self.place.num_here)
        epoch = self._current(frame)
        if epoch is not None:
            for rank, process_id in zip(epoch.ranks.values(), process_ids, strict=True):
                rank.process_id = process_id
            epoch.has_started.set()

    def _lose_rank(self, frame: Frame) -> None:
        if frame.size > MAX_REASON_BYTES:
            raise TransportError(f"it says in {frame.size} bytes how rank {frame.rank} has ended")
        words = self._link.receive_bytes(frame.size).decode(errors="replace")
        if not words.isprintable():
            raise TransportError(f"it says how rank {frame.rank} has ended in words that cannot be shown")
        epoch = self._current(frame)
        if epoch is not None:
            self._rank(epoch, frame).end(f"{words} on {self.name}")

    def _end(self, frame: Frame) -> None:
        epoch = self._current(frame)
        if epoch is not None:
            for rank in epoch.ranks.values():
                rank.end("as it was told")

    def _take_answer(self, frame: Frame) -> None:
        if frame.size > _MAX_ANSWER_BYTES:
            raise TransportError(f"it answers call {frame.number} in {frame.size} bytes")
        try:
            answer = unpack(self._link.receive_bytes(frame.size))
        except pickle.UnpicklingError as error:
            raise TransportError(str(error)) from error
        if not isinstance(answer, KVAnswer):
            raise TransportError(f"it answers call {frame.number} by {type(answer).__name__}")
        is_last = not isinstance(answer, ReadEnded) or answer.is_over
        with self._lock:
            on_answer = self._calls.pop(frame.number, None) if is_last else self._calls.get(frame.number)
        if on_answer is None:
            raise TransportError(f"it answers call {frame.number}, which nobody has made")
        on_answer(answer)

    def _leave(self, _: Frame) -> None:
        self._on_leaving(self)

    def _numbers(self, frame: Frame, count: int) -> Sequence[int]:
        if frame.size != count * NUMBER.size:
            raise TransportError(f"it says {frame.kind.name} with {frame.size} bytes, for {count} ranks")
        found: list[Any] = [value for (value,) in NUMBER.iter_unpack(self._link.receive_bytes(frame.size))]
        return found
