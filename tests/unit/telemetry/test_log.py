import asyncio
import io
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.core.errors import ConfigurationError
from tandem.telemetry.log import configure_logging, request_context


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Takes the root logger's records; what was there before is put back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_record_carries_process_request_and_extras(stream: io.StringIO) -> None:
    configure_logging("info", "json", "decode-0", stream)
    with request_context("req-1"):
        logging.getLogger("tandem.test").warning("pulled %d blocks", 3, extra={"num_bytes": 4096})
    (line,) = json_lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "process": "decode-0",
        "pid": os.getpid(),
        "logger": "tandem.test",
        "message": "pulled 3 blocks",
        "request_id": "req-1",
        "num_bytes": 4096,
    }


def test_outside_a_request_there_is_no_request_id(stream: io.StringIO) -> None:
    configure_logging("info", "json", "router", stream)
    with request_context("req-1"):
        pass
    logging.getLogger("tandem.test").info("idle")
    assert "request_id" not in json_lines(stream)[0]


def test_tasks_do_not_see_each_others_requests(stream: io.StringIO) -> None:
    configure_logging("info", "json", "gateway", stream)

    async def serve(request_id: str, gate: asyncio.Barrier) -> None:
        with request_context(request_id):
            await gate.wait()
            logging.getLogger("tandem.test").info(request_id)

    async def main() -> None:
        gate = asyncio.Barrier(3)
        await asyncio.gather(*(serve(f"req-{i}", gate) for i in range(3)))

    asyncio.run(main())
    assert all(line["request_id"] == line["message"] for line in json_lines(stream))
    assert len(json_lines(stream)) == 3


def test_a_request_context_may_be_left_in_another_task(stream: io.StringIO) -> None:
    """An async generator that is closed by another task than the one that began it."""

    async def main() -> None:
        async def generate() -> Any:
            with request_context("req-1"):
                yield 1

        generator = generate()
        await asyncio.create_task(anext(generator))
        await generator.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    "extra",
    [
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"peer": object()},
        {"fields": {1: 2, (3, 4): 5}},
        {"text": "\ud800 lone surrogate"},
        {"time": "mine", "level": "mine", "logger": "mine"},
        {"big": 10**400},
    ],
)
def test_any_extra_gives_one_line_of_valid_json(stream: io.StringIO, extra: dict[str, object]) -> None:
    configure_logging("info", "json", "router", stream)
    logging.getLogger("tandem.test").info("a\nb", extra=extra)
    text = stream.getvalue()
    assert text.count("\n") == 1
    line = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert (line["message"], line["level"], line["logger"]) == ("a\nb", "info", "tandem.test")


def test_an_extra_named_like_a_field_of_ours_is_kept_beside_it(stream: io.StringIO) -> None:
    configure_logging("info", "json", "router", stream)
    logging.getLogger("tandem.test").info("x", extra={"level": "mine"})
    assert json_lines(stream)[0]["level_"] == "mine"


def test_tracebacks_are_in_the_record(stream: io.StringIO) -> None:
    configure_logging("info", "json", "router", stream)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("tandem.test").exception("failed")
    assert "ValueError: boom" in json_lines(stream)[0]["exception"]


def test_text_is_readable_and_cannot_be_forged(stream: io.StringIO) -> None:
    configure_logging("info", "text", "prefill-1", stream)
    with request_context("req-1"):
        logging.getLogger("tandem.test").info("path=%s", "a\n2026-01-01 ERROR fake\x1b[31m", extra={"num_blocks": 2})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert f"INFO    prefill-1[{os.getpid()}] tandem.test: path=a\\x0a2026-01-01 ERROR fake" in text
    assert text.endswith("[req-1] num_blocks=2\n")


def test_levels_below_the_one_asked_for_are_silent(stream: io.StringIO) -> None:
    configure_logging("warning", "text", "router", stream)
    logging.getLogger("tandem.test").info("quiet")
    assert stream.getvalue() == ""


def test_configuring_again_does_not_log_twice(stream: io.StringIO) -> None:
    configure_logging("info", "text", "router", stream)
    configure_logging("info", "text", "router", stream)
    logging.getLogger("tandem.test").info("once")
    assert stream.getvalue().count("once") == 1


@pytest.mark.parametrize(("level", "form", "name"), [("loud", "text", "log_level"), ("info", "xml", "log_format")])
def test_what_does_not_exist_is_refused_by_name(level: str, form: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}=.*choose one of"):
        configure_logging(level, form, "router")
