"""Which tensors a `ModelConfig` calls for, by Hugging Face name, and the shape of each.

The one list that the loader checks a checkpoint against and that the decoder takes its weights from.
"""

from collections.abc import Iterator

from tandem.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Name -> shape of every tensor; `lm_head.weight` only when it is a tensor of its own."""
    shapes: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config)}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield from _linear("self_attn.q_proj", query, hidden, config.qkv_bias)
    yield from _linear("self_attn.k_proj", key, hidden, config.qkv_bias)
    yield from _linear("self_attn.v_proj", key, hidden, config.qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, query, config.output_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield from _linear("mlp.gate_proj", ffn, hidden, config.mlp_bias)
    yield from _linear("mlp.up_proj", ffn, hidden, config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, ffn, config.mlp_bias)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.sandwich_norm:
        yield "pre_feedforward_layernorm.weight", (hidden,)
        yield "post_feedforward_layernorm.weight", (hidden,)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
