"""The state of a read: it ends once, and being over is another matter than having failed."""

import threading
from collections.abc import Callable

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError, TandemError, TransportError
from tandem.transport.transfer import Transfer, TransferState


def watched(clock: ManualClock) -> tuple[Transfer, list[str]]:
    transfer, calls = Transfer(10, clock), list[str]()
    transfer.add_done_callback(lambda _: calls.append("done"))
    transfer.add_over_callback(lambda _: calls.append("over"))
    return transfer, calls


def test_success_is_done_and_over() -> None:
    clock = ManualClock(5.0)
    transfer, calls = watched(clock)
    assert not transfer.wait(0)
    clock.advance(2.0)
    transfer.succeed()
    assert (transfer.state, transfer.is_over, transfer.error) == (TransferState.DONE, True, None)
    assert (transfer.started_s, transfer.finished_s) == (5.0, 7.0)
    assert calls == ["done", "over"]


def test_a_failure_can_be_over_later() -> None:
    transfer, calls = watched(ManualClock())
    transfer.fail(TransportError("first"), is_over=False)
    assert transfer.wait(0)
    assert not transfer.is_over
    assert calls == ["done"]
    transfer.settle()
    assert (transfer.is_over, transfer.state, calls) == (True, TransferState.FAILED, ["done", "over"])


def test_only_the_first_end_counts() -> None:
    clock = ManualClock()
    transfer, calls = watched(clock)
    transfer.fail(TransportError("first"), is_over=False)
    clock.advance(1.0)
    transfer.fail(TransportError("second"))
    transfer.succeed()
    assert str(transfer.error) == "first"
    assert transfer.state is TransferState.FAILED
    assert transfer.finished_s == 0.0
    assert calls == ["done", "over"]


def test_joined_transfers_are_done_when_all_are() -> None:
    clock = ManualClock()
    parts = [Transfer(10, clock), Transfer(20, clock)]
    whole = Transfer.joined(parts, clock)
    assert whole.num_bytes == 30
    parts[1].succeed()
    assert (whole.state, whole.is_over) == (TransferState.PENDING, False)
    parts[0].succeed()
    assert (whole.state, whole.is_over) == (TransferState.DONE, True)


def test_joined_transfers_fail_with_the_first_and_are_over_with_the_last() -> None:
    clock = ManualClock()
    parts = [Transfer(10, clock), Transfer(20, clock), Transfer(30, clock)]
    parts[0].succeed()
    whole = Transfer.joined(parts, clock)
    parts[1].fail(TransportError("first"), is_over=False)
    assert (whole.state, whole.is_over, str(whole.error)) == (TransferState.FAILED, False, "first")
    parts[2].fail(TransportError("second"))
    assert (whole.is_over, str(whole.error)) == (False, "first")
    parts[1].settle()
    assert whole.is_over


class EndsWhileJoined(Transfer):
    """Succeeds between the two callbacks that are added to it; its thread calls the first only when `may_call` is
    set.
    """

    may_call: threading.Event
    ending: threading.Thread

    def add_over_callback(self, callback: Callable[[Transfer], None]) -> None:
        self.ending = threading.Thread(target=self.succeed)
        self.ending.start()
        assert self.wait(10)
        super().add_over_callback(callback)


def test_a_part_may_end_while_it_is_joined() -> None:
    """Regression: where its thread was not as far as to tell, being over came first, and joining failed."""
    part = EndsWhileJoined(10, ManualClock())
    part.may_call = threading.Event()

    def wait(_: Transfer) -> None:
        assert part.may_call.wait(10)

    part.add_done_callback(wait)
    whole = Transfer.joined([part], ManualClock())
    assert (whole.state, whole.is_over) == (TransferState.PENDING, False)
    part.may_call.set()
    part.ending.join()
    assert (whole.state, whole.is_over) == (TransferState.DONE, True)


REFUSALS = [TransportError("not connected"), CapacityError("too many")]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_read_of_which_a_part_is_refused_is_over_with_those_before(refusal: TandemError) -> None:
    clock = ManualClock()
    first, third = Transfer(10, clock), Transfer(30, clock)

    def refuse() -> Transfer:
        raise refusal

    whole = Transfer.begun([lambda: first, refuse, lambda: third], clock)
    assert isinstance(whole.error, TransportError)
    assert (str(whole.error), whole.state, whole.is_over) == (str(refusal), TransferState.FAILED, False)
    first.succeed()
    assert whole.is_over, "the third was never begun"
    with pytest.raises(type(refusal), match=str(refusal)):
        Transfer.begun([refuse, lambda: third], clock)


def test_a_callback_may_add_another() -> None:
    transfer, calls = watched(ManualClock())
    transfer.add_done_callback(lambda same: same.add_over_callback(lambda _: calls.append("nested")))
    transfer.succeed()
    assert sorted(calls) == ["done", "nested", "over"]
