import pytest

from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason
from tests.helpers.requests import request_of

EOS = 2


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        (SamplingParams(), [5, EOS], FinishReason.STOP, None),
        (SamplingParams(ignore_eos=True), [5, EOS], None, None),
        (SamplingParams(stop_token_ids=(7,)), [7], FinishReason.STOP, 7),
        (SamplingParams(stop_token_ids=(EOS,), ignore_eos=True), [EOS], FinishReason.STOP, EOS),
        (SamplingParams(min_tokens=2), [EOS], None, None),
        (SamplingParams(min_tokens=2), [EOS, EOS], FinishReason.STOP, None),
        (SamplingParams(), [5, 5, 5, 5], FinishReason.LENGTH, None),
        (SamplingParams(), [5, 5, 5, EOS], FinishReason.STOP, None),
    ],
)
def test_what_ends_a_request(
    params: SamplingParams, tokens: list[int], reason: FinishReason | None, stop_reason: int | None
) -> None:
    request = request_of("a", [1], max_tokens=4, eos=frozenset({EOS}), params=params)
    for token_id in tokens[:-1]:
        request.append(token_id)
        assert request.finish_reason is None
    request.append(tokens[-1])
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert request.output_token_ids == tokens


def test_only_a_request_with_an_answer_under_way_is_decoding() -> None:
    request = request_of("a", [1, 2])
    seen = []
    for num_computed, num_appended in ((0, 0), (1, 0), (2, 1), (0, 0)):
        request.num_computed_tokens = num_computed
        for _ in range(num_appended):
            request.append(5)
        seen.append((request.num_pending_tokens, request.is_decoding))
    assert seen == [(2, False), (1, False), (1, True), (3, False)]


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2]
    request = request_of("a", prompt)
    request.append(3)
    assert prompt == [1, 2]
