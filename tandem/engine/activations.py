"""Chooses how weights multiply activations: in floating point, or with activations rounded to 8-bit integers (`int8`).

Used by an engine and by its further ranks when they load weights.
"""

import torch

from tandem.compute.weights.formats import FormatReader
from tandem.compute.weights.row_rounding import rounding_rows
from tandem.core.config import FLOAT
from tandem.core.errors import ConfigurationError


def with_activations(activations: str, device: torch.device, formats_of: FormatReader) -> FormatReader:
    """Wraps `formats_of` so that the weights it reads multiply activations as `activations` ("float" or "int8", of
    `EngineConfig`) says; returns it unchanged for "float".

    Raises:
        ConfigurationError: the device has no such products.
    """
    if activations == FLOAT:
        return formats_of
    if device.type != "cpu":
        raise ConfigurationError(f"activations={activations!r} is computed on the CPU, not on {device}; leave it out")
    return rounding_rows(formats_of)
