"""FalconH1ForCausalLM: reads a model of attention and Mamba-2 in parallel in each layer, with a factor on each map."""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.state_space import CHUNK_KEYS, StateSpaceSizes, read_state_space
from tandem.architecture.fields import Fields
from tandem.architecture.model import LayerSpec, ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=8192,
    kv_heads=8,
    eos_token_id=2,
    bos_token_id=1,
    eps=1e-5,
    hidden=4096,
    intermediate=14_336,
    layers=32,
    heads=32,
    vocab=128_000,
)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    fields.only("layer_types", (["hybrid"] * sizes.num_layers,), "hybrid in each layer")
    model = replace(
        base.build_model("falcon_h1", fields, sizes, _read_layers(fields, sizes)),
        final_norm=sizes.norm("model.final_layernorm"),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        rounds_embedding_scale=False,
        logit_scale=fields.number("lm_head_multiplier", 1.0),
    )
    base.check_unread(fields, (*CHUNK_KEYS, "num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor"))
    return model


def _read_layers(fields: Fields, sizes: base.Sizes) -> list[LayerSpec]:
    """NOTE: factors of queries, keys and values are applied for free, in the scale of scores and the output map."""
    rope, bias, mlp_bias = sizes.rope(fields), fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    into = _read_input_scale(fields, "attention_in_multiplier", bias)
    out = into * fields.number("attention_out_multiplier", 1.0)
    scale = sizes.head_dim**-0.5 * into * into * fields.number("key_multiplier", 1.0)
    gate, down = fields.numbers("mlp_multipliers", (1.0, 1.0))
    state_space = _read_state_space(fields, sizes)

    def layer(index: int) -> LayerSpec:
        prefix = base.layer_prefix(index)
        attention = base.attention(sizes, index, rope, scale=scale, qkv_bias=bias, output_bias=bias)
        others = (replace(attention, o=attention.o.times(out)),)
        block = base.gated(sizes, f"{prefix}.feed_forward", bias=mlp_bias)
        block = replace(block, gate=block.gate.times(gate), down=block.down.times(down))
        plain = base.pre_norm_layer(sizes, index, state_space.mixer(f"{prefix}.mamba"), block)
        return replace(plain, parallel_mixers=others, before_feed_forward=sizes.norm(f"{prefix}.pre_ff_layernorm"))

    return [layer(index) for index in range(sizes.num_layers)]


def _read_state_space(fields: Fields, sizes: base.Sizes) -> StateSpaceSizes:
    expanded = fields.count("mamba_expand", 2, high=64) * sizes.hidden
    found = read_state_space(fields, sizes, fields.optional_count("mamba_d_ssm", 1024, high=1 << 20) or expanded)
    fields.only("projectors_bias", (found.bias,), "the value of mamba_proj_bias")
    into = _read_input_scale(fields, "ssm_in_multiplier", found.bias)
    return replace(
        found,
        eps=sizes.eps if fields.flag("mamba_rms_norm", False) else None,
        is_normed_first=fields.flag("mamba_norm_before_gate", True),
        scales=tuple(into * scale for scale in fields.numbers("ssm_multipliers", (1.0,) * 5)),
        out_scale=fields.number("ssm_out_multiplier", 1.0),
    )


def _read_input_scale(fields: Fields, name: str, has_bias: bool) -> float:
    """Factor of the input of maps; applied to their output, which is the same only if they have no bias."""
    if has_bias:
        fields.only(name, (1.0,), "1.0 beside biases")
    return fields.number(name, 1.0)


FAMILY = base.Family(_read_model)  # found by `registry`
