"""The other hosts of a group, as the leader has them: waits until they have joined, then sends to all of them.

Only the leader listens, at the address that it was given, and only until all hosts have joined.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tandem.compute.native.links_mirror import HostPlace, LinksMirror
from tandem.core.errors import ConfigurationError, RanksLostError, TransportError
from tandem.core.machine import monotonic_s
from tandem.ranks.forwarding import forward
from tandem.ranks.frames import Frame, FrameKind
from tandem.ranks.heartbeat import BEAT_S
from tandem.ranks.link import Link
from tandem.ranks.rank_process import RankProcess
from tandem.ranks.remote import RemoteHost
from tandem.ranks.rendezvous import Direction, JoiningHost, Proof, admit, own_release

_COMPLAINT_INTERVAL_S = 60.0  # NOTE: a host that is refused, or a stranger, comes again at once
_MAX_HANDSHAKES = 64  # at once; also the most hosts of which one connection is there and the other is not

_log = logging.getLogger(__name__)


def _nobody() -> None:
    """Default of `on_leaving`."""


def _are_accepted(one: JoiningHost, other: JoiningHost) -> bool:
    return one.is_accepted() and other.is_accepted()


class HostGroup:
    """Accepts `num_hosts - 1` other hosts at `bind`. The `num_ranks` ranks are divided evenly among hosts; the leader's
    host has the first ones.

    Args:
        bind: host and port; port 0 = any free one.
        num_stages, num_contexts: of the group; hosts have whole stages, if there are several.
        release: what hosts must have too; None = this process's.

    `on_leaving` is called, on a thread of its own, when one of the hosts is to be stopped.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """

    def __init__(
        self,
        bind: tuple[str, int],
        proof: Proof,
        num_hosts: int,
        num_ranks: int,
        *,
        num_stages: int = 1,
        num_contexts: int = 1,
        release: str | None = None,
    ) -> None:
        self._proof, self._num_hosts = proof, num_hosts
        self._release = own_release() if release is None else release
        self.place = HostPlace(0, num_ranks // num_hosts, num_ranks, num_stages, num_contexts)
        self.on_leaving: Callable[[], None] = _nobody
        self._hosts: dict[int, RemoteHost] = {}
        self._halves: dict[bytes, JoiningHost] = {}
        self._num_handshakes = 0
        self._complain_at_s: dict[type[Exception], float] = {}
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._mirror: LinksMirror | None = None
        self._forwarders: list[threading.Thread] = []
        try:
            family = socket.AF_INET6 if ":" in bind[0] else socket.AF_INET
            self._listener = socket.create_server(bind, family=family)
        except OSError as error:
            raise ConfigurationError(
                f"hosts cannot join at {bind[0]}:{bind[1]}: {error}; choose another --ranks-bind"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="tandem-join", daemon=True)
        self._acceptor.start()
        threading.Thread(target=self._beat, name="tandem-host-beat", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Waits until all hosts have joined, then stops listening.

        Raises:
            ConfigurationError: they have not in time.
        """
        limit_s = monotonic_s() + timeout_s
        with self._changed:
            while self._num_there < self._num_hosts:
                if not self._changed.wait(max(0.0, limit_s - monotonic_s())) and monotonic_s() >= limit_s:
                    raise ConfigurationError(
                        f"{self._num_there} of {self._num_hosts} hosts are there after {timeout_s:g} s: start "
                        f"`python -m services.rank_host --leader` with this host's address and port {self.port} on the "
                        "others, or give a longer --join-timeout-s"
                    )
        self._stop_listening()

    def begin(self, epoch: int, memory: int) -> Mapping[int, RankProcess]:
        """Starts the ranks of an epoch on all other hosts, and mirrors exchanges with them in `memory`, that of the
        ranks here.

        Raises:
            RanksLostError: a host is lost.
        """
        self._end_forwarding()
        mirror = self._mirror = LinksMirror(memory, self.place)
        ranks: dict[int, RankProcess] = {}
        with self._changed:
            hosts = self.others
        try:
            for host in hosts:
                ranks |= host.begin(epoch, mirror, [other for other in hosts if other is not host])
        except RanksLostError:
            for process in ranks.values():
                process.close()
            raise

        def send(lane: int, number: int, view: memoryview) -> None:
            for host in hosts:
                if mirror.is_read_by(lane, host.place.ranks):
                    host.tell(Frame(FrameKind.PUBLISH, lane, epoch, number, len(view)), view)

        self._forwarders = [forward(mirror, lane, send) for lane in mirror.lanes_of(self.place.ranks)]
        return ranks

    def set_kv_bytes(self, num_bytes: int) -> None:
        """Tells all hosts the size of the KV memory of all ranks; each host fills its own ranks' part."""
        for host in self._hosts.values():
            host.tell(Frame(FrameKind.KV, number=num_bytes))

    @property
    def others(self) -> Sequence[RemoteHost]:
        """The other hosts, in the order of their ranks."""
        return [host for _, host in sorted(self._hosts.items())]

    def close(self) -> None:
        """Stops listening and ends all links. Harmless if repeated."""
        self._closed.set()
        self._stop_listening()
        for host in list(self._hosts.values()):
            host.close()
        self._end_forwarding()

    def _end_forwarding(self) -> None:
        """Ends the threads that forward an epoch's exchanges. NOTE: the leader ends only those in which it takes part;
        the threads of other ranks' pipes would wait for ever.
        """
        if self._mirror is not None:
            self._mirror.end()
        for thread in self._forwarders:
            thread.join()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            for host in list(self._hosts.values()):
                if host.lost is None:
                    host.tell(Frame(FrameKind.BEATS))

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._changed:
            for half in self._halves.values():
                half.connection.close()
            self._halves.clear()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._closed.is_set() or len(self._hosts) == self._num_hosts - 1:
                    return
                _log.warning("cannot accept a host: %s", error)
                if self._closed.wait(BEAT_S):  # NOTE: out of file descriptors is no reason to spin or to stop
                    return
                continue
            with self._changed:
                is_served = self._num_handshakes < _MAX_HANDSHAKES
                self._num_handshakes += is_served
            if not is_served:
                connection.close()
                continue
            where = f"{address[0]}:{address[1]}"
            thread = threading.Thread(target=self._admit, args=(connection, where), name="tandem-admit", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # NOTE: out of threads is no reason to stop either
                _log.warning("cannot accept a host: %s", error)
                connection.close()
                with self._changed:
                    self._num_handshakes -= 1

    def _admit(self, connection: socket.socket, address: str) -> None:
        try:
            half = admit(connection, address, self._proof, self._release, self._why_full)
        except (OSError, TransportError) as error:
            self._complain(error)
        else:
            self._pair(half)
        finally:
            with self._changed:
                self._num_handshakes -= 1

    def _complain(self, error: Exception) -> None:
        """Logs an error unless one of its class was logged within the last minute."""
        now_s = monotonic_s()
        with self._changed:
            is_due = now_s >= self._complain_at_s.get(type(error), now_s)
            if is_due:
                self._complain_at_s[type(error)] = now_s + _COMPLAINT_INTERVAL_S
        _log.log(logging.WARNING if is_due else logging.DEBUG, "a host could not join: %s", error)

    def _why_full(self, _: bytes) -> str | None:
        with self._changed:
            return f"all {self._num_hosts} hosts are there" if self._num_there == self._num_hosts else None

    @property
    def _num_there(self) -> int:
        """Number of joined hosts, the leader's included. NOTE: lost ones are still listed for a moment; they do not
        count.
        """
        return 1 + sum(host.lost is None for host in self._hosts.values())

    def _pair(self, half: JoiningHost) -> None:
        """Takes one of a host's two connections; the host has joined once both have come."""
        with self._changed:
            other = self._halves.pop(half.host_id, None)
            if other is None and self._listener.fileno() >= 0:
                if len(self._halves) == _MAX_HANDSHAKES:  # of hosts that ended between their two connections
                    self._halves.pop(next(iter(self._halves))).connection.close()
                self._halves[half.host_id] = half
                return
            there = {place for place, host in self._hosts.items() if host.lost is None}
            places = [place for place in range(1, self._num_hosts) if place not in there]
            if other is None or not places or other.direction == half.direction:
                for each in (half, other):
                    if each is not None:
                        each.connection.close()
                return
            to_host, to_leader = sorted((half, other), key=lambda each: each.direction)
            assert to_host.direction == Direction.TO_HOST
            link = Link(to_leader.connection, to_host.connection, partial(_are_accepted, half, other))
            name = f"host {places[0]} of {self._num_hosts} ({half.address.rpartition(':')[0]})"
            place = replace(self.place, first=places[0] * self.place.num_here)
            self._hosts[places[0]] = RemoteHost(name, link, place, self._lose, self._tell_leaving)
            self._changed.notify_all()
        _log.info("%s has joined with ranks %d to %d", name, place.ranks.start, place.ranks.stop - 1)

    def _lose(self, lost: RemoteHost) -> None:
        """Handles the loss of a host. NOTE: before all have joined, another host may take its place."""
        if not self._closed.is_set():
            _log.critical("%s is lost: %s", lost.name, lost.lost)

        def forget() -> None:
            with self._changed:
                if len(self._hosts) < self._num_hosts - 1:
                    for place in [place for place, host in self._hosts.items() if host is lost]:
                        del self._hosts[place]

        threading.Thread(target=forget, name="tandem-forget", daemon=True).start()

    def _tell_leaving(self, host: RemoteHost) -> None:
        """Handles that a host is to be stopped. NOTE: before all have joined, it is just dropped, and another may take
        its place.
        """
        with self._changed:
            is_complete = len(self._hosts) == self._num_hosts - 1
        if not is_complete:
            host.lose("it is to be stopped")
            return
        _log.warning("%s is to be stopped: this worker drains", host.name)
        self.on_leaving()
