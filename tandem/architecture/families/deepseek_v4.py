"""DeepseekV4ForCausalLM: reads the `config.json` of DeepSeek-V4 into a `ModelSpec`, part by part in other modules.

A query attends to a window of recent tokens and to entries, vectors compressed from several tokens each
(`compressed_mixers`). Experts are chosen by token id in the first layers and by score in the others (`token_experts`).
Blocks read and write several residual streams (`streams`). Published files have DeepSeek's own tensor names, which
`parameter_name` maps to those of `transformers`; files with the latter are read too. Modules that predict further
tokens are not served.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.compressed_mixers import read_mixers
from tandem.architecture.families.deepseek_names import parameter_name
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.streams import read_streams
from tandem.architecture.families.token_experts import read_blocks
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=1_048_576,
    kv_heads=1,
    head_dim=512,
    eos_token_id=1,
    bos_token_id=0,
    hidden=4096,
    intermediate=2048,
    layers=43,
    heads=64,
    vocab=129_280,
)
_UNUSED_KEYS = (*TRAINING_KEYS, "expert_dtype", "first_k_dense_replace", "num_nextn_predict_layers")
_WIDTH = {"moe_intermediate_size": "intermediate_size"}  # inner size of experts and of the shared block


def _read_model(fields: Fields) -> ModelSpec:
    fields = fields.renamed(_WIDTH)
    sizes = base.read_sizes(fields, _DEFAULTS)
    streams = read_streams(fields, sizes)
    layers = [
        replace(layer, connections=streams.of_layer(base.layer_prefix(index)))
        for index, layer in enumerate(
            base.pre_norm_layers(sizes, read_mixers(fields, sizes), read_blocks(fields, sizes))
        )
    ]
    model = base.build_model("deepseek_v4", fields, sizes, layers, unserved=("mtp.",))
    base.check_unread(fields, _UNUSED_KEYS)
    return replace(model, streams=streams.ends())


FAMILY = base.Family(_read_model, parameter_name)  # found by `registry`
