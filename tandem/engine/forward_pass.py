"""Forward pass of one model over one arena: steps in, hidden states and logits out.

Keeps a copy of the block tables of the requests that its steps name (`InputBuilder`). Never decides what runs, chooses
no token, and never writes a block that the step did not schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from tandem.architecture.model import ModelSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import Backends
from tandem.compute.collectives import Collectives, RankLinks
from tandem.compute.recurrent import settle
from tandem.compute.step import AttentionBatch, HiddenStates, LayerTurns, WantedTokens
from tandem.engine.graphs import DecodeGraphs, padded_sizes
from tandem.engine.inputs import InputBuilder, ModelInputs
from tandem.engine.stage_flow import StageFlow, joined_inputs, micro_batches
from tandem.engine.token_parts import ContextTurns, token_parts
from tandem.kvcache.spec import KVLayout
from tandem.models.decoder import Decoder
from tandem.scheduler.output import ScheduledRequest, SchedulerOutput

PROMPT_LOGPROBS_ROWS = 64


class ForwardPass:
    """Computes consecutive steps of one model.

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
        self._flow = None if links is None or links.num_stages == 1 else StageFlow(links, spec)
        self._turns = None if links is None or links.num_contexts == 1 else ContextTurns(links)
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
            states: is filled in for all tokens; such a step is no replay of a graph.
        """
        if self._flow is not None:
            assert states is None, "drafters that read states are refused with stages"
            return self._run_stage(step, self._flow)
        if self._turns is not None and self._links is not None:
            assert states is None, "drafters that read states are refused with contexts"
            return self._run_context(step, self._turns, self._links)
        inputs = self._inputs.build(step)
        hidden = self.graphs.run(inputs) if self.graphs is not None and states is None else None
        if hidden is None:
            hidden = self._compute(inputs, states)
        return inputs, hidden

    def _run_stage(self, step: SchedulerOutput, flow: StageFlow) -> tuple[ModelInputs, torch.Tensor]:
        """Micro-batches follow one another, so that other stages compute at the same time."""
        parts, hidden = [], []
        for part in micro_batches(step, flow.num_stages, self.layout.block_size):
            inputs = self._inputs.build(part.work, part.ends)
            received = flow.receive(inputs)
            stream = self.compute(inputs.input_ids, inputs.positions, inputs.batches, inputs.wanted, received=received)
            flow.send(stream)
            parts.append(inputs)
            hidden.append(stream)
        return joined_inputs(parts, hidden), torch.cat(hidden)

    def _run_context(
        self, step: SchedulerOutput, turns: ContextTurns, links: RankLinks
    ) -> tuple[ModelInputs, torch.Tensor]:
        """This context's tokens. Where a step has no prompt that is worth a division, the last one computes all."""
        parts = token_parts(step.scheduled, links.context, links.num_contexts, self.layout.block_size)
        inputs = self._inputs.build(step, parts=parts or ())
        if parts is None and not links.is_last:
            return inputs, torch.empty(0, 0)
        shared = None if parts is None else turns
        return inputs, self.compute(inputs.input_ids, inputs.positions, inputs.batches, inputs.wanted, turns=shared)

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
        """Logits of the scheduled request `index` at the positions that predict tokens of its prompt, a few rows at a
        time: [at most `PROMPT_LOGPROBS_ROWS`, vocab_size].
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
        """Compute without graphs. `batches` has one entry a KV group; the decoder wants one a layer that keeps state.
        `wanted` likewise, of those that are read. `states`, `received`, `turns`: as in `Decoder.forward`.
        """
        groups = self._group_of_state
        if wanted is not None:
            wanted = replace(wanted, batches={state: wanted.batches[groups[state]] for state in self._wanted_states})
        by_state = [batches[group] for group in groups]
        return self._decoder.forward(
            input_ids, positions, self._arena.layers, by_state, self._backends, wanted, states, received, turns
        )

    def settle(self, inputs: ModelInputs, num_right: Sequence[int] | None) -> None:
        """Carry the states that cannot be rewound on, behind the drafts that were right. Until then they are those
        before the drafts. Call it before the next step, and before others read the step's blocks.

        Args:
            num_right: of each scheduled request, how many of its drafts were; None = at a rank that does not lead.
        """
        if self._turns is not None and self._links is not None and not self._links.is_last:
            return  # NOTE: the last context has computed all drafts
        parts = inputs.parts or (inputs,)
        if all(batch.drafted is None for part in parts for batch in part.batches):
            return
        counts = self._as_led(num_right, len(inputs.first_tokens))
        if not counts.any():
            return
        ends = np.cumsum([part.num_ended for part in parts])
        for part, own in zip(parts, np.split(counts, ends[:-1]), strict=True):
            in_batch = np.append(own, [0] * part.goes_on)[np.argsort(part.first_tokens)].tolist()
            for group, batch in zip(self.layout.groups, part.batches, strict=True):
                if batch.drafted is not None and group.layers:
                    settle(batch, in_batch, self._backends, self._arena.layers[group.layers[0]])
                    self.await_kernels()
        if self._links is not None:  # NOTE: others may read the states of all ranks then
            self._drafting(self._links).add(torch.zeros(1, 1), None, torch.float32)

    def _as_led(self, counts: Sequence[int] | None, num_requests: int) -> npt.NDArray[np.int64]:
        """The leader's `counts`, which all ranks call for together."""
        own = np.zeros(num_requests, dtype=np.int64) if counts is None else np.asarray(counts, dtype=np.int64)
        if self._links is None:
            return own
        told = torch.from_numpy(own.astype(np.float32)[:, None])
        return self._drafting(self._links).add(told, None, torch.float32)[:, 0].numpy().astype(np.int64)

    def _drafting(self, links: RankLinks) -> Collectives:
        """Of the ranks that compute drafts."""
        return links.group if self._turns is None else links.shard

    def await_kernels(self) -> None:
        """On an accelerator, until the step's KV is written: when the step is over its blocks may be leased or reused.
        Choosing tokens waits for that too.
        """
        if self._arena.pages.is_cuda:
            torch.cuda.current_stream(self._arena.pages.device).synchronize()

    def _capture_graphs(self, max_num_requests: int, max_model_len: int) -> DecodeGraphs | None:
        """CUDA graphs for decode steps, where device and backend allow them."""
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
