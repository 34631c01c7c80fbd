"""Every message of every method survives the wire, and no bytes whatever break its reader."""

from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import InvalidRequestError
from tandem.rpc.form import Form
from tandem.rpc.methods import ROUTER_SERVICE, WORKER_SERVICE, Method
from tandem.rpc.v1 import router_pb2, worker_pb2
from tests.unit.rpc.strategies import EVERY

SOME = settings(max_examples=25, deadline=None, derandomize=True)
FORMS = [
    pytest.param(form, strategy, id=f"{method.name}-{side}")
    for method, strategies in EVERY.items()
    for side, form, strategy in zip(("request", "answer"), (method.request, method.answer), strategies, strict=True)
]


@pytest.mark.parametrize(("form", "strategy"), FORMS)
def test_every_message_survives(form: Form[Any], strategy: st.SearchStrategy[Any]) -> None:
    @SOME
    @given(strategy)
    def check(value: Any) -> None:
        again = form.decode(form.encode(value))
        assert again == value
        assert _kinds(again) == _kinds(value)

    check()


@pytest.mark.parametrize(("form", "strategy"), FORMS)
def test_no_bytes_break_the_reader(form: Form[Any], strategy: st.SearchStrategy[Any]) -> None:
    def read(data: bytes) -> None:
        with suppress(InvalidRequestError):
            form.decode(data)

    @SOME
    @given(st.binary(max_size=64))
    def check_random(data: bytes) -> None:
        read(data)

    @SOME
    @given(strategy, st.integers(0), st.integers(1, 255))
    def check_damaged(value: Any, place: int, change: int) -> None:
        data = bytearray(form.encode(value))
        if data:
            data[place % len(data)] ^= change
        read(bytes(data))

    check_random()
    check_damaged()


def test_the_table_is_what_the_proto_files_say() -> None:
    services = {
        WORKER_SERVICE: worker_pb2.DESCRIPTOR.services_by_name["Worker"],
        ROUTER_SERVICE: router_pb2.DESCRIPTOR.services_by_name["Router"],
    }
    declared = {
        (name, method.name, method.input_type.full_name, method.output_type.full_name)
        for name, service in services.items()
        for method in service.methods
    }
    assert {_described(method) for method in EVERY} == declared


def _kinds(value: Any) -> Any:
    """The classes within `value`: equal values may differ in them, as 1, 1.0 and True do."""
    if isinstance(value, dict):
        return {key: _kinds(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_kinds(part) for part in value]
    if is_dataclass(value):
        return [_kinds(getattr(value, field.name)) for field in fields(value)]
    return type(value)


def _described(method: Method[Any, Any]) -> tuple[str, str, str, str]:
    return (
        method.service,
        method.name,
        method.request.message_type.DESCRIPTOR.full_name,
        method.answer.message_type.DESCRIPTOR.full_name,
    )
