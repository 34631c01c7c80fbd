"""Decoder: the decoder-only transformer that computes every model family, described by a `ModelSpec`, with `Kernels`
for arithmetic and attention backends.

It holds weights and rotary tables only: KV memory and batch belong to the caller. Parameter names equal those of the
specs. It must never learn a family's name.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tandem.architecture.model import HEAD, LayerSpec, ModelSpec
from tandem.architecture.rope import RopeSpec
from tandem.compute.attention import Backends, StateBackend, prepare_by_state
from tandem.compute.layer_states import LayerState
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch, Choices, HiddenStates, LayerTurns, WantedTokens
from tandem.compute.weights.base import Weight
from tandem.models.layers.connections import build_connections, build_stream_ends
from tandem.models.layers.embedding import TokenEmbedding
from tandem.models.layers.feed_forward import build_feed_forward
from tandem.models.layers.mixers import Queries, build_mixer, of_states, params_by_state, take_queries
from tandem.models.layers.norm import Norm
from tandem.models.layers.per_layer_embedding import PerLayerEmbedding
from tandem.models.layers.residual import added, take_tokens
from tandem.models.layers.rotary import RotaryTable, build_rotary_tables
from tandem.models.layers.rounding import rounded
from tandem.models.layers.stack import build_stack
from tandem.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step that layers compute, requests concatenated.

    Args:
        batches: the prepared batch of each state that these layers read, by the state's index.
        embeddings: input embeddings, if the layers need them; else None.
        choices: for these tokens, the tokens to attend to that indexers of earlier layers chose, by indexer.
    """

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    batches: Mapping[int, AttentionBatch]
    embeddings: torch.Tensor | None  # [num_tokens, hidden]
    choices: Choices = field(default_factory=dict)

    def only(self, wanted: WantedTokens, kernels: Kernels) -> "StepTokens":
        """The tokens in `wanted` alone."""
        embeddings = None if self.embeddings is None else kernels.take_rows(self.embeddings, wanted.rows)
        return StepTokens(
            self.input_ids.index_select(0, wanted.rows),
            self.positions.index_select(0, wanted.rows),
            wanted.batches,
            embeddings,
            {name: kernels.take_rows(chosen, wanted.rows) for name, chosen in self.choices.items()},
        )


class DecoderLayer:
    """Computes a `LayerSpec`. It has no state between calls.

    Args:
        states: for each mixer, the indices of the states that it reads, among all states of the model.
    """

    def __init__(
        self,
        spec: LayerSpec,
        states: Sequence[Sequence[int]],
        parameters: Parameters,
        tables: Mapping[RopeSpec | None, RotaryTable],
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        mixers = (build_mixer(mixer, parameters, tables, kernels) for mixer in spec.mixers)
        self._mixers = tuple(zip(mixers, states, strict=True))
        block = spec.feed_forward
        self._feed_forward = None if block is None else build_feed_forward(block, parameters, kernels)
        self._before_mixer = Norm.take_optional(spec.before_mixer, parameters, kernels)
        self._after_mixer = Norm.take_optional(spec.after_mixer, parameters, kernels)
        self._before_feed_forward = Norm.take_optional(spec.before_feed_forward, parameters, kernels)
        self._after_feed_forward = Norm.take_optional(spec.after_feed_forward, parameters, kernels)
        self._around_mixer, self._around_feed_forward = build_connections(spec, parameters, kernels)
        embedding = spec.per_layer_embedding
        self._embedding = None if embedding is None else PerLayerEmbedding(embedding, parameters, kernels)
        self._output_scale = None if spec.output_scale is None else float(parameters.tensors[spec.output_scale.name])
        self.graph_safe = self._feed_forward is None or self._feed_forward.graph_safe

    def readers(self, state: int) -> set[Hashable]:
        """Parameters that the layer's mixers pass to the backend of `state`; empty if none reads it."""
        asked = (zip(params_by_state(mixer, own), own, strict=True) for mixer, own in self._mixers)
        return {params for each in asked for params, read in each if read == state}

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        tokens: StepTokens,
        kv: Mapping[int, LayerState] | Sequence[LayerState],
        backends: Mapping[int, StateBackend[Any]] | Sequence[StateBackend[Any]],
        wanted: WantedTokens | None = None,
        turns: LayerTurns | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, StepTokens]:
        """Returns the residual stream, the output still to be added to it, and the tokens of both: only the `wanted`
        ones if given.

        `x`: the output of the layer before, still to be added; None = there is none. `kv`, `backends`: by index of
        state. `turns`: coordination of ranks that have other tokens of the same requests; None = all tokens of the step
        are here. NOTE: `residual` is overwritten.
        """
        normed, residual, kept = self._around_mixer.read(self._before_mixer, residual, x)
        if turns is not None:
            turns.take()
        batches = tokens.batches
        queries = [
            mixer.write(normed, tokens.positions, of_states(kv, own), of_states(batches, own), of_states(backends, own))
            for mixer, own in self._mixers
        ]
        if turns is not None:
            turns.pass_on()
        if wanted is not None:
            tokens = tokens.only(wanted, self._kernels)
            queries = [take_queries(each, wanted.rows, self._kernels) for each in queries]
            kept = take_tokens(kept, wanted.rows, self._kernels)
            residual = self._kernels.take_rows(residual, wanted.rows)
        if not len(residual):
            return residual, None, tokens
        mixed = _normed(self._after_mixer, self._attend(queries, tokens, kv, backends))
        residual, x = self._around_mixer.write(residual, mixed, kept)
        if self._feed_forward is not None:
            normed, residual, kept = self._around_feed_forward.read(self._before_feed_forward, residual, x)
            y = _normed(self._after_feed_forward, self._feed_forward(normed, tokens.input_ids))
            residual, x = self._around_feed_forward.write(residual, y, kept)
        residual, x = self._add_embedding(residual, x, tokens)
        if self._output_scale is None:
            return residual, x, tokens
        return added(residual, x).mul_(self._output_scale), None, tokens

    def _attend(
        self,
        queries: Sequence[Queries],
        tokens: StepTokens,
        kv: Mapping[int, LayerState] | Sequence[LayerState],
        backends: Mapping[int, StateBackend[Any]] | Sequence[StateBackend[Any]],
    ) -> torch.Tensor:
        """The sum of the mixers' outputs for their queries, added in their order."""
        batches, choices = tokens.batches, tokens.choices
        first, *others = (
            mixer.attend(each, of_states(kv, own), of_states(batches, own), of_states(backends, own), choices)
            for each, (mixer, own) in zip(queries, self._mixers, strict=True)
        )
        for other in others:
            first.add_(other)
        return first

    def _add_embedding(
        self, residual: torch.Tensor, x: torch.Tensor | None, tokens: StepTokens
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream, and the output still to be added to it, after adding the per-layer embedding."""
        if self._embedding is None:
            return residual, x
        assert tokens.embeddings is not None
        residual = added(residual, x)
        return residual, self._embedding(residual, tokens.input_ids, tokens.embeddings)


def _normed(norm: Norm | None, y: torch.Tensor) -> torch.Tensor:
    return y if norm is None else norm(y)


class Decoder:
    """The layers of a model, or of the part of one that a rank computes, with their weights.

    Args:
        spec: the model to compute.
        parameters: all parameters that `spec` names, on one device.
        kernels: the arithmetic.
    """

    def __init__(self, spec: ModelSpec, parameters: Parameters, kernels: Kernels) -> None:
        self.spec = spec
        self.parameters = parameters
        self._kernels = kernels
        self._embedding = TokenEmbedding.take_optional(spec, parameters, kernels)
        self._embedding_scale = spec.embedding_scale
        if self._embedding is not None and spec.rounds_embedding_scale:
            self._embedding_scale = rounded(spec.embedding_scale, self._embedding.dtype)
        self._head = None if spec.head is None else parameters.weights[HEAD]
        self._final_norm = None if spec.head is None else Norm.take(spec.final_norm, parameters, kernels)
        self._stream_ends = build_stream_ends(spec, parameters, kernels)
        ropes = [mixer.rope for mixer in spec.mixers]
        tables = build_rotary_tables(ropes, spec.max_position_embeddings, parameters.device)
        self._layers = tuple(
            DecoderLayer(layer, states, parameters, tables, kernels)
            for layer, states in zip(spec.layers, spec.states_of_mixers, strict=True)
        )
        self._readers = tuple(
            {params for layer in self._layers for params in layer.readers(state)} for state in range(len(spec.kv_specs))
        )
        self._kinds = tuple(type(state) for state in spec.kv_specs)
        self._num_prompt_layers = spec.num_prompt_layers
        self._keeps_embeddings = any(layer.per_layer_embedding is not None for layer in spec.layers)
        self._stack = build_stack(spec, parameters, tables, kernels)
        self.graph_safe = all(layer.graph_safe for layer in self._layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerState],
        batches: Sequence[AttentionBatch],
        backends: Backends,
        wanted: WantedTokens | None = None,
        states: HiddenStates | None = None,
        received: torch.Tensor | None = None,
        turns: LayerTurns | None = None,
    ) -> torch.Tensor:
        """Returns hidden states after the final norm, [num_tokens, hidden], or the residual stream if there is no final
        norm. Writes the step's KV and other state into `kv`.

        Args:
            input_ids, positions: [num_tokens] int64, requests concatenated.
            kv, batches: one item for each state that the model keeps; states of a group share the batch object.
            backends: one for each kind of state that the model keeps.
            wanted: the tokens whose hidden states are needed and returned, with the batches of
                `ModelSpec.wanted_states`; None = all.
            states: is filled with hidden states of layers; None = none are needed. NOTE: after the last layer that
                keeps state there are only those of the `wanted` tokens, see `ModelSpec.num_prompt_layers`.
            received: the residual stream from the stage before, which is overwritten. It has only the `wanted` tokens
                if `num_prompt_layers` is below 1. None = the model begins with the embeddings.
            turns: coordination of ranks that have other tokens of the same requests; None = all tokens of the step are
                here.
        """
        residual = self._stream_ends.begin(self.embed(input_ids)) if received is None else received
        if not len(residual):
            return self._none_of(residual)
        if wanted is not None and self._num_prompt_layers > len(self._layers):
            wanted = None
        if states is not None:
            states.begin(residual[:, : self.spec.hidden_size])
        chosen: list[StateBackend[Any]] = [backends[kind] for kind in self._kinds]
        if (
            self._stack is not None
            and turns is None
            and {backend.name for backend in chosen} == {self._stack.attention}
        ):
            hidden = self._stack.forward(residual, positions, kv, batches, wanted, states)
            return residual[: len(hidden)] if self._final_norm is None else self._noted(hidden, states)
        embeddings = residual.clone() if self._keeps_embeddings else None
        prepared = prepare_by_state(chosen, dict(enumerate(batches)), kv, self._readers)
        tokens = StepTokens(input_ids, positions, prepared, embeddings)
        if wanted is not None:
            wanted = replace(wanted, batches=prepare_by_state(chosen, wanted.batches, kv, self._readers))
            if self._num_prompt_layers < 1:
                tokens = tokens.only(wanted, self._kernels)
        x: torch.Tensor | None = None
        for index, layer in enumerate(self._layers, 1):
            if states is not None:
                states.note(index - 1, residual, x)
            asked = wanted if index == self._num_prompt_layers else None
            ordered = turns if index <= self._num_prompt_layers else None
            residual, x, tokens = layer.forward(x, residual, tokens, kv, chosen, asked, ordered)
            if not len(residual):
                return self._none_of(residual)
        if self._final_norm is None:
            return added(residual, x)
        return self._noted(self._stream_ends.end(self._final_norm, residual, x), states)

    @property
    def embedding(self) -> TokenEmbedding:
        """The token embedding; only of a part of the model that begins with tokens."""
        assert self._embedding is not None, "this stage begins with the residual stream"
        return self._embedding

    def _none_of(self, residual: torch.Tensor) -> torch.Tensor:
        """Output of `forward` for no tokens."""
        return residual if self._final_norm is None else residual[:, : self.spec.hidden_size]

    def _noted(self, hidden: torch.Tensor, states: HiddenStates | None) -> torch.Tensor:
        if states is not None:
            states.note(len(self._layers), hidden)
        return hidden

    def logits(
        self, hidden: torch.Tensor, rows: torch.Tensor | None = None, head: Weight | None = None
    ) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] float32, scaled and soft-capped as in the spec. `rows`: int64, the rows to compute;
        None = all. `head`: used instead of the decoder's own head, of which other ranks may have parts.
        """
        if rows is not None:
            hidden = self._kernels.take_rows(hidden, rows)
        head = self._head if head is None else head
        assert head is not None, "this stage ends with the residual stream"
        logits = head(hidden, out_dtype=torch.float32)
        cap, scale = self.spec.logit_softcap, self.spec.logit_scale
        logits = logits if scale == 1.0 else logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [n] -> [n, hidden], the input of the first layer."""
        hidden = self.embedding(input_ids)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)
