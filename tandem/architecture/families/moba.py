"""TandemMobaForCausalLM: reads a `config.json` into a `ModelSpec`: as `llama`, with block-sparse attention, each head
choosing blocks of tokens (MoBA, arXiv:2502.13189).

No checkpoint of it is published, and transformers has no such model: the name is Tandem's. Keys besides Llama's, named
as by MoonshotAI/MoBA, are `moba_chunk_size`, tokens of a block, and `moba_topk`, blocks that a head attends to,
including the query's own. Tensors are named as in Llama.
"""

import math

from tandem.architecture.block_mixers import BlockAttentionSpec, BlockChoice
from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(max_positions=131_072, eos_token_id=2, bos_token_id=1, eps=1e-5)
_SPAN = 16  # most tokens of which a mean of keys is kept


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    rope = sizes.rope(fields)
    choice = BlockChoice(fields.count("moba_chunk_size", 4096), fields.count("moba_topk", 12))
    span = math.gcd(_SPAN, choice.size, sizes.head_dim)
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            BlockAttentionSpec(attention=base.attention(sizes, index, rope), choice=choice, mean_span=span),
        )
        for index in range(sizes.num_layers)
    ]
    model = base.build_model("moba", fields, sizes, layers)
    base.check_unread(fields)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
