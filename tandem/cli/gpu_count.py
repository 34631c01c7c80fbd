"""Counts GPUs; loads PyTorch only if there is a GPU driver, since that takes seconds."""

from pathlib import Path

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def count_gpus() -> int:
    """Number of GPUs that PyTorch sees (`CUDA_VISIBLE_DEVICES` counts); 0 where it is built without CUDA."""
    if not any(path.exists() for path in _DRIVERS):
        return 0
    import torch  # NOTE: takes a second or two, which a laptop need not wait

    return torch.cuda.device_count()
