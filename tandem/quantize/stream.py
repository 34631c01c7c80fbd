"""Residual streams of all sequences, advanced through a model one layer at a time.

The layers are the decoder's own, in float32. Only the computing layer has its weights in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.compute.arena import Arena, LayerState
from tandem.compute.backends import choose_backends
from tandem.compute.ops import Kernels
from tandem.compute.order import Order
from tandem.compute.step import AttentionBatch, Choices
from tandem.compute.weights.base import Weight
from tandem.compute.weights.dense import MatrixWeight
from tandem.kvcache.spec import build_layout
from tandem.models.decoder import DecoderLayer, StepTokens
from tandem.models.layers.rotary import build_rotary_tables
from tandem.models.parameters import Parameters
from tandem.quantize.moments import Moments, ObservedWeight

_BLOCK_SIZE = 16
_CPU = torch.device("cpu")
LayerTensors = Mapping[str, torch.Tensor]
"""Tensors of one layer, by the names of its spec, float32."""


@dataclass(slots=True)
class ResidualStream:
    """`token_ids` [sequences, length]; `hidden` [sequences, length, hidden] float32, changed in place by a layer.

    `embeddings`: what the model begins with, where layers ask for it. `kept`: by state, what each sequence keeps that
    later layers read. `choices`: by sequence.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    embeddings: torch.Tensor | None = None
    kept: dict[int, list[LayerState]] = field(default_factory=dict)
    choices: dict[int, Choices] = field(default_factory=dict)


class LayerRunner:
    """Computes single layers of `spec`, a model for sequences of at most `max_position_embeddings` tokens."""

    def __init__(self, spec: ModelSpec, kernels: Kernels) -> None:
        self._spec = spec
        self._kernels = kernels
        self._tables = build_rotary_tables(
            [layer.mixer.rope for layer in spec.layers], spec.max_position_embeddings, _CPU
        )
        layout = build_layout(spec.kv_specs, _BLOCK_SIZE)
        self._backends = choose_backends("auto", _CPU, layout, spec.attention_softcap, sinks=spec.has_sinks)
        states = spec.state_of_layer
        self._last_reader = {state: index for index, state in enumerate(states)}

    def begin(self, token_ids: torch.Tensor, embedding: torch.Tensor) -> ResidualStream:
        """The stream before the first layer; `embedding` [vocab, hidden] of any dtype."""
        hidden = embedding[token_ids].float()
        hidden = hidden if self._spec.embedding_scale == 1.0 else hidden * self._spec.embedding_scale
        keeps = any(layer.per_layer_embedding is not None for layer in self._spec.layers)
        return ResidualStream(token_ids, hidden, hidden.clone() if keeps else None)

    def advance(self, index: int, tensors: LayerTensors, stream: ResidualStream) -> None:
        """Advances `stream` through layer `index`."""
        layer = self._layer(index, tensors, {})
        is_read_later = self._last_reader[layer.state] > index
        for number in range(len(stream.hidden)):
            kv = self._kv(layer.state, stream, number)
            if is_read_later and self._spec.layers[index].mixer.reads_state_of is None:
                stream.kept.setdefault(layer.state, []).append(kv)
            stream.hidden[number] = self._computed(layer, stream, number, kv)
        if not is_read_later:
            stream.kept.pop(layer.state, None)

    def observe(
        self, index: int, tensors: LayerTensors, stream: ResidualStream, moments: Mapping[str, Moments]
    ) -> None:
        """Adds the input rows of the weights of layer `index` to `moments`, by weight."""
        layer = self._layer(index, tensors, moments)
        for number in range(len(stream.hidden)):
            self._computed(layer, stream, number, self._kv(layer.state, stream, number))

    def _layer(self, index: int, tensors: LayerTensors, moments: Mapping[str, Moments]) -> DecoderLayer:
        spec, state = self._spec.layers[index], self._spec.state_of_layer[index]
        return DecoderLayer(spec, state, self._parameters(spec, tensors, moments), self._tables, self._kernels)

    def _kv(self, state: int, stream: ResidualStream, number: int) -> LayerState:
        """Cached state of a sequence from an earlier layer, or memory for it."""
        kept = stream.kept.get(state, ())
        if number < len(kept):
            return kept[number]
        layout = build_layout((self._spec.kv_specs[state],), _BLOCK_SIZE)
        return Arena(layout, 1 + -(-stream.hidden.shape[1] // _BLOCK_SIZE), _CPU).layers[0]

    def _computed(self, layer: DecoderLayer, stream: ResidualStream, number: int, kv: LayerState) -> torch.Tensor:
        hidden = stream.hidden[number]
        backend = self._backends[type(self._spec.kv_specs[layer.state])]
        batch = backend.prepare(_batch(len(hidden)), kv, [layer.attention])
        tokens = StepTokens(
            stream.token_ids[number],
            torch.arange(len(hidden)),
            {layer.state: batch},
            None if stream.embeddings is None else stream.embeddings[number],
            stream.choices.setdefault(number, {}),
        )
        caches = [kv] * (layer.state + 1)  # NOTE: the layer reads its own entry only
        residual, x, _ = layer.forward(None, hidden.clone(), tokens, caches, backend)
        return residual if x is None else residual.add_(x)

    def _parameters(self, spec: LayerSpec, tensors: LayerTensors, moments: Mapping[str, Moments]) -> Parameters:
        weights: dict[str, Weight] = {}
        for tensor in spec.tensors():
            if tensor.is_weight:
                weight: Weight = MatrixWeight(tensors[tensor.name], Order.ROWS, self._kernels, tensor.sum_blocks)
                observed = moments.get(tensor.name)
                weights[tensor.name] = weight if observed is None else ObservedWeight(weight, observed)
        others = {name: tensor for name, tensor in tensors.items() if name not in weights}
        return Parameters(others, weights)


def _batch(length: int) -> AttentionBatch:
    """A batch of one request, whose blocks are 1, 2, …"""
    positions = torch.arange(length)
    num_blocks = -(-length // _BLOCK_SIZE)
    return AttentionBatch(
        query_start=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(1, 1 + num_blocks, dtype=torch.int32).unsqueeze(0),
        slot_mapping=positions + _BLOCK_SIZE,
        max_query_len=length,
        max_seq_len=length,
    )
