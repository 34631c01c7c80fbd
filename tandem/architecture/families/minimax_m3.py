"""MiniMaxM3VLForCausalLM: reads the `config.json` of MiniMax-M3's text model into a `ModelSpec`.

Each KV head attends to 16 blocks of 128 tokens, chosen by an indexer (`chosen_blocks`). Experts chosen by sigmoid and a
shared block have clamped activations (`clamped_experts`). Keys of blocks and indexer are transformers' (`index_*`) or
MiniMax's.
"""

from tandem.architecture.block_mixers import BlockAttentionSpec
from tandem.architecture.families import base
from tandem.architecture.families.chosen_blocks import block_indexer, read_choice, read_sparse_layers
from tandem.architecture.families.clamped_experts import read_blocks
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec

_DEFAULTS = base.Defaults(
    max_positions=524_288,
    kv_heads=4,
    head_dim=128,
    eos_token_id=200_020,
    bos_token_id=200_034,
    theta=5e6,
    rotary_share=1.0,
    hidden=6144,
    intermediate=3072,
    layers=60,
    heads=64,
    vocab=200_064,
)
UNUSED_KEYS = (*TRAINING_KEYS, "num_mtp_modules", "num_nextn_predict_layers")  # keys that change nothing here
_FORM = {
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "n_shared_experts": (1,),
    "hidden_act": ("silu", "swigluoai"),
    "swiglu_beta": (1, 1.0),
}
"""What other files of the family might say, and transformers' model does not heed."""
_SPARSE_FORM = {"use_sparse_attention": (True,), "sparse_score_type": ("max",), "sparse_init_block": (0,)}


def read_text_model(fields: Fields, *, is_fused: bool) -> ModelSpec:
    """Reads the text model. `is_fused`: gate and up of blocks without experts are rows of one tensor."""
    sizes = base.read_sizes(fields, _DEFAULTS, unit_offset=True, activation="silu")
    sparse = fields.section("sparse_attention_config") or Fields({}, fields.where)
    for own, form in ((fields, _FORM), (sparse, _SPARSE_FORM)):
        for name, accepted in form.items():
            own.only(name, accepted, " or ".join(map(str, accepted)))
    rope, choosing = _read_rope(fields, sizes), read_sparse_layers(fields, sparse, sizes.num_layers)
    choice, index_dim = read_choice(fields, sparse, sizes)
    blocks = read_blocks(fields, sizes, is_fused)
    sparse.refuse_unread()
    layers = []
    for index, block in enumerate(blocks):
        mixer: MixerSpec = base.attention(sizes, index, rope, head_norms=True)
        if choosing[index]:
            assert isinstance(mixer, AttentionSpec)
            indexer = block_indexer(sizes, f"{base.layer_prefix(index)}.self_attn.indexer", index_dim)
            mixer = BlockAttentionSpec(attention=mixer, choice=choice, indexer=indexer)
        layers.append(base.pre_norm_layer(sizes, index, mixer, block))
    model = base.build_model("minimax_m3", fields, sizes, layers)
    base.check_unread(fields, UNUSED_KEYS)
    return model


def _read_rope(fields: Fields, sizes: base.Sizes) -> RopeSpec:
    """NOTE: transformers only uses `partial_rotary_factor`, so `rotary_dim` must not contradict it."""
    rotary_dim = fields.optional_count("rotary_dim")
    rope = sizes.rope(fields)
    if rotary_dim not in (None, rope.rotary_dim):
        raise fields.unsupported("rotary_dim", f"{rope.rotary_dim}, as head_dim and partial_rotary_factor have it")
    return rope


FAMILY = base.Family(lambda fields: read_text_model(fields, is_fused=True))  # found by `registry`
