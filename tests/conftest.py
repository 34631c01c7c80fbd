"""Shared fixtures. One thread per process keeps small tensors fast and runs repeatable."""

import torch

torch.set_num_threads(1)
