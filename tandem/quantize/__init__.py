"""Quantiser: checkpoints with codes and scales in place of the weights of linear maps. See `quantizer`."""
