"""The step under construction: what is scheduled so far and the budget left."""

from tandem.scheduler.output import ScheduledRequest
from tandem.scheduler.request import Request


class StepPlan:
    """Token budget of one step, and who has how much of it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: dict[str, ScheduledRequest] = {}

    def add(self, item: ScheduledRequest) -> None:
        self.scheduled[item.request.request_id] = item
        self.budget -= item.num_tokens

    def drop(self, request: Request) -> None:
        item = self.scheduled.pop(request.request_id, None)
        if item is not None:
            self.budget += item.num_tokens
