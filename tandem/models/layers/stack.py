"""Stack: the tensors of all decoder layers, prepared for a kernel that computes all layers in one call."""

from collections.abc import Mapping

import torch

from tandem.architecture.feed_forward import FeedForwardSpec, GatedSpec, MixtureOfExpertsSpec
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec
from tandem.compute.ops import Kernels, Numbers, Stack, StackLayer, StackMixture, StackShape
from tandem.models.layers.experts import compile_experts
from tandem.models.layers.rotary import RotaryTable
from tandem.models.layers.router import compile_choice
from tandem.models.parameters import Parameters


def build_stack(
    model: ModelSpec, parameters: Parameters, tables: Mapping[RopeSpec | None, RotaryTable], kernels: Kernels
) -> Stack | None:
    """All layers as one kernel call, with the same bits; None = the kernels have no such call for this model."""
    shapes = {_shape(model, layer) for layer in model.layers}
    shape = shapes.pop() if len(shapes) == 1 else None
    tensors = (tensor for layer in model.layers for tensor in layer.tensors())
    if shape is None or not all(_has_matrix(tensor, parameters) for tensor in tensors):
        return None
    layers = []
    for layer in model.layers:
        mixture = _mixture(layer.feed_forward, parameters, kernels)
        if mixture is None and not isinstance(layer.feed_forward, GatedSpec):
            return None
        layers.append(_layer(layer, mixture, parameters, tables))
    # NOTE: without a head only the residual stream is used, which does not depend on the norm
    last = model.layers[-1].before_mixer if model.head is None else model.final_norm
    return kernels.stack(shape, layers, _norm(last, parameters))


def _shape(model: ModelSpec, layer: LayerSpec) -> StackShape | None:
    """Properties that all layers of a stack must share; None = the stack cannot compute the layer."""
    mixer, block = layer.mixer, _block(layer.feed_forward)
    if (
        not isinstance(mixer, AttentionSpec)
        or block is None
        or not _is_plain(layer, mixer, block)
        or not _has_one_norm(model, layer, mixer)
    ):
        return None
    routed = layer.routed
    return StackShape(
        hidden_size=model.hidden_size,
        intermediate_size=block.intermediate_size,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        activation=block.activation,
        norm_eps=model.final_norm.eps,
        unit_offset=model.final_norm.unit_offset,
        attention_scale=mixer.scale,
        softcap=mixer.softcap,
        num_experts=0 if routed is None else routed.num_experts,
        top_k=0 if routed is None else routed.top_k,
    )


def _block(spec: FeedForwardSpec | None) -> GatedSpec | None:
    """The gated block, or the first of the experts; None = the stack cannot compute such a feed-forward block.

    NOTE: a gated block with biases is not supported: it is rare, and the compiled call passes none. A mixture is
    compared with one of router and experts alone, so it must have nothing else.
    """
    if isinstance(spec, MixtureOfExpertsSpec):
        spec = spec.experts[0] if spec == MixtureOfExpertsSpec(router=spec.router, experts=spec.experts) else None
        return spec if isinstance(spec, GatedSpec) else None
    if not isinstance(spec, GatedSpec):
        return None
    has_bias = spec.gate.bias or spec.up.bias or spec.down.bias or spec.clamp is not None
    return None if has_bias else spec


def _is_plain(layer: LayerSpec, mixer: AttentionSpec, block: GatedSpec) -> bool:
    is_normed = layer.before_mixer is not None and layer.before_feed_forward is not None
    has_own_state = mixer.k is not None and mixer.v is not None and mixer.v_norm is None
    linears = [mixer.q, *filter(None, (mixer.k, mixer.v)), mixer.o, block.gate, block.up, block.down]
    return (
        is_normed
        and has_own_state
        and not layer.parallel_mixers
        and layer.connections is None
        and all(linear.scale == 1.0 for linear in linears)
        and not (layer.per_layer_embedding or layer.output_scale)
        and layer.residual_scale == 1.0
        and mixer.rope is not None
        and not (mixer.sinks or mixer.query_scaling or mixer.is_gated)
    )


def _has_one_norm(model: ModelSpec, layer: LayerSpec, mixer: AttentionSpec) -> bool:
    """Whether all norms have the epsilon and offset of the last one, and the norms of q and k are per head."""
    outer = (layer.before_mixer, layer.after_mixer, layer.before_feed_forward, layer.after_feed_forward)
    heads = [norm for norm in (mixer.q_norm, mixer.k_norm) if norm is not None]
    norms = [*(norm for norm in outer if norm is not None), *heads]
    last = model.final_norm
    return all((norm.eps, norm.unit_offset) == (last.eps, last.unit_offset) for norm in norms) and all(
        norm.size == mixer.head_dim for norm in heads
    )


def _mixture(spec: FeedForwardSpec | None, parameters: Parameters, kernels: Kernels) -> StackMixture | None:
    """Router and experts, if the kernels have calls for them and the router's product is an ordinary one; else None."""
    if not isinstance(spec, MixtureOfExpertsSpec) or spec.router.linear.is_float32 or spec.router.norm is not None:
        return None
    router = spec.router
    choice = compile_choice(router, parameters, kernels)
    experts = compile_experts(spec.experts, parameters)
    if choice is None or experts is None:
        return None
    return StackMixture(_matrix(router.linear, parameters), parameters.bias(router.linear), choice, experts)


def _layer(
    layer: LayerSpec,
    mixture: StackMixture | None,
    parameters: Parameters,
    tables: Mapping[RopeSpec | None, RotaryTable],
) -> StackLayer:
    mixer, block = layer.mixer, layer.feed_forward
    assert isinstance(mixer, AttentionSpec)
    mlp = block if isinstance(block, GatedSpec) else None
    assert mixer.k is not None
    assert mixer.v is not None
    rotary = tables[mixer.rope]
    after_attention, before_mlp = (
        (layer.before_feed_forward, None)
        if layer.after_mixer is None
        else (layer.after_mixer, layer.before_feed_forward)
    )
    return StackLayer(
        input_norm=_norm(layer.before_mixer, parameters),
        after_attention=_norm(after_attention, parameters),
        before_mlp=_optional_norm(before_mlp, parameters),
        after_mlp=_optional_norm(layer.after_feed_forward, parameters),
        q=_matrix(mixer.q, parameters),
        q_bias=parameters.bias(mixer.q),
        k=_matrix(mixer.k, parameters),
        k_bias=parameters.bias(mixer.k),
        v=_matrix(mixer.v, parameters),
        v_bias=parameters.bias(mixer.v),
        o=_matrix(mixer.o, parameters),
        o_bias=parameters.bias(mixer.o),
        q_norm=_optional_norm(mixer.q_norm, parameters),
        k_norm=_optional_norm(mixer.k_norm, parameters),
        gate=None if mlp is None else _matrix(mlp.gate, parameters),
        up=None if mlp is None else _matrix(mlp.up, parameters),
        down=None if mlp is None else _matrix(mlp.down, parameters),
        cos=rotary.cos,
        sin=rotary.sin,
        window=mixer.window,
        mixture=mixture,
    )


def _norm(spec: NormSpec | None, parameters: Parameters) -> torch.Tensor:
    assert spec is not None
    assert spec.tensor_name is not None
    return parameters.tensors[spec.tensor_name]


def _optional_norm(spec: NormSpec | None, parameters: Parameters) -> torch.Tensor | None:
    return None if spec is None else _norm(spec, parameters)


def _has_matrix(tensor: TensorSpec, parameters: Parameters) -> bool:
    return not tensor.is_weight or parameters.weights[tensor.name].matrix is not None


def _matrix(spec: LinearSpec, parameters: Parameters) -> Numbers:
    matrix = parameters.linear(spec).weight.matrix
    assert matrix is not None
    return matrix
