"""Draws guesses with the served model's random numbers, so that equal probabilities give equal tokens."""

from tandem.core.sampling_params import SamplingParams
from tandem.engine.logits import SamplingState
from tandem.scheduler.output import NewRequest


def drawing_state(request: NewRequest, vocab_size: int) -> SamplingState:
    """Sampling options for guesses at a request: its temperature, top-k, top-p and min-p, and the random numbers of its
    seed. Before each draw `num_output_tokens` must be set to the number of output tokens before the guess.

    NOTE: no penalties, bias or grammar: their state could not be taken back at no cost.
    """
    params = request.params
    drawing = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return SamplingState(drawing, request.seed, (), (), (), vocab_size)
