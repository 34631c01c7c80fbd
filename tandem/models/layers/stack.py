"""A decoder's tensors in the form in which the kernels take all layers at once."""

from collections.abc import Mapping

import torch

from tandem.kernels.base import Kernels, Stack, StackLayer, StackShape
from tandem.models.config import LayerConfig, ModelConfig, RopeConfig
from tandem.models.layers.rotary import RotaryTable
from tandem.models.parameters import FINAL_NORM


def build_stack(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    tables: Mapping[RopeConfig, RotaryTable],
    kernels: Kernels,
) -> Stack | None:
    """All layers as one call of the kernels, where they have one for such a model; it gives the same bits.

    NOTE: not with biases in the MLP: they are rare, and its call passes none.
    """
    if config.mlp_bias:
        return None
    layers = [
        _layer(layer, weights, f"model.layers.{index}.", tables[layer.rope])
        for index, layer in enumerate(config.layers)
    ]
    return kernels.stack(_shape(config), layers, weights[FINAL_NORM])


def _shape(config: ModelConfig) -> StackShape:
    return StackShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        activation=config.activation,
        norm_eps=config.rms_norm_eps,
        unit_offset=config.unit_offset_norm,
        attention_scale=config.attention_scale,
        softcap=config.attention_softcap,
    )


def _layer(layer: LayerConfig, weights: Mapping[str, torch.Tensor], prefix: str, rotary: RotaryTable) -> StackLayer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return StackLayer(
        input_norm=weights[f"{prefix}input_layernorm.weight"],
        after_attention=weights[f"{prefix}post_attention_layernorm.weight"],
        before_mlp=weights.get(f"{prefix}pre_feedforward_layernorm.weight"),
        after_mlp=weights.get(f"{prefix}post_feedforward_layernorm.weight"),
        q=weights[f"{attention}q_proj.weight"],
        q_bias=weights.get(f"{attention}q_proj.bias"),
        k=weights[f"{attention}k_proj.weight"],
        k_bias=weights.get(f"{attention}k_proj.bias"),
        v=weights[f"{attention}v_proj.weight"],
        v_bias=weights.get(f"{attention}v_proj.bias"),
        o=weights[f"{attention}o_proj.weight"],
        o_bias=weights.get(f"{attention}o_proj.bias"),
        q_norm=weights.get(f"{attention}q_norm.weight"),
        k_norm=weights.get(f"{attention}k_norm.weight"),
        gate=weights[f"{mlp}gate_proj.weight"],
        up=weights[f"{mlp}up_proj.weight"],
        down=weights[f"{mlp}down_proj.weight"],
        cos=rotary.cos,
        sin=rotary.sin,
        window=layer.window,
    )
