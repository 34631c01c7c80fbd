"""Residual streams of calibration and evaluation texts, computed through a model one layer at a time.

The layers are the decoder's own, in float32. Only the layer being computed has its weights in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.compute.arena import Arena
from tandem.compute.backends import choose_backends
from tandem.compute.layer_states import LayerState
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
    """Residual streams of several sequences.

    Args:
        token_ids: [sequences, length].
        hidden: [sequences, length, hidden] float32, changed in place by each layer.
        embeddings: the input embeddings, if layers need them.
        kept: by index of state, the states (such as KV) of each sequence that later layers read too.
        choices: by sequence, the tokens that earlier layers chose to attend to.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    embeddings: torch.Tensor | None = None
    kept: dict[int, list[LayerState]] = field(default_factory=dict)
    choices: dict[int, Choices] = field(default_factory=dict)


class LayerRunner:
    """Computes single layers of the model `spec`, for sequences of at most `max_position_embeddings` tokens."""

    def __init__(self, spec: ModelSpec, kernels: Kernels) -> None:
        self._spec = spec
        self._kernels = kernels
        self._tables = build_rotary_tables([mixer.rope for mixer in spec.mixers], spec.max_position_embeddings, _CPU)
        layout = build_layout(spec.kv_specs, _BLOCK_SIZE)
        self._backends = choose_backends("auto", _CPU, layout, spec.attention_softcap, sinks=spec.has_sinks)
        self._states, self._by_mixer = spec.states_of_layer, spec.states_of_mixers
        self._last_reader = {state: index for index, states in enumerate(self._states) for state in states}

    def begin(self, token_ids: torch.Tensor, embedding: torch.Tensor) -> ResidualStream:
        """The stream before the first layer; `embedding` is [vocab, hidden] of any dtype."""
        hidden = embedding[token_ids].float()
        hidden = hidden if self._spec.embedding_scale == 1.0 else hidden * self._spec.embedding_scale
        keeps = any(layer.per_layer_embedding is not None for layer in self._spec.layers)
        return ResidualStream(token_ids, hidden, hidden.clone() if keeps else None)

    def advance(self, index: int, tensors: LayerTensors, stream: ResidualStream) -> None:
        """Advances `stream` through layer `index`."""
        layer, states = self._layer(index, tensors, {}), self._states[index]
        read_later = [state for state in states if self._last_reader[state] > index]
        for number in range(len(stream.hidden)):
            kv = self._kv(index, stream, number)
            for state in read_later:
                if number == len(stream.kept.get(state, ())):
                    stream.kept.setdefault(state, []).append(kv[state])
            stream.hidden[number] = self._computed(layer, stream, number, kv)
        for state in set(states).difference(read_later):
            stream.kept.pop(state, None)

    def observe(
        self, index: int, tensors: LayerTensors, stream: ResidualStream, moments: Mapping[str, Moments]
    ) -> None:
        """Computes layer `index`, but leaves `stream` as it is; adds input rows of its weights to `moments`, by
        weight.
        """
        layer = self._layer(index, tensors, moments)
        for number in range(len(stream.hidden)):
            self._computed(layer, stream, number, self._kv(index, stream, number))

    def _layer(self, index: int, tensors: LayerTensors, moments: Mapping[str, Moments]) -> DecoderLayer:
        spec = self._spec.layers[index]
        return DecoderLayer(
            spec, self._by_mixer[index], self._parameters(spec, tensors, moments), self._tables, self._kernels
        )

    def _kv(self, index: int, stream: ResidualStream, number: int) -> dict[int, LayerState]:
        """By index, the states that layer `index` reads: a sequence's state from an earlier layer, or memory for it."""
        found: dict[int, LayerState] = {}
        for state in self._states[index]:
            kept = stream.kept.get(state, ())
            layout = build_layout((self._spec.kv_specs[state],), _BLOCK_SIZE)
            num_blocks = 1 + -(-stream.hidden.shape[1] // _BLOCK_SIZE)
            found[state] = kept[number] if number < len(kept) else Arena(layout, num_blocks, _CPU).layers[0]
        return found

    def _computed(
        self, layer: DecoderLayer, stream: ResidualStream, number: int, kv: Mapping[int, LayerState]
    ) -> torch.Tensor:
        hidden = stream.hidden[number]
        backends = {state: self._backends[type(self._spec.kv_specs[state])] for state in kv}
        plain = _batch(len(hidden))
        batches = {state: backends[state].prepare(plain, kv[state], layer.readers(state)) for state in kv}
        tokens = StepTokens(
            stream.token_ids[number],
            torch.arange(len(hidden)),
            batches,
            None if stream.embeddings is None else stream.embeddings[number],
            stream.choices.setdefault(number, {}),
        )
        residual, x, _ = layer.forward(None, hidden.clone(), tokens, kv, backends)
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
    """A batch of one request, whose KV blocks are 1, 2, …"""
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
