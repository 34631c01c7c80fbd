"""The prefill side of a hand-off: an engine that leases blocks chunk by chunk, in a process of its own."""

import time
from multiprocessing.connection import Connection
from typing import Any

from bench.gpu.handoff_words import Answered, Computed, Hello, Prefill, Sums, block_sums
from bench.gpu.models import random_model
from bench.gpu.setting import Setting
from bench.gpu.stack import Limits, Stack, build
from tandem.core.errors import ConfigurationError
from tandem.core.sampling_params import SamplingParams
from tandem.scheduler.output import KVComputed, KVEvent
from tandem.scheduler.request import Handoff
from tandem.transport.base import KVTransport, MemoryPool
from tandem.transport.card import Identity

KV_BYTES = 12 << 30
LEASE = "lease"
COMPATIBILITY = {"bench": "gpu handoff"}
SECRET = b"shared by both sides"  # NOTE: their pools hold nothing but test data


def serve(connection: Connection, setting: Setting, name: str, length: int, chunk: int) -> None:
    """Answer `Prefill` and `Sums` until the other side closes."""
    stack = build_side(setting, name, length, chunk)
    share(stack)
    transports, refused = open_transports(stack)
    cards = {key: transport.card() for key, transport in transports.items()}
    connection.send(Hello(stack.arena.pages, cards, refused))
    stack.engine.on_kv_event = lambda event: _tell(connection, event)
    try:
        while True:
            _answer(connection, stack, connection.recv())
    except EOFError:
        for transport in transports.values():
            transport.close()


def build_side(setting: Setting, name: str, length: int, chunk: int) -> Stack:
    """An engine for one prompt of `length` tokens at a time; both sides have the same weights."""
    model = random_model(setting, name, length + 64)
    kv_bytes = min(KV_BYTES, 2 * (length + 128) * model.kv_bytes_per_token + (1 << 20))
    return build(setting, model, Limits(length + 64, 2, chunk, kv_bytes))


def share(stack: Stack) -> None:
    """NOTE: pages of CPU memory move when they are shared, so they are shared before their address is told."""
    if not stack.arena.pages.is_cuda:
        stack.arena.pages.share_memory_()  # type: ignore[no-untyped-call]


def open_transports(stack: Stack) -> tuple[dict[str, KVTransport], dict[str, str]]:
    """Those of ours that serve this memory, and why others do not."""
    from tandem.transport.nixl.transport import NixlTransport

    pages, device = stack.arena.pages, stack.device
    name = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    pool = MemoryPool(pages.data_ptr(), stack.arena.layout.page_bytes, stack.arena.num_pages, name, stack.arena)
    try:
        return {"nixl": NixlTransport(pool, Identity(COMPATIBILITY, SECRET))}, {}
    except ConfigurationError as error:
        return {}, {"nixl": str(error)}


def _tell(connection: Connection, event: KVEvent) -> None:
    if isinstance(event, KVComputed):
        (group,) = event.groups
        connection.send(Computed(group.first_index, group.block_ids, time.monotonic()))


def _answer(connection: Connection, stack: Stack, asked: Any) -> None:
    if isinstance(asked, Sums):
        connection.send(Sums(asked.block_ids, block_sums(stack.arena.pages, asked.block_ids)))
        return
    assert isinstance(asked, Prefill)
    stack.engine.kv.drop(LEASE)
    params = SamplingParams(temperature=0.0, max_tokens=asked.num_new_tokens, ignore_eos=True)
    stack.engine.add_request(asked.prompt, params, handoff=Handoff(lease_id=LEASE))
    token_ids: list[int] = []
    while stack.engine.has_work:
        for output in stack.engine.step():
            token_ids += output.token_ids
    connection.send(Answered(token_ids, time.monotonic()))
