"""Sets a thread's current CUDA device: Triton launches there, and new streams and captures are made there."""

from contextlib import AbstractContextManager, nullcontext

import torch


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Context in which `device` is the calling thread's current CUDA device. Does nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
