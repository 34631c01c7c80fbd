"""Bodies with very many wrong entries cost no more to refuse than to read."""

import tracemalloc
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from tandem.gateway.anthropic.fields import MessagesBody
from tandem.gateway.errors import RequestError
from tandem.gateway.openai.fields import ChatBody, CompletionBody
from tandem.gateway.openai.responses.fields import InputTokensBody, ResponsesBody
from tandem.gateway.parse import parse_body
from tandem.gateway.tokens import DetokenizeBody, TokenizeBody

BODIES = (ChatBody, CompletionBody, ResponsesBody, InputTokensBody, MessagesBody, TokenizeBody, DetokenizeBody)
MANY = 300_000


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ChatBody, "messages", [0] * MANY),
        (ChatBody, "stop", [0] * MANY),
        (ChatBody, "stop_token_ids", ["x"] * MANY),
        (CompletionBody, "prompt", [*([0] * MANY), "x"]),
    ],
)
def test_wrong_entries_take_no_memory(kind: type[BaseModel], field: str, value: Any) -> None:
    body = orjson.dumps({"model": "m", "messages": [], "prompt": "", field: value})
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=field):
            parse_body(kind, body)
        assert tracemalloc.get_traced_memory()[1] < len(body) + 30 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_no_field_reports_more_than_a_few_wrong_entries(kind: type[BaseModel]) -> None:
    many = 5000
    wrong: list[Any] = [[None] * many, [0] * many, ["x"] * many, [[None]] * many, [[None] * many]]
    wrong.append({str(number): [] for number in range(many)})
    needed = {"model": "m", "messages": [], "prompt": "", "input": "", "max_tokens": 1, "tokens": []}
    causes: list[tuple[str, BaseException | None]] = []
    for field in kind.model_fields:
        for value in wrong:
            try:
                parse_body(kind, orjson.dumps({**needed, field: value}))
            except RequestError as refusal:
                causes.append((field, refusal.__cause__))
    assert len(causes) > len(kind.model_fields)
    for field, cause in causes:
        assert isinstance(cause, ValidationError)
        assert cause.error_count() < 10, field


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [
        (ResponsesBody, {"text": {"verbosity": "low"}}, "text.verbosity='low'"),
        (ResponsesBody, {"reasoning": {"mode": "x"}}, "reasoning.mode='x'"),
        (ChatBody, {"prompt_cache_options": {"mode": 5}}, "prompt_cache_options.mode=5"),
        (ChatBody, {"stop_token_ids": [1, "x"]}, "stop_token_ids[1]='x'"),
        (ChatBody, {"logit_bias": {"17": "x"}}, "logit_bias.17='x'"),
        (CompletionBody, {"prompt": [[1, "x"]]}, "prompt"),
    ],
)
def test_a_wrong_value_is_named_by_its_whole_path(kind: type[BaseModel], more: dict[str, Any], named: str) -> None:
    """Regression: `text='low'`, which is no field that anybody sent."""
    body = {"model": "m", "messages": [], "prompt": "", "input": "", **more}
    with pytest.raises(RequestError) as refusal:
        parse_body(kind, orjson.dumps(body))
    assert str(refusal.value).startswith(named)
    assert refusal.value.param == next(iter(more))
