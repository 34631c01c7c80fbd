"""The oracle of attention to chosen blocks, on any device."""

import torch

from tandem.compute.block_sparse import BlocksAsKV
from tandem.compute.torch.attention import ReferenceBackend


class ReferenceBlockBackend(BlocksAsKV):
    """Serves every spec."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is where it will be used; any will do."""
        super().__init__(ReferenceBackend(device))
