"""Shared settings: small tensors are fastest on one thread, and Triton kernels run in its interpreter where there is no GPU."""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # NOTE: read when triton is first imported, so it is set before any test module
