"""The matrix, rendered once a test session however many tests look at it."""

from collections.abc import Callable
from functools import cache

from tests.helm.cases import MATRIX, RECENT
from tests.helpers.helm import Rendered, render

ALL = {**MATRIX, **RECENT}


@cache
def rendered(case: str) -> Rendered:
    return render(ALL[case])


def every_case(check: Callable[[str], None]) -> Callable[[], None]:
    """One test of the whole matrix, which names every case that fails."""

    def test() -> None:
        failures = [f"{case}: {why}" for case in ALL if (why := _failure(check, case)) is not None]
        assert not failures, "\n\n".join(failures)

    test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
    return test


def _failure(check: Callable[[str], None], case: str) -> str | None:
    try:
        check(case)
    except AssertionError as error:
        return str(error)
    return None
