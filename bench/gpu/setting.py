"""Setting of a run: the device to compute on, and whether the run is only a rehearsal."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Setting:
    """`is_dry`: tiny shapes on the CPU, for the same steps; its figures mean nothing. `backend`: of attention."""

    is_dry: bool
    backend: str = "auto"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.is_dry else torch.device("cuda", torch.cuda.current_device())

    def pick(self, real: int, dry: int) -> int:
        """A size or count."""
        return dry if self.is_dry else real

    def pick_all(self, real: tuple[int, ...], dry: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes or counts."""
        return dry if self.is_dry else real
