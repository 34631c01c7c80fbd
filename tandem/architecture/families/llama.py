"""LlamaForCausalLM: reads the `config.json` of Llama 2 and 3.x, and of the many checkpoints that share their form, into
a `ModelSpec`.
"""

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(max_positions=2048, eos_token_id=2, bos_token_id=1)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    rope = sizes.rope(fields)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            base.attention(sizes, index, rope, qkv_bias=bias, output_bias=bias),
            base.gated(sizes, f"{base.layer_prefix(index)}.mlp", bias=mlp_bias),
        )
        for index in range(sizes.num_layers)
    ]
    model = base.build_model("llama", fields, sizes, layers)
    base.check_unread(fields)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
