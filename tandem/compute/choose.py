"""Choice of the `Kernels` implementation for a device."""

import logging

import torch

from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.native.bindings import load
from tandem.compute.ops import Kernels
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import ConfigurationError

_log = logging.getLogger(__name__)


def choose_kernels(device: torch.device, native: bool | None = None) -> Kernels:
    """The compiled kernels on the CPU, Triton's on NVIDIA GPUs; PyTorch's if those cannot run, with a warning in the
    log.

    Args:
        device: device on which the model runs.
        native: True = the compiled kernels are required, False = they are not used, None = used if they can be built.

    Raises:
        ConfigurationError: the compiled kernels are required, and cannot be built or the device is not the CPU.
    """
    if device.type != "cpu":
        if native:
            raise ConfigurationError(f"native_kernels=True: the compiled kernels serve the CPU, not {device}")
        return _for_gpu(device)
    if native is False:
        return TorchKernels()
    try:
        return load()
    except ConfigurationError as error:
        if native:
            raise
        _log.warning("the compiled CPU kernels are not used, answers will be slow: %s", error)
        return TorchKernels()


def _for_gpu(device: torch.device) -> Kernels:
    reason = TritonKernels.missing(device)
    if reason is None:
        return TritonKernels()
    _log.warning("Triton's kernels are not used, weights as codes are decoded before each product: %s", reason)
    return TorchKernels()
