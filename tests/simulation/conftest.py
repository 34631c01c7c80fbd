"""Leaves out the complaints about what killed processes of a simulation leave, which mean nothing."""

import gc
import sys
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def freed() -> Iterator[None]:
    """NOTE: coroutines that were never run again are freed in no order and at any time, those never begun warn."""
    former = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        yield
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        sys.unraisablehook = former
