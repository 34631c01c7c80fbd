"""Confirms a read of a peer's pages: the lease was valid throughout, sampled checksums agree, and states are finite.

A lease is the peer's promise not to reuse the pages; without it, the bytes read may be those of other requests.
"""

import asyncio
from collections.abc import Callable, Sequence

from tandem.core.errors import TransportError
from tandem.rpc.messages import ConfirmCall
from tandem.transport.reshard import Pages
from tandem.transport.transfer import Transfer, TransferState
from tandem.worker.core import WorkerCore
from tandem.worker.source import KVSource

CONFIRM_TIMEOUT_S = 3.0  # for the source's answer


async def confirm(
    core: WorkerCore,
    source: KVSource,
    lease_id: str,
    groups: Sequence[int],
    remote: Sequence[Pages],
    local: Sequence[Pages],
) -> None:
    """Checks a finished read: asks the source whether the lease was valid, and compares checksums of a sample of
    blocks.

    Args:
        groups: KV group of each block.
        remote, local: pages of each block there and here.

    Raises:
        TransportError: naming what is wrong.
        TandemError: the source could not be called.
    """
    sample = core.checksums.sample(groups)
    num_ranks = core.ranked.num_ranks
    call = ConfirmCall(
        lease_id=lease_id,
        checksum_block_ids=tuple(remote[i][0] for i in sample),
        reader_ranks=None if num_ranks == 1 else num_ranks,
        reader_stages=core.ranked.stages,
    )
    blocks = list(zip(groups, local, strict=True))

    def inspected() -> tuple[list[int], int | None]:
        ours = core.checksums.arrived([blocks[i] for i in sample], source.peer.parts)
        return ours, core.checksums.first_not_finite(blocks)

    answer, (ours, broken) = await asyncio.gather(
        source.client.confirm(call, timeout_s=CONFIRM_TIMEOUT_S), asyncio.to_thread(inspected)
    )
    name = source.worker.worker_id
    if not answer.is_valid:
        raise TransportError(f"lease {lease_id} of worker {name} ended before its blocks had been read")
    if list(answer.checksums) != ours:
        raise TransportError(f"blocks read from worker {name} are damaged: checksums {answer.checksums} and {ours}")
    if broken is not None:
        raise TransportError(f"the state in block {remote[broken][0]} of worker {name} is not finite")


async def succeeded(transfer: Transfer) -> None:
    """Waits until the transfer has succeeded.

    Raises:
        TransportError: the read failed.
    """
    await called_back(transfer.add_done_callback)
    if transfer.state is TransferState.FAILED:
        assert transfer.error is not None
        raise transfer.error


async def called_back(add_callback: Callable[[Callable[[Transfer], None]], None]) -> None:
    """Waits for a callback of a transfer, which may come from any thread. `add_callback`: adds it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not future.done():
            future.set_result(None)

    def wake(_: Transfer) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell)

    add_callback(wake)
    await future
