"""The oracle of attention over latents, on any device."""

import torch

from tandem.compute.latents import LatentsAsKV
from tandem.compute.torch.attention import ReferenceBackend


class ReferenceLatentBackend(LatentsAsKV):
    """Serves every spec."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is where it will be used; any will do."""
        super().__init__(ReferenceBackend(device))
