"""Addresses and links of this machine, by the `ip` command. Changes want root."""

from __future__ import annotations

import asyncio
import json


async def add_loopback_address(address: str) -> None:
    """Make an address this machine's. Raises RuntimeError where we may not."""
    code, words = await ip("address", "replace", f"{address}/32", "dev", "lo")
    if code:
        raise RuntimeError(f"{address} cannot be put on the loopback device: {words.strip()}; Services want root")


async def remove_loopback_address(address: str) -> None:
    """Take it off again; nothing happens when it is not there."""
    await ip("address", "delete", f"{address}/32", "dev", "lo")


async def delete_links_with(address: str) -> None:
    """Delete the bridge that has this address, if there is one."""
    _, listing = await ip("-json", "address", "show")
    for link in json.loads(listing):
        if any(one.get("local") == address for one in link["addr_info"]):
            await ip("link", "delete", link["ifname"])


async def ip(*arguments: str) -> tuple[int, str]:
    """The exit code and what was printed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("ip", *arguments, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()
