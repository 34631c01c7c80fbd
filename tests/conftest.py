"""Shared settings: small tensors are fastest on one thread; without a GPU, Triton interprets its kernels."""

import gc
import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # NOTE: read when triton is first imported, by whichever test module


def pytest_collection_finish() -> None:
    """Collected tests and their imports are near a million objects: looking through them stops this process for one or
    two seconds, in which what is tested goes on. They stay to the end anyway.
    """
    gc.collect()
    gc.freeze()
