"""Default budgets of thinking tokens by effort."""

from collections.abc import Mapping
from types import MappingProxyType

from tandem.gateway.conversation import Effort

# Thinking tokens of one answer; None = as many as the answer may have tokens.
BUDGETS: Mapping[Effort, int | None] = MappingProxyType(
    {
        Effort.NONE: 0,
        Effort.MINIMAL: 512,
        Effort.LOW: 1024,
        Effort.MEDIUM: 4096,
        Effort.HIGH: 16384,
        Effort.XHIGH: 32768,
        Effort.MAX: None,
    }
)
