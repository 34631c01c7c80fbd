"""Selects the format of a model's tool calls: by name, or detected from its chat template."""

import re

from tandem.core.errors import ConfigurationError, shown
from tandem.gateway.parsing.hermes import START as HERMES_START
from tandem.gateway.parsing.hermes import HermesFormat
from tandem.gateway.parsing.llama3_json import TAG, LlamaJsonFormat
from tandem.gateway.parsing.llama_pythonic import PythonicFormat
from tandem.gateway.parsing.mistral import ARGS, CALL_ID, MistralFormat
from tandem.gateway.parsing.mistral import START as MISTRAL_START
from tandem.gateway.parsing.tool_format import ToolFormat
from tandem.gateway.parsing.trial import refuses_several_calls

NAMES = ("hermes", "llama3_json", "llama_pythonic", "mistral")
_KEYWORD_CALL = re.compile(r"\[\w+\(\w+\s*=\s*\w+")
# NOTE: they share Hermes's marks, but write something else between them.
_OTHER_BODIES = ("<function=", "<arg_key>", "<parameter=")


def find_tool_format(template: str | None, parser: str = "auto") -> ToolFormat | None:
    """The format, or None where the model is not known to call tools. `parser`: auto, none or a known name.

    Raises:
        ConfigurationError: `parser` is none of these.
    """
    if parser not in ("auto", "none", *NAMES):
        raise ConfigurationError(f"no tool parser is called {shown(parser)}; it may be auto, none, {', '.join(NAMES)}")
    template = template or ""
    name = _detected(template) if parser == "auto" else parser
    match name:
        case "hermes":
            return HermesFormat()
        case "llama3_json":
            return LlamaJsonFormat(is_parallel=not refuses_several_calls(template))
        case "llama_pythonic":
            return PythonicFormat()
        case "mistral":
            return MistralFormat(is_named=ARGS in template, has_ids=CALL_ID in template)
    return None


def _detected(template: str) -> str | None:
    if MISTRAL_START in template:
        return "mistral"
    if HERMES_START in template:
        return None if any(body in template for body in _OTHER_BODIES) else "hermes"
    if _KEYWORD_CALL.search(template):
        return "llama_pythonic"
    if TAG in template or ("ipython" in template and re.search(r"\bparameters\b", template)):
        return "llama3_json"
    return None
