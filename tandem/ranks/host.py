"""A further host of a group of ranks, run by `services.rank_host`: starts ranks as the leader (rank 0, the worker's own
process) says, and relays their messages.

It decides nothing about steps. When its link to the leader ends, so do its ranks; then it joins again. The KV of its
ranks outlives an epoch, but not the link.
"""

import contextlib
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tandem.compute import shared_pages
from tandem.compute.native.links_layout import make_links_memory
from tandem.compute.native.links_mirror import HostPlace, LinksMirror
from tandem.core.errors import ConfigurationError, TransportError
from tandem.core.machine import random_id
from tandem.ranks.forwarding import forward
from tandem.ranks.frames import NUMBER, PLACE, Frame, FrameKind
from tandem.ranks.heartbeat import BEAT_S, SILENCE_S
from tandem.ranks.host_kv import HostKV, KVEndpoint
from tandem.ranks.kv_messages import KVAnswer, KVCall
from tandem.ranks.link import Link
from tandem.ranks.messages import pack, unpack
from tandem.ranks.rank_process import END_S, LocalRank, await_ends
from tandem.ranks.rendezvous import Direction, Proof, join

LEADER_SILENCE_S = 20.0  # then the leader counts as lost. NOTE: one that loads weights is busy; an end is seen at once
_JOIN_AGAIN_S = 1.0  # between two attempts to join

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Ranks of this host in one epoch, with the threads that relay for them."""

    number: int
    place: HostPlace
    mirror: LinksMirror
    ranks: Mapping[int, LocalRank]
    threads: list[threading.Thread] = field(default_factory=list)


class RankHost:
    """Joins the leader at `address`, serves it, and joins again when it has ended, until `leave`.

    Args:
        proof: credentials of this process.
        release: versions that the leader must have too.
        endpoint: where other workers read the KV of its ranks.
    """

    def __init__(self, address: tuple[str, int], proof: Proof, release: str, endpoint: KVEndpoint) -> None:
        self._address, self._proof, self._release, self._endpoint = address, proof, release, endpoint
        self._is_leaving = threading.Event()
        self._link: Link | None = None
        self.has_joined = False

    def leave(self) -> None:
        """Asks the leader to drain. `serve` returns once that leader has ended."""
        self._is_leaving.set()
        link = self._link
        if link is not None:
            with contextlib.suppress(OSError):
                link.send(Frame(FrameKind.LEAVING))

    def serve(self) -> None:
        """Serves leaders; returns after `leave`.

        Raises:
            ConfigurationError: the leader refuses it for good.
        """
        complaint = ""
        while not self._is_leaving.is_set():
            try:
                with self._joined() as link:
                    complaint = ""
                    if not self._is_leaving.is_set():
                        HostSession(link, self._endpoint, self._set_joined).run()
            except (TransportError, OSError) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    _log.warning("%s", complaint)
            self._is_leaving.wait(_JOIN_AGAIN_S)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[Link]:
        host_id = bytes.fromhex(random_id())
        incoming, is_in = join(self._address, self._proof, host_id, Direction.TO_HOST, self._release)
        try:
            outgoing, is_out = join(self._address, self._proof, host_id, Direction.TO_LEADER, self._release)
        except (TransportError, ConfigurationError):
            incoming.close()
            raise
        link = self._link = Link(incoming, outgoing, lambda: is_in() and is_out(), LEADER_SILENCE_S)
        try:
            yield link
        finally:
            self._link, self.has_joined = None, False
            link.release()

    def _set_joined(self) -> None:
        self.has_joined = True


class HostSession:
    """Starts and stops ranks of this host for one leader, and relays their messages. `on_place`: called when the leader
    has assigned this host its place, the numbers of its ranks.
    """

    def __init__(self, link: Link, endpoint: KVEndpoint, on_place: Callable[[], None]) -> None:
        self._link, self._on_place = link, on_place
        self._kv_memory = shared_pages.make_memory()
        self._kv = HostKV(endpoint, self._kv_memory, self._answer)
        self._place: HostPlace | None = None
        self._epoch: _Epoch | None = None
        self._closed = threading.Event()
        self._does: dict[FrameKind, Callable[[Frame], None]] = {
            FrameKind.PLACE: self._take_place,
            FrameKind.KV: self._size_kv,
            FrameKind.BEGIN: self._begin,
            FrameKind.MESSAGE: self._pass_on,
            FrameKind.PUBLISH: self._mirror,
            FrameKind.KILL: self._kill,
            FrameKind.END: self._end,
            FrameKind.KV_CALL: self._take_call,
            FrameKind.BEATS: lambda frame: None,
        }

    def run(self) -> None:
        """Serves until the link ends, which raises; then no process of a rank is left.

        Raises:
            TransportError: the leader has ended, or does not follow the protocol.
            OSError: the connection broke.
        """
        beats = threading.Thread(target=self._beat, name="tandem-host-beat", daemon=True)
        beats.start()
        try:
            while True:
                frame = self._link.receive()
                does = self._does.get(frame.kind)
                if does is None:
                    raise TransportError(f"the leader says {frame.kind.name}, which is for hosts to say")
                does(frame)
        except (ValueError, OverflowError) as error:
            raise TransportError(f"the leader does not follow the protocol: {error}") from error
        except TransportError as error:
            raise TransportError(f"the link to the leader has ended: {error}") from error
        finally:
            self._link.close()
            self._closed.set()
            self._end_ranks()
            self._kv.close()
            beats.join()
            os.close(self._kv_memory)

    def _take_place(self, frame: Frame) -> None:
        place = self._link.receive_bytes(frame.size)
        if len(place) != PLACE.size:
            raise TransportError(f"a place of {len(place)} bytes")
        own = HostPlace(*PLACE.unpack(place))
        if not own.is_possible:
            raise TransportError(f"a place that no host of a group has: {own}")
        self._place = own
        _log.info("joined with ranks %d to %d of %d", own.first, own.ranks.stop - 1, own.num_ranks)
        self._on_place()

    def _size_kv(self, frame: Frame) -> None:
        shared_pages.set_size(self._kv_memory, frame.number)

    def _take_call(self, frame: Frame) -> None:
        try:
            call = unpack(self._link.receive_bytes(frame.size))
        except pickle.UnpicklingError as error:
            raise TransportError(f"the leader does not follow the protocol: {error}") from error
        if not isinstance(call, KVCall):
            raise TransportError(f"the leader says {type(call).__name__}, which is no call")
        self._kv.take(frame.number, call)

    def _answer(self, number: int, answer: KVAnswer) -> None:
        """NOTE: a failure to send is ignored, since a leader that has ended needs no answer."""
        data = pack(answer)
        with contextlib.suppress(OSError):
            self._link.send(Frame(FrameKind.KV_ANSWER, number=number, size=len(data)), data)

    def _begin(self, frame: Frame) -> None:
        self._end_ranks()
        place = self._place
        if place is None:
            raise TransportError("ranks are to be started before there is a place for them")
        memory = make_links_memory(place.num_ranks, place.num_sections)
        try:
            mirror = LinksMirror(memory, place)
            ranks = {rank: LocalRank(memory, self._kv_memory, SILENCE_S) for rank in place.ranks}
        finally:
            os.close(memory)
        epoch = self._epoch = _Epoch(frame.epoch, place, mirror, ranks)
        process_ids = b"".join(NUMBER.pack(process.process_id) for process in ranks.values())
        self._link.send(Frame(FrameKind.STARTED, epoch=epoch.number, size=len(process_ids)), process_ids)

        def publish(lane: int, number: int, view: memoryview) -> None:
            self._link.send(Frame(FrameKind.PUBLISH, lane, epoch.number, number, len(view)), view)

        for rank, process in ranks.items():
            pump = threading.Thread(
                target=self._pump, args=(epoch, rank, process), name=f"tandem-rank-{rank}", daemon=True
            )
            pump.start()
            epoch.threads.append(pump)
        epoch.threads.extend(forward(mirror, lane, publish) for lane in mirror.lanes_of(place.ranks))

    def _pump(self, epoch: _Epoch, rank: int, process: LocalRank) -> None:
        """Relays a rank's messages to the leader, and at last that it has ended."""
        try:
            while True:
                data = process.connection.recv_bytes()
                self._link.send(Frame(FrameKind.MESSAGE, rank, epoch.number, size=len(data)), data)
        except (EOFError, OSError):
            process.wait(END_S)
            words = process.ending.encode()
            with contextlib.suppress(OSError):
                self._link.send(Frame(FrameKind.LOST, rank, epoch.number, size=len(words)), words)

    def _current(self, frame: Frame) -> _Epoch | None:
        epoch = self._epoch
        return epoch if epoch is not None and epoch.number == frame.epoch else None

    def _pass_on(self, frame: Frame) -> None:
        """Sends a leader's message to a rank; kills a rank that does not take it in time."""
        data = self._link.receive_bytes(frame.size)
        epoch = self._current(frame)
        process = None if epoch is None else epoch.ranks.get(frame.rank)
        if process is not None:
            try:
                process.connection.send_bytes(data)
            except OSError:
                process.kill()

    def _mirror(self, frame: Frame) -> None:
        epoch = self._current(frame)
        if epoch is None:
            self._link.receive_bytes(frame.size)
            return
        rank = epoch.mirror.rank_of(frame.rank)
        if rank in epoch.ranks or not epoch.mirror.is_read_by(frame.rank, epoch.place.ranks):
            raise TransportError(f"bytes of rank {rank} come from elsewhere")
        self._link.receive_into(epoch.mirror.room_for(frame.rank, frame.number, frame.size))
        epoch.mirror.publish(frame.rank, frame.size)

    def _kill(self, frame: Frame) -> None:
        epoch = self._current(frame)
        process = None if epoch is None else epoch.ranks.get(frame.rank)
        if process is not None:
            process.kill()

    def _end(self, frame: Frame) -> None:
        if self._current(frame) is not None:
            self._end_ranks()
        self._link.send(Frame(FrameKind.ENDED, epoch=frame.epoch))

    def _end_ranks(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        epoch.mirror.end()
        for process in epoch.ranks.values():
            process.hang_up()
        await_ends(epoch.ranks.values())
        for thread in epoch.threads:
            thread.join()
        for process in epoch.ranks.values():
            process.close()

    def _beat(self) -> None:
        """Sends the leader the heartbeats of this host and its ranks, regularly."""
        while not self._closed.wait(BEAT_S):
            epoch = self._epoch
            counts = b"" if epoch is None else b"".join(NUMBER.pack(count) for count in epoch.mirror.beats)
            frame = Frame(FrameKind.BEATS, epoch=0 if epoch is None else epoch.number, size=len(counts))
            with contextlib.suppress(OSError):
                self._link.send(frame, counts)
