"""Compiled sampling: one call chooses a token for every row of a step, with each row's parameters.

A row's token depends on that row alone, bit for bit, however many threads run. The result means the same as the PyTorch
draws of `tandem.engine.sampler`, which define the order in which a distribution is walked; weights may be rounded
differently.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from tandem.compute.native.build import load_library
from tandem.compute.native.calls import bind, struct_of
from tandem.core.sampling_params import SamplingParams

# Fields of the compiled functions' argument structs, in order, see `calls.struct_of`.
DRAW_FIELDS = "options token_ids peaks num_rows size threads"
OPTIONS_FIELDS = "logits top_k temperature:d top_p:d min_p:d uniform:d"
_pack_options = struct_of(OPTIONS_FIELDS).pack


class NativeDraws:
    """Draws tokens from logits with the compiled function. Stateless and safe to share."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = bind(library, "tandem_draw", DRAW_FIELDS)

    def draw(
        self, rows: Sequence[int], params: Sequence[SamplingParams], uniforms: Sequence[float], vocab_size: int
    ) -> tuple[list[int], list[float]]:
        """A token id and the largest logit for each row.

        Args:
            rows: addresses of contiguous float32 [vocab_size]; alive during the call, not modified.
            params: temperature, top_k, top_p and min_p of each row; other options are already applied to the logits.
            uniforms: one random number per row, in [0, 1); not read if the row is greedy.
            vocab_size: at least 1.

        Returns:
            If the largest logit is not finite, the token is meaningless. It is NaN if any logit is NaN.
        """
        options = b"".join(
            [
                _pack_options(row, each.top_k, each.temperature, each.top_p, each.min_p, uniform)
                for row, each, uniform in zip(rows, params, uniforms, strict=True)
            ]
        )
        token_ids, peaks = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows), dtype=torch.float32)
        packed = ctypes.create_string_buffer(options, len(options))
        pointers = (ctypes.addressof(packed), token_ids.data_ptr(), peaks.data_ptr())
        self._draw(*pointers, len(rows), vocab_size, torch.get_num_threads())
        return token_ids.tolist(), peaks.tolist()


def load_draws(cache_dir: Path | None = None, architecture: str = "native") -> NativeDraws:
    """Compiles the kernels if needed, and loads them; see `build`.

    Raises:
        ConfigurationError: the kernels cannot be compiled or loaded on this machine; the message says why.
    """
    return NativeDraws(load_library(cache_dir, architecture=architecture))
