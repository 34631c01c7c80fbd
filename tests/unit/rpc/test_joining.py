"""Plain news that is joined says what its parts said; other news is not plain."""

from dataclasses import replace
from functools import reduce

import pytest

from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.rpc.joining import is_plain, joined
from tandem.rpc.messages import GenerateNews

WORD = RequestOutput("r", 0, (1,), "a")
SCORED = TokenLogprobs(1, -1.0, 1)
NOT_PLAIN = [
    GenerateNews(replace(WORD, finish_reason=FinishReason.ERROR, stop_reason="why")),
    GenerateNews(replace(WORD, logprobs=(SCORED,))),
    GenerateNews(replace(WORD, prompt_logprobs=(None,))),
    GenerateNews(replace(WORD, metrics=RequestMetrics(0.0, None, None, None, 1, 1, 0, 0))),
    GenerateNews(replace(WORD, index=3)),
    GenerateNews(WORD, (Stage("s", "w", 0.0, 0.0),)),
]


@pytest.mark.parametrize("news", NOT_PLAIN, ids=repr)
def test_whatever_says_more_than_tokens_and_text_is_not_plain(news: GenerateNews) -> None:
    assert not is_plain(news)


def test_plain_news_is_joined_in_order() -> None:
    told = [GenerateNews(RequestOutput("r", 0, (i,), chr(97 + i))) for i in range(4)]
    told.append(GenerateNews(RequestOutput("r", 0, (4, 5), "")))
    assert all(map(is_plain, told))
    assert reduce(joined, told) == GenerateNews(RequestOutput("r", 0, (0, 1, 2, 3, 4, 5), "abcd"))
