"""Block-sparse layers of MiniMax-M3: reads which layers attend to chosen blocks, how many blocks a query chooses, and
the indexer that scores them.
"""

from collections.abc import Sequence

from tandem.architecture.block_mixers import BlockChoice, BlockIndexerSpec
from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.tensors import LinearSpec, ShardAxis

SPARSE = "minimax_m3_sparse"  # kind of a layer that attends to chosen blocks
_MULTIPLE = 8  # an index key has a multiple of so many elements


def read_sparse_layers(fields: Fields, sparse: Fields, num_layers: int) -> Sequence[bool]:
    """For each layer, whether it attends to chosen blocks. `sparse`: the configuration in MiniMax's own names."""
    listed = sparse.indices("sparse_attention_freq", 2)
    without_values = sparse.indices("sparse_disable_index_value", 2)
    types = base.read_layer_types(fields, num_layers, (base.FULL, SPARSE))
    if types is None:
        types = tuple(SPARSE if each else base.FULL for each in listed) or (base.FULL,) * num_layers
    choosing = [each == SPARSE for each in types]
    if len(choosing) != num_layers:
        raise sparse.wrong("sparse_attention_freq", f"a list of num_hidden_layers={num_layers} numbers, 0 or 1")
    if without_values and [bool(each) for each in without_values] != choosing:
        raise sparse.unsupported("sparse_disable_index_value", "1 in every layer that chooses, 0 in others")
    return choosing


def read_choice(fields: Fields, sparse: Fields, sizes: base.Sizes) -> tuple[BlockChoice, int]:
    """Reads the rule by which a query chooses blocks, and the size of an index key."""

    def count(name: str, theirs: str, default: int) -> int:
        return sparse.count(theirs, fields.count(name, default))

    heads = count("index_n_heads", "sparse_num_index_heads", sizes.num_kv_heads)
    if heads != sizes.num_kv_heads:
        raise fields.unsupported("index_n_heads", f"num_key_value_heads={sizes.num_kv_heads}, one for each")
    index_dim = count("index_head_dim", "sparse_index_dim", 128)
    if index_dim % _MULTIPLE or index_dim > 1024:
        raise fields.unsupported("index_head_dim", f"a multiple of {_MULTIPLE} up to 1024")
    size, top_k = (
        count("index_block_size", "sparse_block_size", 128),
        count("index_topk_blocks", "sparse_topk_blocks", 16),
    )
    num_last = count("index_local_blocks", "sparse_local_block", 1)
    if num_last > top_k:
        raise fields.unsupported("index_local_blocks", f"at most index_topk_blocks={top_k}")
    return BlockChoice(size, top_k, num_last=num_last), index_dim


def block_indexer(sizes: base.Sizes, name: str, size: int) -> BlockIndexerSpec:
    """The indexer `name`, with index keys of `size` elements."""
    return BlockIndexerSpec(
        q=LinearSpec(f"{name}.q_proj", sizes.num_kv_heads * size, sizes.hidden, axis=ShardAxis.REPLICATED),
        k=LinearSpec(f"{name}.k_proj", size, sizes.hidden, axis=ShardAxis.REPLICATED),
        q_norm=sizes.norm(f"{name}.q_norm", size),
        k_norm=sizes.norm(f"{name}.k_norm", size),
        head_dim=size,
    )
