"""Self-attention of one layer over a window of rows, each of which is key and value of all heads at once.

The last elements of rows and queries are rotated; they are stored half-split, whatever their order in a checkpoint. The
output of the heads is rotated back and has the checkpoint's order again.
"""

import torch

from tandem.architecture.entry_mixers import SharedRowAttentionSpec
from tandem.compute.attention import AttentionParams
from tandem.compute.entries import RowsBackend, RowsBatch
from tandem.compute.layer_states import LayerRows
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch, Choices
from tandem.models.layers.latent_attention import rotated_half_split
from tandem.models.layers.norm import Norm
from tandem.models.layers.rotary import RotaryTable
from tandem.models.parameters import Parameters


class SharedRowAttention:
    """`Mixer` that computes a `SharedRowAttentionSpec` with the tensors that it names. `rotary`: tables of its rotary
    embedding.
    """

    def __init__(
        self, spec: SharedRowAttentionSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels
    ) -> None:
        self._spec = spec
        self._rotation = TailRotation(rotary, kernels)
        sinks = parameters.tensors[spec.sinks.name].float()
        self.params = AttentionParams(spec.num_heads, spec.scale, spec.window, sinks=sinks)
        self._q_a = parameters.linear(spec.q_a)
        self._q_norm = Norm.take(spec.q_norm, parameters, kernels)
        self._q = parameters.linear(spec.q)
        self._head_norm = Norm.take(spec.head_norm, parameters, kernels)
        self._kv = parameters.linear(spec.kv)
        self._kv_norm = Norm.take(spec.kv_norm, parameters, kernels)
        self._o_groups = [parameters.linear(each) for each in spec.o_groups]
        self._o = parameters.linear(spec.o)

    def write(
        self, x: torch.Tensor, positions: torch.Tensor, rows: LayerRows, batch: AttentionBatch, backend: RowsBackend
    ) -> torch.Tensor:
        """Writes rows of `x` [num_tokens, hidden] into `rows`. Returns queries [num_tokens, num_heads, head_dim]."""
        self.write_rows(x, positions, rows, batch)
        return self.queries(self.query_input(x), positions)

    def attend(
        self, queries: torch.Tensor, rows: LayerRows, batch: RowsBatch, backend: RowsBackend, choices: Choices
    ) -> torch.Tensor:
        """Output [num_tokens, hidden] of attention of the queries over `rows`."""
        return self.output(backend.attend(queries, rows, batch, self.params), batch.positions)

    def write_rows(self, x: torch.Tensor, positions: torch.Tensor, rows: LayerRows, batch: AttentionBatch) -> None:
        """Stores the rows of `x` [num_tokens, hidden]."""
        made = self._kv_norm(self._kv(x)).unsqueeze(1)
        rows.write(self._rotation.forth(made, positions).squeeze(1), batch.slot_mapping)

    def query_input(self, x: torch.Tensor) -> torch.Tensor:
        """The latent from which queries are made."""
        return self._q_norm(self._q_a(x))

    def queries(self, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [num_tokens, num_heads, head_dim] of the result of `query_input`."""
        heads = self._head_norm(self._q(latent).view(-1, self._spec.head_dim))
        return self._rotation.forth(heads.view(len(latent), -1, self._spec.head_dim), positions)

    def output(self, found: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden], projected from the outputs of the heads [num_tokens, num_heads, head_dim]."""
        parts = self._rotation.back(found, positions).flatten(1).chunk(len(self._o_groups), dim=1)
        mapped = [group(part.contiguous()) for group, part in zip(self._o_groups, parts, strict=True)]
        return self._o(torch.cat(mapped, dim=1))


class TailRotation:
    """Rotation of the last elements of heads by their positions; `rotary` determines how many."""

    def __init__(self, rotary: RotaryTable, kernels: Kernels) -> None:
        self._rotary = rotary
        self._kernels = kernels
        self._size = 2 * rotary.cos.shape[1]

    def forth(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, heads, size] with its last elements rotated in neighbouring pairs, and stored half-split."""
        rest, last = x.tensor_split([x.shape[2] - self._size], dim=2)
        turned = rotated_half_split(last, positions, self._rotary, self._kernels, is_interleaved=True)
        return torch.cat((rest, turned), dim=2)

    def back(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of `forth`.

        NOTE: a rotation with exchanged halves is the inverse rotation.
        """
        rest, last = x.tensor_split([x.shape[2] - self._size], dim=2)
        first, second = last.chunk(2, dim=2)
        exchanged = torch.cat((second, first), dim=2)
        self._kernels.rotate(exchanged, self._rotary.cos, self._rotary.sin, positions)
        second, first = exchanged.chunk(2, dim=2)
        return torch.cat((rest, torch.stack((first, second), dim=-1).flatten(2)), dim=2)
