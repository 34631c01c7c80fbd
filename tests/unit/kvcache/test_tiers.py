"""Slots of the host tier."""

import pytest

from tandem.kvcache.tiers import HostTier


def test_a_slot_is_not_handed_out_again_while_somebody_reads_it() -> None:
    host = HostTier(1)
    (slot,) = host.take(1)
    host.begin_read([slot])
    host.begin_read([slot])
    host.give_back([slot])
    assert (host.num_free, host.num_leaving, host.num_taken) == (0, 1, 1)
    host.end_reads([slot])
    assert host.num_free == 0
    host.end_reads([slot])
    assert (host.num_free, host.num_leaving) == (1, 0)
    assert host.take(1) == (slot,)
    host.check(iter([slot]))


def test_a_slot_that_nobody_reads_is_free_at_once() -> None:
    host = HostTier(2)
    slots = host.take(2)
    host.begin_read(slots[:1])
    host.end_reads([slots[0]])
    host.give_back(slots[:1])
    assert host.num_free == 1
    host.check(iter([slots[1]]))
    with pytest.raises(AssertionError, match="lost or in two places"):
        host.check(iter([]))
