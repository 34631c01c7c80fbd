"""Calls for a hand-off of one prompt, what it must answer, and a gate for updates of its prefill."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.rpc.messages import GenerateCall, PrefillUpdate, WorkerAddress
from tests.helpers.engines import serve_alone
from tests.helpers.workers import (
    GREEDY,
    Pair,
    prompt_of,
)

PROMPT = prompt_of(90)


def alone(path: Path, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return serve_alone(path, {"r": list(prompt)}, {"r": params}, block_size=8)["r"]


def call_of(pair: Pair, prefill: WorkerAddress | None = None, salt: str = "", **fields: object) -> GenerateCall:
    values = {"request_id": "r", "prompt_token_ids": PROMPT, "params": GREEDY, **fields}
    return GenerateCall(prefill=prefill or pair.prefill.core.me, scope=CacheScope(salt=salt), **values)  # type: ignore[arg-type]


class Gate:
    """Lets updates of a prefill through up to the `number`th that `holds`, and keeps that one back until opened."""

    def __init__(self, number: int, holds: Callable[[PrefillUpdate], bool] = lambda update: True) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self._number = number
        self._holds = holds

    async def __call__(self, update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        if self._holds(update):
            self._number -= 1
            if self._number == 0:
                self.reached.set()
                await self.opened.wait()
        return [update]
