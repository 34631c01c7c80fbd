"""Gemma4ForCausalLM: reads the `config.json` of Gemma 4's text model into a `ModelSpec`: norms around each block,
per-layer embeddings, experts in parallel with a gated block.

Parts are read in the modules `gemma4_*`. `layer_scalar` multiplies the residual stream at the end of each layer.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.gemma4_attention import read_mixers
from tandem.architecture.families.gemma4_blocks import read_blocks
from tandem.architecture.families.gemma4_embeddings import read_embeddings
from tandem.architecture.feed_forward import FeedForwardSpec, ParallelSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.per_layer_embedding import PerLayerEmbeddingSpec
from tandem.architecture.tensors import TensorSpec

_DEFAULTS = base.Defaults(
    max_positions=131_072,
    kv_heads=4,
    head_dim=256,
    eos_token_id=1,
    bos_token_id=2,
    tied=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    hidden=2304,
    intermediate=9216,
    layers=30,
    heads=8,
    vocab=262_144,
)
_REFUSED = ("rope_scaling",)


def read_text_model(fields: Fields) -> ModelSpec:
    """Reads `config.json` of a text model, or `text_config` of a multimodal one."""
    sizes = base.read_sizes(fields, _DEFAULTS)
    mixers = read_mixers(fields, sizes)
    parts = zip(mixers, read_blocks(fields, sizes, mixers), read_embeddings(fields, sizes), strict=True)
    model = base.build_model(
        "gemma4",
        fields,
        sizes,
        [_layer(sizes, index, *of_layer) for index, of_layer in enumerate(parts)],
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping") or 0.0,
        unserved=_unused_tensors(mixers),
    )
    base.check_unread(fields, TRAINING_KEYS, _REFUSED)
    return model


def _layer(
    sizes: base.Sizes,
    index: int,
    mixer: AttentionSpec,
    block: FeedForwardSpec,
    embedding: PerLayerEmbeddingSpec | None,
) -> LayerSpec:
    layer = base.sandwich_layer(sizes, index, mixer, block)
    norms_itself = isinstance(block, ParallelSpec)
    return replace(
        layer,
        before_feed_forward=None if norms_itself else layer.before_feed_forward,
        per_layer_embedding=embedding,
        output_scale=TensorSpec(f"{base.layer_prefix(index)}.layer_scalar", (1,)),
    )


def _unused_tensors(mixers: list[AttentionSpec]) -> tuple[str, ...]:
    """Prefixes of tensors that checkpoints contain for layers that read another layer's state."""
    shared = [base.layer_prefix(index) for index, mixer in enumerate(mixers) if mixer.reads_state_of is not None]
    return tuple(f"{prefix}.self_attn.{name}." for prefix in shared for name in ("k_proj", "v_proj", "k_norm"))


FAMILY = base.Family(read_text_model)  # found by `registry`
