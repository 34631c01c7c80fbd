"""Shared settings: small tensors are fastest on one thread; without a GPU, Triton interprets its kernels."""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # NOTE: read when triton is first imported, by whichever test module
