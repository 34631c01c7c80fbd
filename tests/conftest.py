"""Shared settings: small tensors are fastest on one thread; without a GPU, Triton interprets its kernels."""

import gc
import os

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
    gc.collect()
    gc.freeze()
