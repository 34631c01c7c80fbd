"""Describes a worker to others: properties that peers must share, state for routers, and KV memory for transports."""

import hashlib
import json
import platform
from collections.abc import Mapping

import torch

from tandem.core.hashing import HASH_VERSION, LAYOUT_VERSION
from tandem.engine.resolve import Assembly
from tandem.kvcache.resumable import names_states
from tandem.kvcache.spec import KVGroup, KVLayout
from tandem.routing.snapshot import WorkerState
from tandem.rpc.messages import ModelInfo
from tandem.transport.base import MemoryPool
from tandem.worker.settings import WorkerSettings


def compatibility_of(assembly: Assembly) -> dict[str, str]:
    """Properties, by name, that must be equal for the blocks of two workers to be interchangeable.

    The number of ranks is none of them, unless several ranks group layers in another way than one does. Then blocks
    have other layers, and only workers with the same number of ranks can share them. The size of pieces is one where it
    is not that of earlier releases, since cards of one rank do not state it.
    """
    ranked = assembly.pages.ranked
    ranks = {} if ranked.is_shared else {"ranks": str(ranked.width)}
    pieces = {"piece_bytes": str(ranked.piece_bytes)} if ranked.has_joint_pieces else {}
    return {
        **ranks,
        **pieces,
        "model": assembly.engine.model.fingerprint,
        "kv_layout": _words(ranked.whole),
        "layout_version": str(LAYOUT_VERSION),
        "block_size": str(ranked.whole.block_size),
        "hash_version": str(HASH_VERSION),
    }


def pool_of(compatibility: Mapping[str, str]) -> str:
    """Name of a pool (of workers, not of memory): a digest of the properties that must be equal for workers to share
    blocks.
    """
    return hashlib.sha256(json.dumps(dict(compatibility), sort_keys=True).encode()).hexdigest()[:32]


def device_name(assembly: Assembly) -> str:
    """The device, "cpu" or "cuda:N"."""
    device = assembly.arena.pages.device
    return "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"


def pool_of_arena(assembly: Assembly, num_hosts: int = 1) -> MemoryPool:
    """The KV memory of all ranks as a `MemoryPool` for transports of this host, whose ranks have the last layers."""
    pages, ranked = assembly.pages.pages, assembly.pages.ranked
    num_ranks, num_blocks, page_bytes = pages.shape
    return MemoryPool(
        address=pages.data_ptr(),
        page_bytes=page_bytes,
        num_blocks=num_ranks * num_blocks,
        device=device_name(assembly),
        owner=pages,
        num_ranks=num_ranks,
        piece_bytes=ranked.piece_bytes if ranked.is_shared and not pages.is_cuda else None,
        stages=ranked.stages,
        num_hosts=num_hosts,
        host=num_hosts - 1 if ranked.stages else 0,
    )


def model_info(settings: WorkerSettings, assembly: Assembly) -> ModelInfo:
    """Description of the served model for clients."""
    engine = assembly.engine
    return ModelInfo(
        name=settings.model_name,
        fingerprint=engine.model.fingerprint,
        max_model_len=engine.limits.max_model_len,
        vocab_size=engine.model.vocab_size,
        block_size=assembly.arena.layout.block_size,
        sampling_defaults=dict(engine.sampling_defaults),
    )


def blank_state(
    settings: WorkerSettings, worker_id: str, assembly: Assembly, compatibility: Mapping[str, str]
) -> WorkerState:
    """State of this worker without load. Workers of the same kind share their measured speed."""
    engine, layout, limits = assembly.engine, assembly.arena.layout, assembly.engine.limits
    num_pages, num_parts = assembly.arena.num_pages - 1, assembly.pages.ranked.num_ranks
    num_blocks = layout.token_blocks(num_pages, limits.max_model_len, limits.max_num_batched_tokens)
    return WorkerState(
        worker_id=worker_id,
        role=settings.role,
        kind=f"{_hardware(assembly)}, {_threads(settings)}, {engine.model.fingerprint[:16]}",
        fingerprint=pool_of(compatibility),
        block_size=layout.block_size,
        block_bytes=max(1, num_parts * layout.bytes_per_block),  # NOTE: routers refuse none at all
        request_bytes=num_parts * layout.bytes_per_request,
        names_states=names_states(layout),
        chunk_tokens=limits.max_num_batched_tokens,
        num_total_blocks=num_blocks,
        num_free_blocks=num_blocks,
    )


def _threads(settings: WorkerSettings) -> str:
    own = f"{torch.get_num_threads()} threads"
    ranks = own if settings.num_ranks == 1 else f"{settings.num_ranks} ranks of {own}"
    sizes = {"stages": settings.pp, "contexts": settings.cp}
    sections = " of ".join(f"{number} {name}" for name, number in sizes.items() if number > 1)
    return f"{ranks} in {sections}" if sections else ranks


def _hardware(assembly: Assembly) -> str:
    device = assembly.arena.pages.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"


def _words(layout: KVLayout) -> str:
    """The layout as one line, which names a difference when two layouts are compared."""
    groups = [f"{len(group.layers)} layers of {group.spec}{_pages(group)}" for group in layout.groups]
    return f"{layout.page_bytes} bytes: {'; '.join(groups)}"


def _pages(group: KVGroup) -> str:
    return f" in {group.pages_per_block} pages" if group.spec.is_constant else ""
