"""Usage of a request, and the most it may use, for its bill: a prompt counts once however many answers it got. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from tandem.accounts.usage import Usage
from tandem.gateway.cache_marks import SHORT_S
from tandem.gateway.request import ChoiceRequest, ChoiceResult, ServeRequest


def usage_of_results(
    request: ServeRequest, results: Sequence[ChoiceResult], generated: Mapping[int, int] = MappingProxyType({})
) -> Usage:
    """Of what was generated so far; a prompt of which nothing was, is free.

    Args:
        generated: tokens by choice, where more are known of than its result has taken.
    """
    total = Usage()
    for indexes in _by_prompt(request.choices):
        num_output = sum(max(results[index].num_output_tokens, generated.get(index, 0)) for index in indexes)
        if num_output or any(results[index].is_computed for index in indexes):
            split = results[indexes[0]].split
            total += Usage(
                num_input=split.num_input,
                num_written_5m=split.num_written_short,
                num_written_1h=split.num_written_long,
                num_read=split.num_read,
                num_output=num_output,
            )
    return total


def most_usage(request: ServeRequest, max_model_len: int | None) -> Usage:
    """Nothing cached, every pin granted, and every answer as long as it may be.

    Args:
        max_model_len: tokens of the context; None: not known, so only what was asked for bounds an answer.
    """
    total = Usage()
    for indexes in _by_prompt(request.choices):
        num_prompt = len(request.choices[indexes[0]].prompt_token_ids)
        num_long = max((pin.num_tokens for pin in request.pins if pin.ttl_s > SHORT_S), default=0)
        num_kept = max((pin.num_tokens for pin in request.pins), default=0)
        total += Usage(
            num_input=max(0, num_prompt - num_kept),
            num_written_5m=max(0, num_kept - num_long),
            num_written_1h=num_long,
            num_output=sum(_longest(request.choices[index], max_model_len) for index in indexes),
        )
    return total


def _longest(choice: ChoiceRequest, max_model_len: int | None) -> int:
    bounds = (choice.params.max_tokens, max_model_len and max_model_len - len(choice.prompt_token_ids))
    return max(0, min((bound for bound in bounds if bound is not None), default=0))


def _by_prompt(choices: Sequence[ChoiceRequest]) -> Iterator[list[int]]:
    """Indexes of the choices of each prompt. NOTE: the choices of one prompt are neighbours and share its tuple."""
    indexes: list[int] = []
    for index, choice in enumerate(choices):
        if indexes and choices[indexes[-1]].prompt_token_ids is not choice.prompt_token_ids:
            yield indexes
            indexes = []
        indexes.append(index)
    yield indexes
