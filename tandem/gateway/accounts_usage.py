"""Usage of a request so far, and the most it may use, for its bill. A prompt counts once for all its answers. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from tandem.accounts.usage import Usage
from tandem.gateway.cache_lifetimes import SHORT_S
from tandem.gateway.request import ChoiceRequest, ChoiceResult, ServeRequest


def usage_of_results(
    request: ServeRequest, results: Sequence[ChoiceResult], generated: Mapping[int, int] = MappingProxyType({})
) -> Usage:
    """Tokens used so far. A prompt is counted once it was computed for any of its choices; before that it is free.

    Args:
        generated: output tokens by choice, where more are known than its result has counted.
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
    """The most that a request may use: nothing is cached, every pin is granted, and every answer has its full length.

    Args:
        max_model_len: tokens of the context; None: not known, so only `max_tokens` bounds an answer.
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
    """Indexes of the choices of each prompt. NOTE: the choices of one prompt are neighbours and share its array."""
    indexes: list[int] = []
    for index, choice in enumerate(choices):
        if indexes and choices[indexes[-1]].prompt_token_ids is not choice.prompt_token_ids:
            yield indexes
            indexes = []
        indexes.append(index)
    yield indexes
