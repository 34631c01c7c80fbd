import pytest

from tandem.core.clock import ManualClock, SystemClock


def test_a_manual_clock_moves_only_forward_and_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(1.5)
    assert clock.now_s() == 6.5
    with pytest.raises(ValueError, match="never goes backwards"):
        clock.advance(-0.1)


def test_the_system_clock_never_goes_backwards() -> None:
    clock = SystemClock()
    first = clock.now_s()
    assert clock.now_s() >= first
