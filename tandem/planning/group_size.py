"""Size of a group of ranks: number of ranks that split each layer, and number of pipeline stages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class GroupSize:
    """`width`: ranks that share each layer (`--tp`). `num_stages`: of consecutive layers (`--pp`)."""

    width: int = 1
    num_stages: int = 1

    @property
    def num_ranks(self) -> int:
        return self.width * self.num_stages

    def __str__(self) -> str:
        return str(self.width) if self.num_stages == 1 else f"{self.width} x {self.num_stages} stages"
