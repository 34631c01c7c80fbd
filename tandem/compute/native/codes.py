"""Numbers of dtypes, activations and expert scores in the compiled kernels, equal to the enums in `src`."""

import torch

from tandem.architecture.feed_forward import Activation, Score

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SCALE_DTYPE_CODES = DTYPE_CODES | {torch.float8_e4m3fn: 3, torch.float8_e8m0fnu: 4, torch.int8: 5}
ACTIVATION_CODES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
CLAMPED_CODE = 2  # an activation, too
SCORE_CODES = {Score.SOFTMAX: 0, Score.SOFTMAX_OF_CHOSEN: 1, Score.SIGMOID: 2, Score.SQRT_SOFTPLUS: 3}
