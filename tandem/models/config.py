"""What the decoder needs to know about a model, family differences resolved to numbers and flags.

A family file turns a Hugging Face `config.json` into this or refuses it. Nothing below the families knows a model's
name.
"""

from dataclasses import dataclass, field

from tandem.kernels.base import Activation
from tandem.kvcache.spec import KVSpec


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer, as inverse frequencies and an attention factor.

    The family computes them (default, linear, llama3, yarn), so the decoder has one code path.
    `inv_freq` has rotary_dim / 2 entries in radians per position; cos and sin are multiplied by `attention_factor`.
    `stretched_to`: positions that it was stretched to serve; 0 where the checkpoint does not say. It changes no angle.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    stretched_to: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer: the window a query sees (None = everything) and the rotary embedding."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Sizes in elements; `dtype` is the compute and KV type.

    `unit_offset_norm`: norms multiply by `1 + weight` (Gemma). `sandwich_norm`: a norm after attention and after the
    MLP too, before the residual (Gemma). `embedding_scale` multiplies the embeddings, rounded to the dtype as Gemma
    does. Soft caps of 0 mean none. `fingerprint` identifies weights, configuration and dtype: two workers with the same
    one compute the same KV.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    activation: Activation
    rms_norm_eps: float
    attention_scale: float
    dtype: str
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    unit_offset_norm: bool = False
    sandwich_norm: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    fingerprint: str = ""

    @property
    def longest_length(self) -> int:
        """Positions that may be asked for: with a stretched rotary embedding they can be more than are the default."""
        return max([self.max_position_embeddings, *(layer.rope.stretched_to for layer in self.layers)])

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """One per layer, in order."""
        return tuple(KVSpec(self.num_kv_heads, self.head_dim, self.dtype, window=layer.window) for layer in self.layers)
