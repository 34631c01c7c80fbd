"""The simulation's Redis at a real port, for clients that wait in threads."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from tandem.simulation.redis import SimulatedRedis


@contextlib.contextmanager
def serving_simulated_redis(wall_s: Callable[[], float]) -> Iterator[str]:
    """Its URL, for the time of the block."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(SimulatedRedis(wall_s).session, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, name="simulated Redis")
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
