"""One memory-mapped file of tensors: safetensors, or PyTorch's zip format read without running any code in it.

A returned tensor is a view of the mapping: it holds no memory of its own, keeps the mapping alive, and must not be
written. `close` drops this object's reference to the mapping, so that pages without views leave the process.

`outline` returns a tensor's shape, strides and dtype without its numbers; the part to read is given as a view of it.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from tandem.core.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError


class WeightFile(Protocol):
    """File of tensors, opened on first use, and again after `close`. `is_mapped`: returned tensors are views of it."""

    path: Path
    is_mapped: bool

    def names(self) -> tuple[str, ...]:
        """Names of all tensors in the file."""
        ...

    def outline(self, name: str) -> torch.Tensor:
        """The tensor without its numbers, on the device `meta`; nothing of it is read."""
        ...

    def read(self, name: str, outline: torch.Tensor) -> torch.Tensor:
        """The numbers of `outline`, which is `outline(name)` or a view of it; they must not be written."""
        ...

    def close(self) -> None: ...


class SafetensorsFile:
    """A safetensors file. Raises CorruptCheckpointError if header and size do not agree, CheckpointError if the system
    cannot map the file.
    """

    is_mapped = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: safe_open | None = None

    def names(self) -> tuple[str, ...]:
        return tuple(self._open().keys())  # type: ignore[no-untyped-call]

    def metadata(self) -> Mapping[str, str]:
        """Metadata in the header."""
        return self._open().metadata() or {}  # type: ignore[no-untyped-call]

    def outline(self, name: str) -> torch.Tensor:
        return _outline_of(self.tensor(name))

    def read(self, name: str, outline: torch.Tensor) -> torch.Tensor:
        return _view(self.tensor(name), outline)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the stored tensor."""
        try:
            tensor: torch.Tensor = self._open().get_tensor(name)  # type: ignore[no-untyped-call]
        except (SafetensorError, TypeError, AttributeError) as error:
            raise UnsupportedCheckpointError(f"{self.path}: {name} cannot be read ({error})") from error
        return tensor

    def close(self) -> None:
        self._file = None

    def _open(self) -> safe_open:
        if self._file is None:
            try:
                self._file = safe_open(self.path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CorruptCheckpointError(
                    f"{self.path} is damaged or incomplete ({error}); download it again"
                ) from error
            except RuntimeError as error:
                raise CheckpointError(
                    f"{self.path} cannot be mapped into memory ({error}); save it as several smaller files, or serve "
                    "it on a machine with more memory"
                ) from error
        return self._file


class TorchFile:
    """A legacy `pytorch_model.bin`. Anything but a dictionary of tensors is refused, and no code in it is run."""

    is_mapped = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: Mapping[str, torch.Tensor] | None = None

    def names(self) -> tuple[str, ...]:
        return tuple(self._open())

    def outline(self, name: str) -> torch.Tensor:
        return _outline_of(self._open()[name])

    def read(self, name: str, outline: torch.Tensor) -> torch.Tensor:
        return _view(self._open()[name], outline)

    def close(self) -> None:
        self._tensors = None

    def _open(self) -> Mapping[str, torch.Tensor]:
        if self._tensors is None:
            self._tensors = self._load()
        return self._tensors

    def _load(self) -> Mapping[str, torch.Tensor]:
        try:
            loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise UnsupportedCheckpointError(
                f"{self.path} holds more than tensors, and code in it is never run; convert it to safetensors"
            ) from error
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise CorruptCheckpointError(
                f"{self.path} is damaged, incomplete or in PyTorch's pre-1.6 format ({str(error)[:200]}); "
                "download it again or convert it to safetensors"
            ) from error
        if not isinstance(loaded, dict) or not all(_is_plain(name, value) for name, value in loaded.items()):
            raise UnsupportedCheckpointError(
                f"{self.path} is not a dictionary of tensors (named and dense ones); convert it to safetensors"
            )
        return loaded


def _outline_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _view(tensor: torch.Tensor, outline: torch.Tensor) -> torch.Tensor:
    start = tensor.storage_offset() + outline.storage_offset()
    return tensor.as_strided(outline.size(), outline.stride(), start)


def _is_plain(name: object, value: object) -> bool:
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    return isinstance(name, str) and dense
