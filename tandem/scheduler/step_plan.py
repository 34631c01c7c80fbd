"""The step under construction: which requests advance by how many tokens, and the budget left."""

from tandem.scheduler.request import Request


class StepPlan:
    """Token budget of one step and each request's share of it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.shares: dict[str, tuple[Request, int]] = {}

    def add(self, request: Request, num_tokens: int) -> None:
        self.shares[request.request_id] = request, num_tokens
        self.budget -= num_tokens

    def extend(self, request: Request, num_tokens: int) -> None:
        """Add to the share that the request has."""
        self.shares[request.request_id] = request, self.shares[request.request_id][1] + num_tokens
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        share = self.shares.pop(request.request_id, None)
        if share is not None:
            self.budget += share[1]
