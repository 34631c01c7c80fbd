"""Stands in for kube-proxy and the cluster's DNS: every Service has its own address here, and follows its ready pods.

Each cluster IP is put on this machine's loopback device, where a small proxy listens; pods reach it over the bridge.
Needs root. What is put on the device is taken off again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tools.kubernetes.api import Api, Object
from tools.kubernetes.control_plane import API_SERVICE_ADDRESS, DNS_ADDRESS
from tools.kubernetes.dns import DnsProtocol
from tools.kubernetes.links import add_loopback_address, remove_loopback_address
from tools.kubernetes.proxy import Endpoint, PortProxy

_DOMAIN = ".svc.cluster.local"
_HEADLESS = "None"
ServiceKey = tuple[str, str]


class Services:
    """Follows Services and Endpoints. `api_port` is where the API server listens on loopback."""

    def __init__(self, api: Api, api_port: int) -> None:
        self.ready = asyncio.Event()
        self._api = api
        self._api_port = api_port
        self._services: dict[ServiceKey, Object] = {}
        self._endpoints: dict[ServiceKey, Object] = {}
        self._proxies: dict[tuple[str, int], PortProxy] = {}
        self._addresses: set[str] = set()

    def objects(self) -> list[Object]:
        """All Services that are known now."""
        return list(self._services.values())

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._add_address(DNS_ADDRESS)
        loop = asyncio.get_running_loop()
        dns, _ = await loop.create_datagram_endpoint(lambda: DnsProtocol(self.lookup), (DNS_ADDRESS, 53))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_services())
                group.create_task(self._follow_endpoints())
        finally:
            dns.close()
            await asyncio.gather(*(proxy.stop() for proxy in self._proxies.values()))
            for address in list(self._addresses):
                await self._remove_address(address)

    def lookup(self, name: str) -> list[str] | None:
        """The addresses of a Service's name, or of one pod's behind a headless Service; None when there is no such."""
        if not name.endswith(_DOMAIN):
            return None
        labels = name.removesuffix(_DOMAIN).split(".")
        if len(labels) not in (2, 3):
            return None
        key = (labels[-1], labels[-2])
        service = self._services.get(key)
        if service is None:
            return None
        address = service["spec"].get("clusterIP")
        if address not in (None, "", _HEADLESS):
            return [address] if len(labels) == 2 else None
        ready = ready_addresses(self._endpoints.get(key))
        if len(labels) == 2:
            return [one["ip"] for one in ready]
        return [one["ip"] for one in ready if one.get("hostname") == labels[0]] or None

    def endpoints(self, key: ServiceKey, port_name: str | None) -> list[Endpoint]:
        """Ready endpoints of one port of a Service."""
        if key == ("default", "kubernetes"):
            return [("127.0.0.1", self._api_port)]
        return [
            (address["ip"], port["port"])
            for subset in (self._endpoints.get(key) or {}).get("subsets") or []
            for port in subset.get("ports", [])
            if port.get("name") == port_name
            for address in subset.get("addresses") or []
        ]

    async def _follow_endpoints(self) -> None:
        async for objects in self._api.follow("/api/v1/endpoints"):
            self._endpoints = by_key(objects)

    async def _follow_services(self) -> None:
        async for objects in self._api.follow("/api/v1/services"):
            self._services = by_key(objects)
            wanted = {
                (service["spec"]["clusterIP"], port["port"]): (key, port.get("name"))
                for key, service in self._services.items()
                if service["spec"].get("clusterIP") not in (None, "", _HEADLESS)
                for port in service["spec"].get("ports", [])
            }
            await self._follow_ports(wanted)
            self.ready.set()

    async def _follow_ports(self, wanted: Mapping[tuple[str, int], tuple[ServiceKey, str | None]]) -> None:
        for place in set(self._proxies) - set(wanted):
            await self._proxies.pop(place).stop()
        for place in set(wanted) - set(self._proxies):
            await self._add_address(place[0])
            key, name = wanted[place]
            proxy = PortProxy(*place, lambda key=key, name=name: self.endpoints(key, name))  # type: ignore[misc]
            await proxy.start()
            self._proxies[place] = proxy
        for address in self._addresses - {address for address, _ in wanted} - {DNS_ADDRESS, API_SERVICE_ADDRESS}:
            await self._remove_address(address)

    async def _add_address(self, address: str) -> None:
        if address not in self._addresses:
            await add_loopback_address(address)
            self._addresses.add(address)

    async def _remove_address(self, address: str) -> None:
        await remove_loopback_address(address)
        self._addresses.discard(address)


def ready_addresses(endpoints: Object | None) -> list[Object]:
    """Addresses of the pods that are ready."""
    subsets = (endpoints or {}).get("subsets") or []
    return [address for subset in subsets for address in subset.get("addresses") or []]


def by_key(objects: Mapping[str, Object]) -> dict[ServiceKey, Object]:
    """Objects by namespace and name."""
    return {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in objects.values()}
