"""MiniMaxM3VLForCausalLM: the text model of MiniMax-M3. The queries of each KV head attend to 16 blocks of 128 tokens
that an indexer chooses; experts by sigmoid with a correction beside a shared block; clamped activations; norms that
add 1.

Blocks and indexer are read under the names of transformers (`index_*`) or of MiniMax (`sparse_attention_config`).
"""

from collections.abc import Sequence
from dataclasses import replace

from tandem.architecture.block_mixers import BlockAttentionSpec, BlockChoice, BlockIndexerSpec
from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS, mixture_of_experts, read_num_experts
from tandem.architecture.families.phi3 import fused
from tandem.architecture.feed_forward import Clamp, FeedForwardSpec, GatedSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.tensors import LinearSpec, ShardAxis, TensorSpec

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
SPARSE = "minimax_m3_sparse"
_DENSE_BLOCK, _SPARSE_BLOCK = "dense", "sparse"
_MULTIPLE = 8  # of numbers, in which keys are read
UNUSED_KEYS = (*TRAINING_KEYS, "num_mtp_modules", "num_nextn_predict_layers")
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
    """`is_fused`: gate and up of blocks without experts are rows of one tensor."""
    sizes = base.read_sizes(fields, _DEFAULTS, unit_offset=True, activation="silu")
    sparse = fields.section("sparse_attention_config") or Fields({}, fields.where)
    for own, form in ((fields, _FORM), (sparse, _SPARSE_FORM)):
        for name, accepted in form.items():
            own.only(name, accepted, " or ".join(map(str, accepted)))
    rope, choosing = _read_rope(fields, sizes), _read_choosing(fields, sparse, sizes.num_layers)
    choice, index_dim = _read_choice(fields, sparse, sizes)
    blocks = _read_blocks(fields, sizes, is_fused)
    sparse.refuse_unread()
    layers = []
    for index, block in enumerate(blocks):
        mixer: MixerSpec = base.attention(sizes, index, rope, head_norms=True)
        if choosing[index]:
            assert isinstance(mixer, AttentionSpec)
            indexer = _indexer(sizes, f"{base.layer_prefix(index)}.self_attn.indexer", index_dim)
            mixer = BlockAttentionSpec(attention=mixer, choice=choice, indexer=indexer)
        layers.append(base.pre_norm_layer(sizes, index, mixer, block))
    model = base.build_model("minimax_m3", fields, sizes, layers)
    base.check_unread(fields, UNUSED_KEYS)
    return model


def _read_rope(fields: Fields, sizes: base.Sizes) -> RopeSpec:
    """NOTE: transformers goes by `partial_rotary_factor` alone, so `rotary_dim` must not contradict it."""
    rotary_dim = fields.optional_count("rotary_dim")
    rope = sizes.rope(fields)
    if rotary_dim not in (None, rope.rotary_dim):
        raise fields.unsupported("rotary_dim", f"{rope.rotary_dim}, as head_dim and partial_rotary_factor have it")
    return rope


def _read_choosing(fields: Fields, sparse: Fields, num_layers: int) -> Sequence[bool]:
    """Which layers attend to chosen blocks."""
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


def _read_choice(fields: Fields, sparse: Fields, sizes: base.Sizes) -> tuple[BlockChoice, int]:
    """The choice, and the size of an index key."""

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


def _indexer(sizes: base.Sizes, name: str, size: int) -> BlockIndexerSpec:
    return BlockIndexerSpec(
        q=LinearSpec(f"{name}.q_proj", sizes.num_kv_heads * size, sizes.hidden, axis=ShardAxis.REPLICATED),
        k=LinearSpec(f"{name}.k_proj", size, sizes.hidden, axis=ShardAxis.REPLICATED),
        q_norm=sizes.norm(f"{name}.q_norm", size),
        k_norm=sizes.norm(f"{name}.k_norm", size),
        head_dim=size,
    )


def _read_blocks(fields: Fields, sizes: base.Sizes, is_fused: bool) -> list[FeedForwardSpec]:
    clamp = Clamp(alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0))
    dense_width = fields.count("dense_intermediate_size", 12_288, high=1 << 20)
    shared_width = fields.count("shared_intermediate_size", 3072, high=1 << 20)
    num_experts = read_num_experts(fields, 128)
    router = RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden),
        top_k=fields.count("num_experts_per_tok", 4, high=num_experts),
        score=Score.SIGMOID,
        correction=TensorSpec("gate.e_score_correction_bias", (num_experts,), is_float32=True),
        renormalise=True,
        scale=fields.number("routed_scaling_factor", 2.0),
    )

    def gated(prefix: str, width: int) -> GatedSpec:
        block = replace(base.gated(sizes, prefix, width), clamp=clamp)
        if not is_fused:
            return block
        gate, up = fused((block.gate, block.up), f"{prefix}.gate_up_proj.weight")
        return replace(block, gate=gate, up=up)

    def block(index: int, has_experts: bool) -> FeedForwardSpec:
        prefix = f"{base.layer_prefix(index)}.mlp"
        if not has_experts:
            return gated(prefix, dense_width)
        shared = gated(f"{prefix}.shared_experts", shared_width)
        mixture = mixture_of_experts(sizes, prefix, router, sizes.intermediate, shared)
        experts = tuple(replace(expert, clamp=clamp) for expert in mixture.experts if isinstance(expert, GatedSpec))
        return replace(mixture, experts=experts)

    return [block(index, has_experts) for index, has_experts in enumerate(_read_mixtures(fields, sizes.num_layers))]


def _read_mixtures(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Which layers have experts."""
    listed, types = fields.indices("moe_layer_freq", 2), fields.texts("mlp_layer_types")
    if types is None:
        types = tuple(_SPARSE_BLOCK if each else _DENSE_BLOCK for each in listed) or (_SPARSE_BLOCK,) * num_layers
    if len(types) != num_layers or not {*types} <= {_DENSE_BLOCK, _SPARSE_BLOCK}:
        raise fields.wrong(
            "mlp_layer_types" if fields.has("mlp_layer_types") else "moe_layer_freq",
            f"a list of num_hidden_layers={num_layers} entries, {_DENSE_BLOCK} or {_SPARSE_BLOCK}, or 0 or 1",
        )
    return [each == _SPARSE_BLOCK for each in types]


FAMILY = base.Family(lambda fields: read_text_model(fields, is_fused=True))
