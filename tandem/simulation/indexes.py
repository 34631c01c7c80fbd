"""Locality indexes of routers, as workers reach them from their threads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.core.errors import LocalityUnavailableError
from tandem.core.events import BlockEvent
from tandem.locality.base import LocalityIndex, LocalityStats, PublishResult
from tandem.simulation.fabric import Fabric
from tandem.simulation.node import Node


@dataclass(frozen=True, slots=True)
class RoutedIndex:
    """A router's own index."""

    node: Node
    index: LocalityIndex


class SimulatedRouterIndex:
    """The index of the router at `address`, for a worker; `worker.feeds.RouterIndex` would block. A call takes a delay,
    and fails where nothing answers.
    """

    def __init__(self, routers: Mapping[str, RoutedIndex], fabric: Fabric, node: Node, address: str) -> None:
        self._routers, self._fabric, self._node, self._address = routers, fabric, node, address

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        return self._reached().publish(worker_id, epoch, events, sequence)

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> PublishResult:
        return self._reached().replace(worker_id, epoch, sorted(hashes), sequence)

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        return self._reached().leading_blocks(hashes)

    def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        return self._reached().resumable_blocks(hashes, leading)

    def remove_worker(self, worker_id: str) -> None:
        self._reached().remove_worker(worker_id)

    def stats(self) -> LocalityStats:
        return self._reached().stats()

    def _reached(self) -> LocalityIndex:
        self._fabric.loop.spend(self._fabric.delay_s())
        router = self._routers.get(self._address)
        if router is None or router.node.is_paused or not self._fabric.can_talk(self._node.name, router.node.name):
            raise LocalityUnavailableError(f"the router at {self._address} does not answer")
        return router.index
