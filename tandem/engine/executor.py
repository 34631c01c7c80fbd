"""Interface between deciding a step (the scheduler) and computing it (an executor).

Implemented by the model runner, by a group of ranks that compute one model together, and by a simulator on a virtual
clock.
"""

from dataclasses import dataclass
from typing import Protocol

from tandem.scheduler.output import ExecutorOutput, SchedulerOutput


class StepHandle(Protocol):
    """A step that was submitted."""

    def result(self) -> ExecutorOutput:
        """Waits until the step is computed, and returns its output."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A `StepHandle` of an executor that computes when a step is submitted."""

    output: ExecutorOutput

    def result(self) -> ExecutorOutput:
        return self.output


class Executor(Protocol):
    """Computes steps, in the order they are given."""

    def submit(self, step: SchedulerOutput) -> StepHandle:
        """Begin to compute every scheduled token and to choose one for each request that samples.

        Must forget whatever it keeps for `step.released` first: their ids may be among `step.new` again.
        """
        ...
