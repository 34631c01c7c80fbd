"""Compiled attention over latents on the CPU.

A query's result is bit-identical whatever shares its step; see `tandem.compute.ops`.
"""

import torch

from tandem.compute.latents import LatentsAsKV
from tandem.compute.native.attention import NativeBackend


class NativeLatentBackend(LatentsAsKV):
    """Serves rows of a multiple of 8 numbers, up to those of DeepSeek, where the kernels can be compiled."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(NativeBackend(device))
