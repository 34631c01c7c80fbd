"""The step under construction: which requests advance by how many tokens, and the budget left."""

from tandem.scheduler.request import Request


class StepPlan:
    """The tokens that each request gets in one step (`shares`, by request id), and the token `budget` that is left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.shares: dict[str, tuple[Request, int]] = {}

    def add(self, request: Request, num_tokens: int) -> None:
        """Give a request its share."""
        self.shares[request.request_id] = request, num_tokens
        self.budget -= num_tokens

    def extend(self, request: Request, num_tokens: int) -> None:
        """Give more tokens to a request that has a share."""
        self.shares[request.request_id] = request, self.shares[request.request_id][1] + num_tokens
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        """Take back a request's share, if it has one."""
        share = self.shares.pop(request.request_id, None)
        if share is not None:
            self.budget += share[1]
