"""Cancels tasks begun on behalf of a request, and waits for their end."""

import asyncio


async def ended(*tasks: "asyncio.Task[None]") -> None:
    """Cancels running tasks and waits for all; their exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
