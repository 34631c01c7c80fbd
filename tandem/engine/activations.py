"""Choice of the formats whose weights multiply rows as a configuration says, for an engine and for its ranks."""

import torch

from tandem.compute.weights.formats import FormatReader
from tandem.compute.weights.row_rounding import rounding_rows
from tandem.core.config import FLOAT
from tandem.core.errors import ConfigurationError


def multiplied_as(activations: str, device: torch.device, formats_of: FormatReader) -> FormatReader:
    """The formats of `formats_of`, whose weights multiply rows as `activations` of an `EngineConfig` says.

    Raises:
        ConfigurationError: the device has no such products.
    """
    if activations == FLOAT:
        return formats_of
    if device.type != "cpu":
        raise ConfigurationError(f"activations={activations!r} is computed on the CPU, not on {device}; leave it out")
    return rounding_rows(formats_of)
