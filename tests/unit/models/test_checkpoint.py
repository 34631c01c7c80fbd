"""`Checkpoint` lets go of what was read, but not so often that large checkpoints take long."""

from pathlib import Path

import torch

from tandem.models.checkpoint import Checkpoint


class CountedFile:
    """A `WeightFile` that counts how often it was let go of."""

    is_mapped = True

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_closed = 0
        with path.open("wb") as file:
            file.truncate(num_bytes)

    def names(self) -> tuple[str, ...]:
        return ("weight",)

    def outline(self, name: str) -> torch.Tensor:
        raise NotImplementedError(name)

    def read(self, name: str, outline: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(name)

    def close(self) -> None:
        self.num_closed += 1


def _num_closed(path: Path, num_tensors: int, tensor_bytes: int) -> int:
    file = CountedFile(path, num_tensors * tensor_bytes)
    checkpoint = Checkpoint(path.parent, {f"weight.{i}": file for i in range(num_tensors)})
    for _ in range(num_tensors):
        checkpoint.touched(tensor_bytes)
    return file.num_closed


def test_a_large_checkpoint_is_let_go_of_a_bounded_number_of_times(tmp_path: Path) -> None:
    """Regression: every 8 MiB, and each time all headers were read anew: half a minute for 128 experts in 48 layers."""
    assert 200 <= _num_closed(tmp_path / "large", 18_432, 3 << 20) <= 300


def test_a_small_checkpoint_is_let_go_of_every_few_megabytes(tmp_path: Path) -> None:
    assert _num_closed(tmp_path / "small", 64, 1 << 20) == 8
