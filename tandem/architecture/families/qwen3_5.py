"""Qwen3_5ForCausalLM: reads the `config.json` of the text model of Qwen3.5 and 3.6 into a `ModelSpec`: as `qwen3_next`,
but with a gated block instead of experts, and one tensor for each map of a DeltaNet layer.
"""

from tandem.architecture.families import base
from tandem.architecture.families.delta_net import DeltaNetMaps, DeltaNetSizes
from tandem.architecture.families.delta_rule import build_model_with_mtp, read_mixers
from tandem.architecture.feed_forward import FeedForwardSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec

_DEFAULTS = base.Defaults(
    max_positions=32768,
    kv_heads=4,
    head_dim=256,
    rotary_share=0.25,
    hidden=4096,
    intermediate=12_288,
    layers=32,
    heads=16,
    vocab=248_320,
)
_IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")  # a token of text has one position in all sections
_NOT_SERVED = ("model.visual.", "visual.")
_WRAPPED = "model.language_model."


def read_text_mixers(fields: Fields, sizes: base.Sizes) -> list[MixerSpec]:
    """The mixers of Qwen3.5, with or without experts."""
    fields.only("attn_output_gate", (True,), "true")
    fields.only("output_gate_type", ("swish", "silu"), "swish")
    fields.only("mamba_ssm_dtype", ("float32",), "float32, in which states are kept")
    return read_mixers(fields, sizes, sizes.rope(fields, harmless=_IMAGE_ROPE_KEYS), _maps)


def build_text_model(
    family: str, fields: Fields, sizes: base.Sizes, mixers: list[MixerSpec], blocks: list[FeedForwardSpec | None]
) -> ModelSpec:
    """The model with these mixers and blocks; a block None = the usual gated block."""
    layers = base.pre_norm_layers(sizes, mixers, blocks)
    return build_model_with_mtp(family, fields, sizes, layers)


def parameter_name(name: str) -> str | None:
    """Maps a tensor's name as `Family.parameter_name` does, in a text model or one inside a multimodal checkpoint."""
    if name.startswith(_NOT_SERVED):
        return None
    return f"model.{name.removeprefix(_WRAPPED)}" if name.startswith(_WRAPPED) else name


def _maps(sizes: DeltaNetSizes, prefix: str) -> DeltaNetMaps:
    def part(name: str, outputs: int) -> LinearSpec:
        return LinearSpec(f"{prefix}.in_proj_{name}", outputs, sizes.hidden)

    heads = sizes.num_heads
    qkv, gate = part("qkv", sizes.channels), part("z", heads * sizes.value_dim)
    return DeltaNetMaps(qkv=(qkv,), gate=gate, a=part("a", heads), b=part("b", heads))


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS, unit_offset=True)
    mixers = read_text_mixers(fields, sizes)
    model = build_text_model("qwen3_5", fields, sizes, mixers, [None] * sizes.num_layers)
    fields.only("mlp_only_layers", ([],), "[]")
    base.check_unread(fields)
    return model


FAMILY = base.Family(_read_model, parameter_name)  # found by `registry`
