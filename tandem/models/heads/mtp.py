"""Draft head of multi-token prediction (MTP): one decoder layer after a projection of embedding and hidden state."""

from collections.abc import Sequence

import torch

from tandem.architecture.heads import MtpSpec
from tandem.architecture.state import StateSpec
from tandem.compute.attention import Backends, prepare_by_state
from tandem.compute.layer_states import LayerState
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch
from tandem.compute.weights.base import Weight
from tandem.models.decoder import Decoder, DecoderLayer, StepTokens
from tandem.models.layers.norm import Norm
from tandem.models.layers.residual import add_and_norm
from tandem.models.layers.rotary import build_rotary_tables
from tandem.models.parameters import Parameters


class MtpHead:
    """A `Head`, described in `base`, computing an `MtpSpec` with the embedding and the output head of `model`. If
    `model` is one rank's part, `whole_head` is the output head of the whole model, so that logits need no exchange
    among ranks.
    """

    def __init__(
        self,
        spec: MtpSpec,
        model: Decoder,
        parameters: Parameters,
        kernels: Kernels,
        whole_head: Weight | None = None,
    ) -> None:
        state = spec.layer.mixer.state(model.spec.dtype)
        assert state is not None
        self.state: StateSpec = state
        self.layers_read = (model.spec.num_layers,)
        self._model = model
        self._whole_head = whole_head
        self._embedding_norm = Norm.take(spec.embedding_norm, parameters, kernels)
        self._hidden_norm = Norm.take(spec.hidden_norm, parameters, kernels)
        self._projection = parameters.linear(spec.projection)
        rope, length = spec.layer.mixer.rope, model.spec.max_position_embeddings
        tables = build_rotary_tables([rope], length, model.embedding.device)
        self._layer = DecoderLayer(spec.layer, ((0,),), parameters, tables, kernels)
        self._final_norm = Norm.take(spec.final_norm, parameters, kernels)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the model's hidden states unchanged."""
        return states

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        kv: Sequence[LayerState],
        batch: AttentionBatch,
        backends: Backends,
    ) -> torch.Tensor:
        embedded = self._embedding_norm(self._model.embed(token_ids))
        residual = self._projection(torch.cat((embedded, self._hidden_norm(hidden)), dim=1))
        backend = backends[type(self.state)]
        prepared = prepare_by_state([backend], {0: batch}, kv, [self._layer.readers(0)])
        tokens = StepTokens(token_ids, positions, prepared, None)
        residual, x, _ = self._layer.forward(None, residual, tokens, kv, [backend])
        return add_and_norm(self._final_norm, residual, x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden, head=self._whole_head)
