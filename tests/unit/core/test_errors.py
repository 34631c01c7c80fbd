"""Messages quote hostile values briefly and never fail to."""

import pytest

from tandem.core.errors import shown, without_password

LONG: dict[str, object] = {
    "text": "x" * 10**7,
    "list": [1] * 10**6,
    "mapping": dict.fromkeys(range(10**5)),
    "integer": 10**5000,
    "nested": [[[[[["deep"] * 9] * 9] * 9] * 9] * 9],
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_long_is_shown_short(name: str) -> None:
    assert len(shown(LONG[name])) <= 240


def test_what_is_short_is_shown_whole() -> None:
    shown_values = [shown(value) for value in ("a", 5, None, [1, "b"], float("nan"))]
    assert shown_values == ["'a'", "5", "None", "[1, 'b']", "nan"]


@pytest.mark.parametrize(
    ("url", "quoted"),
    [
        ("http://host:8000/a?b=c", "http://host:8000/a?b=c"),
        ("https://me:hush@host/a", "https://host/a"),
        ("redis://:hush/hu@sh@host:1", "redis://host:1"),
        ("redis+x://me:hu\nsh@host", "redis+x://host"),
        ("me:hush@host", "host"),
        ("me:hush://hush@host", "host"),
        ("https://me:hush@", "https://"),
        ("", ""),
    ],
)
def test_a_url_is_quoted_without_its_password(url: str, quoted: str) -> None:
    assert without_password(url) == quoted
