"""A request's place in the queue of its gateway, as the gateway tells it to routers; used by `routing.waiting`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """Place of a request among those that wait for free workers.

    Args:
        queue: name of the queue, unique among all gateways; only its first request asks. "" = this request asks once.
        waited_s: seconds since it came, adjusted for its priority: negative if others may go first. A duration, since
            clocks of gateways and routers differ.
        others_wait: whether requests wait behind it in its queue.
        is_retry: whether workers had it before, and it was lost or refused there.
    """

    queue: str = ""
    waited_s: float = 0.0
    others_wait: bool = False
    is_retry: bool = False
