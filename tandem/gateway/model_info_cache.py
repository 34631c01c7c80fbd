"""Cached description of the one model that a gateway serves: context length, vocabulary, sampling defaults.

A task asks the routers for it every second. Invariant: once a description is known, `get` never waits for a router and
may return a stale one; before that, requests wait for it as they wait for a worker. If workers serve several versions
of the model, the one with the most decode workers is described.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from tandem.core.errors import IncompatibleProtocolError, TandemError, UnavailableError, UntrustedPeerError
from tandem.gateway.routers import Routers
from tandem.rpc.messages import ModelInfo

REFRESH_S = 1.0  # between two refreshes
_RETRY_S = 0.25  # the same before the first description

_logger = logging.getLogger(__name__)


class ModelInfoCache:
    """Description of the model `name`, reported by its workers through the routers.

    Args:
        wait_s: how long `get` waits for the first description.
    """

    def __init__(self, routers: Routers, name: str, wait_s: float) -> None:
        self._routers = routers
        self._name = name
        self._wait_s = wait_s
        self._info: ModelInfo | None = None
        self._is_known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="model info")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def known(self) -> ModelInfo | None:
        """The latest description, or None before the first one."""
        return self._info

    async def get(self) -> ModelInfo:
        """The latest description; asks the routers if none is known yet.

        Raises:
            UnavailableError: no router has answered within `wait_s`, or none knows a worker that serves the model.
        """
        if self._info is not None:
            return self._info
        try:
            return await self.fetch()
        except (UntrustedPeerError, IncompatibleProtocolError):  # only an operator can mend that
            raise
        except UnavailableError as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self._is_known.wait()
            if (info := self.known) is None:
                message = f"{error}; the request has waited {self._wait_s:g} s"
                raise UnavailableError(message, error.retry_after_s) from error
            return info

    async def fetch(self) -> ModelInfo:
        """Asks the routers for a new description.

        Raises:
            UnavailableError: no router answers, or none knows a worker that serves the model.
        """
        found = await self._routers.models()
        mine = [info for info in found if info.name == self._name]
        if not mine:
            raise UnavailableError(self._missing(found), 1.0)
        # NOTE: versions of a model share its name during an update: the one with the most decode workers counts
        self._info = max(mine, key=lambda info: info.num_decode)
        self._is_known.set()
        return self._info

    async def _run(self) -> None:
        while True:
            try:
                await self.fetch()
            except TandemError as error:
                _logger.debug("the routers do not describe %s: %s", self._name, error)
            await asyncio.sleep(REFRESH_S if self._info is not None else _RETRY_S)

    def _missing(self, found: Sequence[ModelInfo]) -> str:
        others = ", ".join(sorted({info.name for info in found}))
        hint = f"; the workers serve {others}, so give --served-model-name" if others else ""
        return f"no live worker serves {self._name!r}{hint}"
