"""Runs the model for an engine in this process: steps in, sampled tokens and the next drafts out.

It schedules nothing, and never writes a block that the step did not schedule.
"""

import time
from collections.abc import Mapping, Sequence

import torch

from tandem.compute.native.sampling import NativeDraws
from tandem.compute.step import HiddenStates
from tandem.core.errors import RanksLostError
from tandem.core.types import TokenLogprobs
from tandem.engine.constraint import constraints_of
from tandem.engine.current_device import current_device
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.executor import FinishedStep
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.inputs import ModelInputs
from tandem.engine.logits import SamplingState
from tandem.engine.masks import MaskMaker
from tandem.engine.sampler import Sampler
from tandem.engine.verification import choose_tokens
from tandem.scheduler.output import ExecutorOutput, NewRequest, SampledToken, ScheduledRequest, SchedulerOutput


class ModelRunner:
    """An `Executor` in this process, on one device: runs the forward pass, samples, and has drafts made for the next
    step.

    Args:
        forward: the model, with its memory.
        masks: of answers with a grammar; None = there are none.
        draws: compiled sampling on the CPU; None = PyTorch samples.
        speculation: drafts of the next step; None = none.
    """

    def __init__(
        self,
        forward: ForwardPass,
        *,
        masks: MaskMaker | None = None,
        draws: NativeDraws | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._forward = forward
        self._sampler = Sampler(draws)
        self._masks = masks
        self._speculation = speculation
        self._requests: dict[str, NewRequest] = {}
        self._states: dict[str, SamplingState] = {}

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> FinishedStep:
        """Computes the step before it returns."""
        with current_device(self._forward.device):
            try:
                return FinishedStep(self._execute(step))
            except RanksLostError:
                if self._masks is not None:
                    self._masks.finish()  # NOTE: those of this step, which nobody will ask for
                raise

    def _execute(self, step: SchedulerOutput) -> ExecutorOutput:
        for request_id in step.released:
            self._requests.pop(request_id, None)
            self._states.pop(request_id, None)
        for request in step.new:
            self._requests[request.request_id] = request
        began_s = time.perf_counter()
        states = [self._state_of(item.request_id) for item in step.scheduled if item.samples]
        if self._masks is not None:
            self._masks.start(constraints_of([state.constraint for state in states]))
        states_read = self._states_read()
        inputs, hidden = self._forward.run(step, states_read)
        sampled = self._sample(step, inputs, hidden, states)
        prompt_logprobs = self._prompt_logprobs(step, inputs, hidden)
        if self._speculation is None:
            return ExecutorOutput(sampled, prompt_logprobs)
        num_accepted = [len(sampled.get(item.request_id, (None,))) - 1 for item in step.scheduled]
        self._forward.advance_past_accepted(step, inputs, num_accepted)
        step_s = time.perf_counter() - began_s
        self._speculation.begin(step)
        if states_read is not None:
            self._speculation.observe(step, inputs.first_tokens, states_read.tensor)
        drafts = self._speculation.drafts(step, sampled, step_s)
        return ExecutorOutput(sampled, prompt_logprobs, drafts, self._speculation.take_times())

    def _states_read(self) -> HiddenStates | None:
        """Empty hidden states for the layers that the drafter reads; None = it reads none."""
        layers = () if self._speculation is None else self._speculation.layers_read
        return HiddenStates(layers) if layers else None

    def _sample(
        self, step: SchedulerOutput, inputs: ModelInputs, hidden: torch.Tensor, states: Sequence[SamplingState]
    ) -> dict[str, list[SampledToken]]:
        sampling = [item for item in step.scheduled if item.samples]
        if not sampling:
            self._forward.await_kernels()
            return {}
        logits = self._forward.logits(hidden, inputs.sample_rows)  # [num_sampling + num_drafts, vocab_size]
        if self._masks is not None:
            self._masks.finish()
        drafts = [item.draft_token_ids for item in sampling]
        chosen = choose_tokens(self._sampler, logits, states, drafts, self._masks)
        return {item.request_id: tokens for item, tokens in zip(sampling, chosen, strict=True)}

    def _state_of(self, request_id: str) -> SamplingState:
        state = self._states.get(request_id)
        if state is None:
            request = self._requests[request_id]
            state = self._states[request_id] = SamplingState(
                request.params,
                request.seed,
                request.prompt_token_ids,
                request.output_token_ids,
                sorted(request.eos_token_ids),
                self._forward.vocab_size,
            )
        return state

    def _prompt_logprobs(
        self, step: SchedulerOutput, inputs: ModelInputs, hidden: torch.Tensor
    ) -> Mapping[str, tuple[TokenLogprobs, ...]]:
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        for index, item in enumerate(step.scheduled):
            if item.scores_prompt:
                entries = self._score_prompt(inputs, hidden, index, item)
                if entries:
                    found[item.request_id] = entries
        return found

    def _score_prompt(
        self, inputs: ModelInputs, hidden: torch.Tensor, index: int, item: ScheduledRequest
    ) -> tuple[TokenLogprobs, ...]:
        """Logprobs of the prompt tokens that this chunk predicts, from a few rows of logits at a time."""
        request = self._requests[item.request_id]
        num_top = request.params.prompt_logprobs
        assert num_top is not None
        targets = request.prompt_token_ids[item.start + 1 : item.end + 1]
        entries: list[TokenLogprobs] = []
        for logits in self._forward.scored_logits(inputs, hidden, index, item, len(request.prompt_token_ids)):
            entries += self._sampler.prompt_logprobs(logits, targets[len(entries) :][: len(logits)], num_top)
        return tuple(entries)
