"""Compiled attention to chosen blocks on the CPU."""

import torch

from tandem.compute.block_sparse import BlocksAsKV
from tandem.compute.native.attention import NativeBackend


class NativeBlockBackend(BlocksAsKV):
    """Serves heads of a multiple of 8 numbers up to 576, where the kernels can be compiled."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(NativeBackend(device))
