"""Place of a request among those that wait for room, as its gateway tells routers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """A request's place among those that wait.

    Args:
        queue: name of a queue, unique among gateways, of which only the first asks. "" = it asks once.
        waited_s: seconds since it came, less those of its priority: negative if others may go first. A duration, since
            clocks of gateways and routers differ.
        others_wait: behind it in its queue.
        is_retry: workers had it before, and it was lost or refused there.
    """

    queue: str = ""
    waited_s: float = 0.0
    others_wait: bool = False
    is_retry: bool = False
