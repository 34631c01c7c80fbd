"""EAGLE-3 draft head: one layer over the fused hidden states of three layers of the model, with its own vocabulary."""

from collections.abc import Sequence

import torch

from tandem.architecture.heads import Eagle3Spec
from tandem.architecture.state import StateSpec
from tandem.compute.attention import Backends, prepare_by_state
from tandem.compute.layer_states import LayerState
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch
from tandem.core.errors import CorruptCheckpointError
from tandem.models.decoder import Decoder
from tandem.models.layers.feed_forward import build_feed_forward
from tandem.models.layers.mixers import build_mixer
from tandem.models.layers.norm import Norm
from tandem.models.layers.rotary import build_rotary_tables
from tandem.models.parameters import Parameters


class Eagle3Head:
    """A `Head`, described in `base`, computing an `Eagle3Spec`. The input of the next guess is the residual stream
    before the last norm.

    Raises:
        CorruptCheckpointError: an offset leads beyond the model's tokens.
    """

    def __init__(self, spec: Eagle3Spec, model: Decoder, parameters: Parameters, kernels: Kernels) -> None:
        state = spec.attention.state(spec.dtype)
        assert state is not None
        self.state: StateSpec = state
        self.layers_read = spec.layers_read
        self._spec = spec
        self._kernels = kernels
        self._rows = None if spec.embedding is None else parameters.tensors[spec.embedding.name]
        self._model = model
        self._fusion = parameters.linear(spec.fusion)
        self._embedding_norm = Norm.take(spec.embedding_norm, parameters, kernels)
        self._hidden_norm = Norm.take(spec.hidden_norm, parameters, kernels)
        rope, device = spec.attention.rope, model.embedding.device
        tables = build_rotary_tables([rope], model.spec.max_position_embeddings, device)
        self._attention = build_mixer(spec.attention, parameters, tables, kernels)
        self._feed_forward_norm = Norm.take(spec.feed_forward_norm, parameters, kernels)
        self._feed_forward = build_feed_forward(spec.feed_forward, parameters, kernels)
        self._final_norm = Norm.take(spec.final_norm, parameters, kernels)
        self._head = parameters.linear(spec.head)
        self._token_ids = None if spec.offsets is None else _token_ids(parameters.tensors[spec.offsets.name], spec)
        self._logits = torch.empty(0, spec.vocab_size)  # -inf but for the head's own tokens

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return self._fusion(states)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        kv: Sequence[LayerState],
        batch: AttentionBatch,
        backends: Backends,
    ) -> torch.Tensor:
        normed = self._hidden_norm(hidden)
        residual = normed.clone() if self._spec.adds_to_normed else hidden.clone()
        x = torch.cat((self._embedding_norm(self._embed(token_ids)), normed), dim=1)
        backend, mixer = backends[type(self.state)], self._attention
        batch = prepare_by_state([backend], {0: batch}, kv, [{mixer.params}])[0]
        mixed = mixer.attend(mixer.write(x, positions, kv[0], batch, backend), kv[0], batch, backend, {})
        return residual.add_(self._feed_forward(self._feed_forward_norm(mixed, residual)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._head(self._final_norm(hidden), out_dtype=torch.float32)
        if self._token_ids is None:
            return own
        if len(own) > len(self._logits):
            # NOTE: filled once, since filling rows of a whole vocabulary wakes PyTorch's own threads, which then spin
            self._logits = own.new_full((len(own), self._spec.vocab_size), float("-inf"))
        return self._logits[: len(own)].index_copy_(1, self._token_ids, own)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            return self._model.embedding(token_ids)
        return self._kernels.take_rows(self._rows, token_ids)


def _token_ids(offsets: torch.Tensor, spec: Eagle3Spec) -> torch.Tensor:
    """int64 [number of the head's tokens], each token's id in the model."""
    token_ids = offsets + torch.arange(len(offsets), device=offsets.device)
    least, most = int(token_ids.min()), int(token_ids.max())
    if least < 0 or most >= spec.vocab_size or len({*token_ids.tolist()}) != len(token_ids):
        raise CorruptCheckpointError(
            f"d2t leads to tokens {least} to {most}, or to one twice; different ones from 0 to {spec.vocab_size - 1} "
            "are expected: d2t holds differences, not tokens"
        )
    return token_ids
