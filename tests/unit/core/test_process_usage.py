"""CPU is a mean over a second or more, and memory is what the system says."""

from mmap import mmap

import numpy as np
import psutil
import pytest

from tandem.core.clock import ManualClock
from tandem.core.process_usage import UsageMeter


def test_cpu_is_the_mean_since_the_reading_a_second_ago() -> None:
    clock, spent_s = ManualClock(50.0), [7.0]
    meter = UsageMeter(clock, lambda: spent_s[0])
    assert meter.read().cpu_cores is None
    clock.advance(0.5)
    spent_s[0] = 8.0
    assert meter.read().cpu_cores is None
    clock.advance(1.5)
    spent_s[0] = 10.0
    assert meter.read().cpu_cores == 1.5
    clock.advance(0.5)
    spent_s[0] = 10.5
    assert meter.read().cpu_cores == 1.5
    clock.advance(0.5)
    assert meter.read().cpu_cores == 0.5


def test_memory_is_resident_bytes() -> None:
    meter = UsageMeter(ManualClock())
    before = meter.read().memory_bytes
    assert before == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    with mmap(-1, 64 << 20) as block:  # NOTE: pages of its own; memory that was freed before would not be new
        np.frombuffer(block, np.uint8)[:] = 1
        assert meter.read().memory_bytes - before > 0.8 * len(block)
