"""Reads multi-head latent attention (MLA) with the keys and tensor names of DeepSeek."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import LatentAttentionSpec
from tandem.architecture.rope import RopeSpec, flat_rope
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis

_NORM_EPS = 1e-6  # NOTE: of the latents' norms, whatever `rms_norm_eps` is
_MAX_SIZE = 1 << 16  # largest accepted in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDefaults:
    """Values that transformers assumes for absent keys, in elements. `query_rank` None = queries are not compressed to
    a latent; `has_positions` False = nothing is rotated, although configurations name a rotated part.
    """

    rank: int = 512
    query_rank: int | None = 1536
    plain_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    has_positions: bool = True


def read_head_dims(fields: Fields, defaults: LatentDefaults) -> tuple[int, int]:
    """Reads the number of elements of a query head that are not rotated, and of those that are."""
    plain_dim = fields.count("qk_nope_head_dim", defaults.plain_dim, high=_MAX_SIZE)
    rotary_dim = fields.count("qk_rope_head_dim", defaults.rotary_dim, low=2, high=_MAX_SIZE)
    if rotary_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "even, because rotary embedding turns pairs")
    return plain_dim, rotary_dim


def read_latent_attention(
    fields: Fields,
    sizes: base.Sizes,
    defaults: LatentDefaults,
    *,
    is_interleaved: bool = False,
    rope: RopeSpec | None = None,
) -> Callable[[int], LatentAttentionSpec]:
    """Returns a function from a layer's index to its attention. `rope`: None = read from the file."""
    rank = fields.count("kv_lora_rank", defaults.rank, high=_MAX_SIZE)
    query_rank = fields.optional_count("q_lora_rank", defaults.query_rank, high=_MAX_SIZE)
    plain_dim, rotary_dim = read_head_dims(fields, defaults)
    value_dim = fields.count("v_head_dim", defaults.value_dim, high=_MAX_SIZE)
    _check_copies(fields, sizes, plain_dim, rotary_dim)
    bias = fields.flag("attention_bias", False)
    scale = (plain_dim + rotary_dim) ** -0.5
    if defaults.has_positions:
        scale *= _stretched_scale(fields)
    if defaults.has_positions and rope is None:
        rope = flat_rope(fields, head_dim=rotary_dim, max_positions=sizes.max_positions, theta=sizes.defaults.theta)
    heads, hidden = sizes.num_heads, sizes.hidden
    queries = heads * (plain_dim + rotary_dim)

    def layer(index: int) -> LatentAttentionSpec:
        prefix = f"{base.layer_prefix(index)}.self_attn"
        q_a, q_norm, q = None, None, LinearSpec(f"{prefix}.q_proj", queries, hidden)
        if query_rank is not None:
            q_a = LinearSpec(f"{prefix}.q_a_proj", query_rank, hidden, bias, ShardAxis.REPLICATED)
            q_norm = NormSpec(f"{prefix}.q_a_layernorm", query_rank, _NORM_EPS)
            q = LinearSpec(f"{prefix}.q_b_proj", queries, query_rank)
        return LatentAttentionSpec(
            q_a=q_a,
            q_norm=q_norm,
            q=q,
            kv_a=LinearSpec(f"{prefix}.kv_a_proj_with_mqa", rank + rotary_dim, hidden, bias, ShardAxis.REPLICATED),
            kv_norm=NormSpec(f"{prefix}.kv_a_layernorm", rank, _NORM_EPS),
            kv_b=LinearSpec(f"{prefix}.kv_b_proj", heads * (plain_dim + value_dim), rank),
            o=LinearSpec(f"{prefix}.o_proj", hidden, heads * value_dim, bias, ShardAxis.ROW),
            num_heads=heads,
            rank=rank,
            plain_dim=plain_dim,
            rotary_dim=rotary_dim,
            value_dim=value_dim,
            scale=scale,
            rope=rope,
            is_interleaved=is_interleaved,
        )

    return layer


def _check_copies(fields: Fields, sizes: base.Sizes, plain_dim: int, rotary_dim: int) -> None:
    """Refuses redundant keys that contradict each other."""
    if sizes.num_kv_heads != sizes.num_heads:
        raise fields.wrong("num_key_value_heads", f"num_attention_heads={sizes.num_heads}: latents are for all heads")
    fields.only("qk_head_dim", (plain_dim + rotary_dim,), "qk_nope_head_dim + qk_rope_head_dim")


def _stretched_scale(fields: Fields) -> float:
    """Factor of the scores for a stretched rotary embedding, in addition to that of cosines and sines."""
    parameters = fields.section("rope_scaling") or fields.section("rope_parameters")
    if parameters is None:
        return 1.0
    share, factor = parameters.optional_number("mscale_all_dim", low=-1.0), parameters.number("factor", 1.0)
    if not share or factor <= 1 or (parameters.text("rope_type") or parameters.text("type")) in (None, "default"):
        return 1.0
    return (0.1 * share * math.log(factor) + 1.0) ** 2
