"""The numbers by which the compiled kernels know dtypes and activations: the enums in `src`."""

import torch

from tandem.architecture.feed_forward import Activation

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATION_CODES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
