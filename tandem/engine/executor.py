"""The seam between deciding and computing. The model runner implements it; so can a simulator, on a virtual clock."""

from typing import Protocol

from tandem.scheduler.output import ExecutorOutput, SchedulerOutput


class Executor(Protocol):
    """Computes steps, in the order they are given."""

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        """Compute every scheduled token and choose one for each request that samples.

        Must forget whatever it keeps for `step.released` first: their ids may be among the scheduled ones again.
        """
        ...
