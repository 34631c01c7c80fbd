"""Creates the choices of a request from its prompts and parameters, the same in every dialect.

A choice is one answer to one prompt. Invariant: every choice has a seed before it leaves the gateway, so that every
worker samples the same tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from tandem.core.errors import shown
from tandem.core.fresh_numbers import FreshNumbers
from tandem.core.randomness import choice_seed
from tandem.core.sampling_params import SamplingParams
from tandem.core.token_ids import packed
from tandem.gateway.errors import RequestError
from tandem.gateway.request import ChoiceRequest

EXPECTED_OUTPUT_TOKENS = 256  # of an answer whose length nobody knows


def make_choices(
    request_id: str, prompts: Sequence[Sequence[int]], params: SamplingParams, fresh: FreshNumbers
) -> tuple[ChoiceRequest, ...]:
    """Makes `params.n` choices for each prompt. Choices of a request without a seed get unpredictable ones, which all
    differ; with a seed, a prompt's answers are those that it would have alone.
    """
    is_single = len(prompts) * params.n == 1
    given = params.seed
    drawn = fresh.bits(63) if given is None else 0
    choices: list[ChoiceRequest] = []
    for token_ids in map(packed, prompts):
        for number in range(params.n):
            index = len(choices)
            seed = choice_seed(drawn, index) if given is None else choice_seed(given, number)
            own = replace(params, n=1, seed=seed)
            choices.append(ChoiceRequest(index, request_id if is_single else f"{request_id}/{index}", token_ids, own))
    return tuple(choices)


def expected_output(params: SamplingParams) -> int:
    """Estimated output tokens of one answer."""
    if params.ignore_eos and params.max_tokens is not None:
        return params.max_tokens
    return min(params.max_tokens or EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS)


def check_num_choices(num_prompts: int, n: int | None, max_choices: int) -> None:
    """Raises RequestError for too many choices; called before any prompt is encoded."""
    if num_prompts * (n or 1) > max_choices:
        raise RequestError(
            f"{num_prompts} prompts with n={shown(n or 1)} are more than {max_choices} answers; send several requests",
            param="prompt" if num_prompts > 1 else "n",
        )
