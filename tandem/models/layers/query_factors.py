"""Factors that scale queries by their position, for long contexts (Llama 4, Mistral)."""

import torch

from tandem.architecture.mixers import QueryScaling


def query_factors(scaling: QueryScaling | None, cos: torch.Tensor) -> torch.Tensor | None:
    """Table of factors by position, [max_positions, 1, 1] float32; None if there is no `scaling`. `cos`
    [max_positions, ...]: the layer's rotary table.
    """
    if scaling is None:
        return None
    positions = torch.arange(len(cos), device=cos.device)
    return (1 + scaling.beta * torch.log(1 + torch.floor(positions / scaling.original_length))).view(-1, 1, 1)
