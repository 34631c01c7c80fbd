"""Parses JSON bodies as pydantic models, the same in every dialect. Invariant: errors name the field and the remedy."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, FailFast, ValidationError
from pydantic_core import PydanticCustomError

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError
from tandem.gateway.exact import exact_fields

AnyBody = TypeVar("AnyBody", bound=BaseModel)
AnyEntry = TypeVar("AnyEntry")


class _FailFast(FailFast):
    """Pydantic's `FailFast`, made hashable for use in a union."""

    __hash__ = object.__hash__


Entries = Annotated[list[AnyEntry], _FailFast()]  # refused at its first wrong entry, since each one costs a report


def at_most(num_entries: int) -> BeforeValidator:
    """Limits the members of an object field. They are counted before validation, since each invalid one is reported."""

    def counted(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_entries:
            counts = {"most": num_entries, "given": len(value)}
            raise PydanticCustomError("too_long", "at most {most} entries are accepted, not {given}", counts)
        return value

    return BeforeValidator(counted)


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Parses and validates a body as `kind`.

    Raises:
        RequestError: it is not a JSON object, or naming a field of the wrong type.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"the body is a JSON {type(parsed).__name__}; an object is expected", code="invalid_json")
    try:
        return kind.model_validate(exact_fields(body, parsed))
    except ValidationError as error:
        raise _wrong(error, parsed) from error


def _wrong(error: ValidationError, body: Any) -> RequestError:
    """The error for the first invalid field, by the client's name for it, with all accepted types."""
    problems = error.errors(include_url=False)
    first = problems[0]
    param = str(first["loc"][0])[:128] if first["loc"] else None
    if first["type"] == "missing":
        where = ".".join(filter(None, (_path(first["loc"][:-1], body), str(first["loc"][-1]))))
        return RequestError(f"{where} is missing", param=param, code="missing_required_parameter")
    where = _path(first["loc"], body) or str(param)
    wanted = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][:1] == first["loc"][:1])
    return RequestError(f"{where}={shown(first['input'])}: {'; or: '.join(wanted)}", param=param, code="invalid_type")


def _path(place: Sequence[int | str], value: Any) -> str:
    """The path of a field as the client wrote it, such as `text.verbosity`; pydantic's `place` adds union members."""
    path = ""
    for part in place:
        if isinstance(value, dict) and part in value:
            path += ("." if path else "") + shown(part).strip("'")
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int):
            path += f"[{part}]"
            value = value[part]
    return path
