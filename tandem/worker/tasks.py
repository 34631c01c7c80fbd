"""Ending what was begun on a request's behalf."""

import asyncio


async def ended(*tasks: "asyncio.Task[None]") -> None:
    """Cancel those that still run, and wait for all; what they raise is theirs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
