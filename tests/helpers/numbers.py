"""Random numbers for tests of kernels, and their bits."""

import torch


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed, the same for every dtype but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Its bytes, which differ where NaN or a sign of zero does."""
    return x.contiguous().view(torch.uint8)
