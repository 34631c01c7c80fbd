"""Moments of a weight's input rows, gathered during calibration while a layer computes."""

from collections.abc import Sequence

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.compute.weights.base import ExpertLinears, Linear, Weight


class Moments:
    """Sums over the input rows x of a weight. `second`: sum of `x^T x`, [in, in] float32. `absolute`: sum of `|x|`,
    [in]. `num_rows`: number of rows.
    """

    def __init__(self, inputs: int) -> None:
        self.second = torch.zeros(inputs, inputs)
        self.absolute = torch.zeros(inputs)
        self.num_rows = 0

    def add(self, x: torch.Tensor) -> None:
        """Adds rows `x` [rows, in] float32."""
        self.second.addmm_(x.T, x)
        self.absolute += x.abs().sum(0)
        self.num_rows += len(x)

    @property
    def mean_absolute(self) -> torch.Tensor:
        """Mean of `|x|`, [in]."""
        return self.absolute / max(1, self.num_rows)

    def divided_by(self, factors: torch.Tensor) -> "Moments":
        """Moments of the same rows, divided by `factors` [in]."""
        found = Moments(0)
        found.second = self.second / torch.outer(factors, factors)
        found.absolute, found.num_rows = self.absolute / factors, self.num_rows
        return found


class ObservedWeight:
    """Implements `compute.weights.base.Weight`: adds its input rows to moments, then multiplies by another weight."""

    matrix = None

    def __init__(self, weight: Weight, moments: Moments) -> None:
        self._weight = weight
        self._moments = moments

    @property
    def shape(self) -> tuple[int, int]:
        return self._weight.shape

    @property
    def dtype(self) -> torch.dtype | None:
        return self._weight.dtype

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        self._moments.add(x)
        return self._weight(x, bias, out_dtype=out_dtype)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, up: Linear, activation: Activation) -> None:
        """Returns None, so that each product is called separately."""

    def grouped(self, experts: Sequence[ExpertLinears], activation: Activation, clamp: Clamp | None) -> None:
        """Returns None, so that each product is called separately."""
