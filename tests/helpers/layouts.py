"""Layouts small enough to reason about: blocks of four tokens, windows of a few blocks."""

from tandem.architecture.state import KVSpec
from tandem.kvcache.spec import KVGroup, KVLayout

BLOCK_SIZE = 4


def layout_of(*windows: int | None, block_size: int = BLOCK_SIZE) -> KVLayout:
    """One single-layer group for each window; None is full attention."""
    specs = [KVSpec(num_kv_heads=1, head_dim=8, dtype="float32", window=window) for window in windows]
    groups = tuple(KVGroup(spec, (layer,)) for layer, spec in enumerate(specs))
    return KVLayout(block_size, groups, specs[0].block_bytes(block_size))
