"""Distributions of token counts, for prompts and answers. Bounds are inclusive."""

import math
import random
from dataclasses import dataclass
from typing import Protocol

from tandem.core.errors import ConfigurationError


class Lengths(Protocol):
    """A distribution of token counts, each 1 or more."""

    def draw(self, source: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same count."""

    num_tokens: int

    def __post_init__(self) -> None:
        _check(self.num_tokens >= 1, self, "num_tokens >= 1")

    def draw(self, source: random.Random) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform distribution between two counts, both included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _check(1 <= self.least <= self.most, self, "1 <= least <= most")

    def draw(self, source: random.Random) -> int:
        return source.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal (long-tailed) distribution, given by its median and its 90th percentile, clamped to 1 … `most`."""

    median: float
    p90: float
    most: int

    def __post_init__(self) -> None:
        _check(1 <= self.median <= self.p90 <= self.most, self, "1 <= median <= p90 <= most")

    def draw(self, source: random.Random) -> int:
        spread = math.log(self.p90 / self.median) / 1.2815515655446004
        return max(1, min(self.most, round(source.lognormvariate(math.log(self.median), spread))))


def _check(holds: bool, lengths: object, needed: str) -> None:
    if not holds:
        raise ConfigurationError(f"{type(lengths).__name__} lengths need {needed}")
