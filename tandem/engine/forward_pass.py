"""Forward pass of one model over its KV memory (the arena): steps in, hidden states and logits out.

Keeps a copy of the block tables of the requests in its steps (`InputBuilder`). It decides no step, chooses no token,
and never writes a block that the step did not schedule. *Wanted* tokens are those of which logits are needed: of the
other prompt tokens nothing is computed after the last layer that keeps state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from tandem.architecture.model import ModelSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import Backends
from tandem.compute.collectives import RankLinks
from tandem.compute.recurrent import advance_past_accepted
from tandem.compute.step import AttentionBatch, HiddenStates, LayerTurns, WantedTokens
from tandem.engine.graphs import DecodeGraphs, padded_sizes
from tandem.engine.inputs import InputBuilder, ModelInputs
from tandem.engine.stage_flow import StageFlow, joined_inputs, micro_batches
from tandem.engine.token_parts import parts_in_turn
from tandem.kvcache.spec import KVLayout
from tandem.models.decoder import Decoder
from tandem.scheduler.output import ScheduledRequest, SchedulerOutput

PROMPT_LOGPROBS_ROWS = 64  # rows of logits in memory at once


class ForwardPass:
    """Computes consecutive steps of one model, or this rank's part of them.

    Args:
        decoder: the model.
        spec: its description.
        arena: KV memory, for the life of the process.
        backends: one for each kind of state in the arena.
        max_num_requests: requests that have block tables at once.
        max_model_len: longest request in tokens.
        links: to the other ranks that compute parts of the model; None = there are none.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: ModelSpec,
        arena: Arena,
        backends: Backends,
        *,
        max_num_requests: int,
        max_model_len: int,
        links: RankLinks | None = None,
    ) -> None:
        self._decoder = decoder
        self._links = links
        self._flow = None if links is None or links.num_stages * links.num_contexts == 1 else StageFlow(links, spec)
        self._arena = arena
        self._backends = backends
        self._wanted_states = spec.wanted_states
        self._num_prompt_layers = spec.num_prompt_layers
        self._group_of_state = _groups_by_state(arena.layout)
        self._inputs = InputBuilder(
            arena.layout,
            max_num_requests=max_num_requests,
            max_model_len=max_model_len,
            device=arena.pages.device,
            wanted_groups=sorted({self._group_of_state[state] for state in spec.wanted_states}),
        )
        self.vocab_size = spec.vocab_size
        self.graphs = self._capture_graphs(max_num_requests, max_model_len)

    @property
    def device(self) -> torch.device:
        return self._arena.pages.device

    @property
    def layout(self) -> KVLayout:
        return self._arena.layout

    def run(self, step: SchedulerOutput, states: HiddenStates | None = None) -> tuple[ModelInputs, torch.Tensor]:
        """Compute a step that schedules at least one token.

        Returns its inputs and the hidden states of the tokens that it wants, [num_wanted, hidden_size]; of a stage or
        context but the last these mean nothing.

        Args:
            states: is filled with layers' hidden states of all tokens, for a drafter; no graph is replayed then.
        """
        if self._flow is not None and self._links is not None:
            assert states is None, "drafters that read states are refused with stages and contexts"
            return self._run_parts(step, self._flow, self._links)
        inputs = self._inputs.build(step)
        hidden = self.graphs.run(inputs) if self.graphs is not None and states is None else None
        if hidden is None:
            hidden = self._compute(inputs, states)
        return inputs, hidden

    def _run_parts(self, step: SchedulerOutput, flow: StageFlow, links: RankLinks) -> tuple[ModelInputs, torch.Tensor]:
        """Compute the tokens of this rank's context in the layers of its stage, micro-batch by micro-batch, so that
        other stages compute meanwhile.
        """
        self._inputs.take(step)
        batches = list(micro_batches(step, links.num_stages, self.layout.block_size, links.num_contexts))
        built, hidden = [], [torch.empty(0, 0)]
        for parts, turns in parts_in_turn(batches, links, self.layout.block_size):
            inputs = self._inputs.build_parts(parts)
            stream = self.compute(
                inputs.input_ids,
                inputs.positions,
                inputs.batches,
                inputs.wanted,
                received=flow.receive(inputs),
                turns=turns,
            )
            flow.send(stream)
            built.append(inputs)
            hidden.append(stream)
        return joined_inputs(built, hidden[1:]), torch.cat(hidden[1:] or hidden)

    def _compute(self, inputs: ModelInputs, states: HiddenStates | None) -> torch.Tensor:
        """NOTE: where states are read that belong to wanted tokens only, all tokens are computed to the end."""
        wanted = inputs.wanted
        is_cut = wanted is not None and states is not None and max(states.layers) >= self._num_prompt_layers
        hidden = self.compute(inputs.input_ids, inputs.positions, inputs.batches, None if is_cut else wanted, states)
        return hidden if wanted is None or not is_cut else hidden.index_select(0, wanted.rows)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, float32 [num_rows, vocab_size], of hidden states; `rows`: of these only."""
        return self._decoder.logits(hidden, rows)

    def scored_logits(
        self, inputs: ModelInputs, hidden: torch.Tensor, index: int, item: ScheduledRequest, num_prompt_tokens: int
    ) -> Iterator[torch.Tensor]:
        """Logits at the positions of scheduled request `index` that predict prompt tokens, a few rows at a time: [at
        most `PROMPT_LOGPROBS_ROWS`, vocab_size].
        """
        row = inputs.first_rows[index]
        end = row + min(item.end, num_prompt_tokens - 1) - item.start
        for start in range(row, end, PROMPT_LOGPROBS_ROWS):
            yield self.logits(hidden[start : min(end, start + PROMPT_LOGPROBS_ROWS)])

    def compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batches: Sequence[AttentionBatch],
        wanted: WantedTokens | None = None,
        states: HiddenStates | None = None,
        received: torch.Tensor | None = None,
        turns: LayerTurns | None = None,
    ) -> torch.Tensor:
        """Compute without graphs; returns as `Decoder.forward`: hidden states [num_tokens, hidden_size] of the wanted
        tokens, or the residual stream for the next pipeline stage.

        Args:
            batches: one for each KV group.
            wanted: the wanted tokens, with a batch for each KV group in which only these are read; None = all tokens.
            states: is filled with hidden states of layers; None = none are needed.
            received: the residual stream from the stage before; None = this is the first.
            turns: order in which contexts (ranks with other tokens of the step) write KV; None = all tokens are here.
        """
        groups = self._group_of_state
        if wanted is not None:
            wanted = replace(wanted, batches={state: wanted.batches[groups[state]] for state in self._wanted_states})
        by_state = [batches[group] for group in groups]
        return self._decoder.forward(
            input_ids, positions, self._arena.layers, by_state, self._backends, wanted, states, received, turns
        )

    def advance_past_accepted(
        self, step: SchedulerOutput, inputs: ModelInputs, num_accepted: Sequence[int] | None
    ) -> None:
        """Advance states that cannot be rewound (recurrent layers) past the accepted drafts; until then they are as
        before the drafts. Call it before the next step, and before others read the step's blocks.

        Args:
            inputs: of this step.
            num_accepted: number of accepted drafts of each scheduled request; None = this rank is not the leader.
        """
        if self.layout.can_rewind or not any(item.num_drafts for item in step.scheduled):
            return
        counts = self._as_led(num_accepted, len(step.scheduled))
        if not counts.any():
            return
        if self._links is None or self._links.has_last_tokens:  # NOTE: no other context has computed any draft
            self._advance(inputs.parts or (inputs,), counts)
        if self._links is not None:  # NOTE: others may read the states of all ranks then
            self._links.group.add(torch.zeros(1, 1), None, torch.float32)

    def _advance(self, parts: Sequence[ModelInputs], counts: npt.NDArray[np.int64]) -> None:
        ends = np.cumsum([part.num_ended for part in parts])
        for part, own in zip(parts, np.split(counts, ends[:-1]), strict=True):
            in_batch = np.append(own, [0] * part.goes_on)[np.argsort(part.first_tokens)].tolist()
            for group, batch in zip(self.layout.groups, part.batches, strict=True):
                if batch.drafted is not None and group.layers:
                    advance_past_accepted(batch, in_batch, self._backends, self._arena.layers[group.layers[0]])
                    self.await_kernels()

    def _as_led(self, counts: Sequence[int] | None, num_requests: int) -> npt.NDArray[np.int64]:
        """The leader's `counts`. All ranks call this at the same time."""
        own = np.zeros(num_requests, dtype=np.int64) if counts is None else np.asarray(counts, dtype=np.int64)
        if self._links is None:
            return own
        told = torch.from_numpy(own.astype(np.float32)[:, None])
        return self._links.group.add(told, None, torch.float32)[:, 0].numpy().astype(np.int64)

    def await_kernels(self) -> None:
        """Wait, on an accelerator, until the step's KV is written, since its blocks may be leased or reused after the
        step. Sampling waits for that too.
        """
        if self._arena.pages.is_cuda:
            torch.cuda.current_stream(self._arena.pages.device).synchronize()

    def _capture_graphs(self, max_num_requests: int, max_model_len: int) -> DecodeGraphs | None:
        """CUDA graphs for decode steps; None if the device or a backend does not allow them."""
        device, layout = self._arena.pages.device, self._arena.layout
        are_safe = [self._decoder.graph_safe, *(backend.graph_safe for backend in self._backends.values())]
        if device.type != "cuda" or not all(are_safe):
            return None
        graphs = DecodeGraphs(
            self.compute,
            padded_sizes(max_num_requests),
            num_groups=len(layout.groups),
            block_size=layout.block_size,
            max_model_len=max_model_len,
            device=device,
        )
        graphs.prepare()
        return graphs


def _groups_by_state(layout: KVLayout) -> tuple[int, ...]:
    return tuple(layout.group_of_layer(layer)[0] for layer in range(layout.num_layers))
