"""Grammar of an output format. Pure text; its compiler decides whether it can be enforced."""

from tandem.gateway.conversation import FormatKind, OutputFormat
from tandem.text.grammar import choice_grammar, json_object_grammar, lark_grammar, regex_grammar, schema_grammar


def output_grammar(output: OutputFormat) -> str:
    """The grammar of a format. Raises InvalidRequestError naming the part that cannot be enforced."""
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
