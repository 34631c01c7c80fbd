"""Cost of measuring the floor itself."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.floor import fastest_dtype


def test_telling_the_faster_dtype_takes_no_minutes_where_one_is_slow() -> None:
    """A processor without bfloat16 products took eight minutes for its products of 2,048 x 2,048."""
    fastest_dtype.cache_clear()
    with FlopCounterMode(display=False) as counter:
        found = fastest_dtype()
    assert found in (torch.bfloat16, torch.float32)
    assert 0 < counter.get_total_flops() < 1e10
