"""Plain updates that are merged say what their parts said; other updates are not plain."""

from dataclasses import replace
from functools import reduce

import pytest

from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.rpc.messages import GenerateUpdate
from tandem.rpc.plain_updates import is_plain, merged

WORD = RequestOutput("r", 0, (1,), "a")
SCORED = TokenLogprobs(1, -1.0, 1)
NOT_PLAIN = [
    GenerateUpdate(replace(WORD, finish_reason=FinishReason.ERROR, stop_reason="why")),
    GenerateUpdate(replace(WORD, logprobs=(SCORED,))),
    GenerateUpdate(replace(WORD, prompt_logprobs=(None,))),
    GenerateUpdate(replace(WORD, metrics=RequestMetrics(0.0, None, None, None, 1, 1, 0, 0))),
    GenerateUpdate(replace(WORD, index=3)),
    GenerateUpdate(WORD, (Stage("s", "w", 0.0, 0.0),)),
]


@pytest.mark.parametrize("update", NOT_PLAIN, ids=repr)
def test_whatever_says_more_than_tokens_and_text_is_not_plain(update: GenerateUpdate) -> None:
    assert not is_plain(update)


def test_plain_updates_are_joined_in_order() -> None:
    told = [GenerateUpdate(RequestOutput("r", 0, (i,), chr(97 + i))) for i in range(4)]
    told.append(GenerateUpdate(RequestOutput("r", 0, (4, 5), "")))
    assert all(map(is_plain, told))
    assert reduce(merged, told) == GenerateUpdate(RequestOutput("r", 0, (0, 1, 2, 3, 4, 5), "abcd"))
