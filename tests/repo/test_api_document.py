"""docs/api.md says of every field what becomes of it."""

import re
from pathlib import Path

import pytest

from tandem.gateway.anthropic import fields as anthropic
from tandem.gateway.openai import fields as openai

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
OPENAI, ANTHROPIC = DOCUMENT.split("## OpenAI")[1].split("## Anthropic")

NAMES = [
    (OPENAI, {*openai.ChatBody.model_fields, *openai.CompletionBody.model_fields, *openai.StreamOptions.model_fields}),
    (OPENAI, {*openai.HARMLESS, *openai.HARMLESS_VALUES} - {"tool_choice", "function_call"}),
    (ANTHROPIC, {*anthropic.MessagesBody.model_fields, *anthropic.HARMLESS, *anthropic.HARMLESS_VALUES}),
]


@pytest.mark.parametrize(("part", "names"), NAMES, ids=["openai", "openai, not acted on", "anthropic"])
def test_every_field_is_in_the_document(part: str, names: set[str]) -> None:
    assert names - set(re.findall(r"`([a-z_]+)[`:]", part)) == set()
