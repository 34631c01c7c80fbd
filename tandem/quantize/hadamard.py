"""Construction of Hadamard matrices, used as rotations: Paley's constructions, doubled by Sylvester's."""

from typing import Final

import torch

_SMALLEST_FACTOR: Final = 2


def hadamard(size: int) -> torch.Tensor | None:
    """Orthogonal [size, size] float64 matrix whose elements have equal absolute values; None = no construction is known
    here.

    Sizes are `2^k * m` with `m` 1, or a multiple of 4 with `m - 1` a prime (Paley I) or `m / 2 - 1` a prime that is 1
    modulo 4 (Paley II).
    """
    core, num_doublings = size, 0
    found = _core(core)
    while found is None and core % 2 == 0:
        core, num_doublings = core // 2, num_doublings + 1
        found = _core(core)
    if found is None:
        return None
    for _ in range(num_doublings):
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    scaled: torch.Tensor = found / size**0.5
    return scaled


def _core(size: int) -> torch.Tensor | None:
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if size % 4:
        return None
    if _is_prime(size - 1):
        bordered = _bordered(size - 1, antisymmetric=True)
        return bordered + torch.eye(size, dtype=torch.float64)
    half = size // 2
    if half % 4 == 2 and _is_prime(half - 1):
        bordered, unit = _bordered(half - 1, antisymmetric=False), torch.eye(half, dtype=torch.float64)
        plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(bordered, plus.double()) + torch.kron(unit, minus.double())
    return None


def _bordered(prime: int, *, antisymmetric: bool) -> torch.Tensor:
    """Paley's conference matrix of `prime + 1` rows: quadratic residues of differences, with a border."""
    residues = {i * i % prime for i in range(1, prime)}
    signs = torch.tensor([0.0, *(1.0 if i in residues else -1.0 for i in range(1, prime))], dtype=torch.float64)
    numbers = torch.arange(prime)
    inner = signs[(numbers.unsqueeze(1) - numbers) % prime]
    out = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    out[1:, 1:] = inner
    out[0, 1:] = 1.0
    out[1:, 0] = -1.0 if antisymmetric else 1.0
    return out


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(_SMALLEST_FACTOR, int(number**0.5) + 1))
