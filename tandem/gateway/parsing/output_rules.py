"""Writes the grammar of an output format. Pure text; the grammar compiler decides whether it can be enforced."""

from tandem.core.errors import InvalidRequestError
from tandem.gateway.conversation import FormatKind, OutputFormat
from tandem.gateway.errors import RequestError
from tandem.text.grammar import choice_grammar, json_object_grammar, lark_grammar, regex_grammar, schema_grammar


def output_grammar(output: OutputFormat) -> str:
    """The grammar of a format. Raises RequestError naming the field, and the part that cannot be enforced."""
    try:
        return _grammar(output)
    except InvalidRequestError as error:
        raise RequestError(f"{output.where or output.kind}: {error}", param=output.where or None) from error


def _grammar(output: OutputFormat) -> str:
    match output.kind:
        case FormatKind.JSON_SCHEMA:
            return schema_grammar(output.value)
        case FormatKind.JSON_OBJECT:
            return json_object_grammar()
        case FormatKind.REGEX:
            return regex_grammar(output.value)
        case FormatKind.CHOICE:
            return choice_grammar(output.value)
        case FormatKind.GRAMMAR:
            return lark_grammar(output.value)
