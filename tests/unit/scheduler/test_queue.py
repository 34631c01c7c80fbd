import pytest

from tandem.scheduler.queue import MAX_STALE_ENTRIES, WaitingQueue
from tandem.scheduler.request import Request, RequestState
from tests.helpers.requests import request_of


def ordered(request_id: str, order: int) -> Request:
    request = request_of(request_id, [1])
    request.order = (order, 0)
    return request


def test_pops_in_order_and_then_nothing() -> None:
    queue = WaitingQueue()
    for name, order in (("b", 2), ("c", 3), ("a", 1)):
        queue.push(ordered(name, order))
    popped = [queue.pop() for _ in range(4)]
    assert [request and request.request_id for request in popped] == ["a", "b", "c", None]
    assert len(queue) == 0


def test_a_forgotten_request_is_not_counted_and_never_popped() -> None:
    queue = WaitingQueue()
    gone, stays = ordered("gone", 1), ordered("stays", 2)
    queue.push(gone)
    queue.push(stays)
    gone.state = RequestState.FINISHED
    queue.forget(gone)
    assert len(queue) == 1
    assert queue.pop() is stays
    assert queue.pop() is None


@pytest.mark.parametrize("num_forgotten", [90, 180, 1000])
def test_forgotten_requests_do_not_pile_up(num_forgotten: int) -> None:
    queue = WaitingQueue()
    stays = [ordered("stays", 10_000 - index) for index in range(20)]
    for request in stays:
        queue.push(request)
    for index in range(num_forgotten):
        request = ordered(str(index), index)
        queue.push(request)
        request.state = RequestState.FINISHED
        queue.forget(request)
        assert len(queue._heap) <= MAX_STALE_ENTRIES + 2 * len(stays) + 1
    assert [queue.pop() for _ in stays] == stays[::-1]
