"""Shared settings: small tensors are fastest on one thread; without a GPU, Triton interprets its kernels."""

import gc
import os
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

# NOTE: an example's time is not what is tested, and any may take long where other processes want the cores
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # NOTE: read when triton is first imported, by whichever test module


def pytest_collection_finish() -> None:
    """Collected tests and their imports are near a million objects: looking through them stops this process for one or
    two seconds, in which what is tested goes on. They stay to the end anyway.
    """
    _rest_collector()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Reports of its tests, and whatever else a module leaves, stay to the end too."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _rest_collector()


def _rest_collector() -> None:
    gc.collect()
    gc.freeze()
