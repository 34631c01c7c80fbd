"""The agent's owner, where agents cannot be built; with real ones it is tested through the transport."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigurationError, TransportError
from tandem.transport.nixl.owner import REBUILD_PAUSE_S, AgentOwner


@dataclass
class Agents:
    """Builds them while they can be built."""

    works: bool = True
    built: list[bool] = field(default_factory=list)

    def __call__(self) -> Any:
        self.built.append(self.works)
        if not self.works:
            raise ConfigurationError("out of file descriptors")
        return self

    def destroy(self) -> None:
        pass


def test_an_agent_that_cannot_be_built_after_a_fence_is_tried_again() -> None:
    """Not for every question: building takes a while."""
    clock, agents = ManualClock(), Agents()
    owner = AgentOwner(agents, clock)
    agents.works = False
    with pytest.raises(ConfigurationError):
        owner.fence()
    for _ in range(2):
        with pytest.raises(TransportError, match="could not be started again"):
            owner.call(owner.agent)
    clock.advance(REBUILD_PAUSE_S)
    with pytest.raises(TransportError):
        owner.call(owner.agent)
    agents.works = True
    with pytest.raises(TransportError):
        owner.call(owner.agent)
    clock.advance(REBUILD_PAUSE_S)
    owner.call(owner.agent)
    assert agents.built == [True, False, False, True]
    owner.close()
