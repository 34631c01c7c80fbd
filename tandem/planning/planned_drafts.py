"""Speculative decoding as a plan assumes it: the drafter, how often its guesses are right, and how many are checked."""

from dataclasses import dataclass

from tandem.architecture.draft_cost import DrafterCost
from tandem.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDrafts:
    """Speculative decoding in a plan.

    Args:
        drafter: network that guesses; None = guesses are taken from the text, which costs nothing.
        acceptance: probability that a guess is right if those before it in the step are.
        most: largest number of drafts of a request in a step.
    """

    drafter: DrafterCost | None
    acceptance: float
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise ConfigurationError(f"acceptance={self.acceptance:g}; use a share of guesses, from 0 to 1")
        if self.most < 1:
            raise ConfigurationError(f"num_speculative_tokens={self.most}; use 1 or more")

    @property
    def weight_bytes(self) -> float:
        """Bytes of the drafter's own weights."""
        return 0.0 if self.drafter is None else self.drafter.weight_bytes

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of the drafter's own KV for a context of this many tokens."""
        return 0.0 if self.drafter is None else self.drafter.kv_bytes(num_tokens)

    @property
    def head(self) -> DrafterCost | None:
        """The drafter if it is a head, which computes prompts too; else None."""
        return self.drafter if self.drafter is not None and self.drafter.is_head else None

    def tokens(self, num_drafts: int) -> float:
        """Mean number of tokens per request of a step with this many drafts: 1 + a + a² + …

        Source: Leviathan et al. 2023, arXiv:2211.17192, equation 1.
        """
        return sum(self.acceptance**number for number in range(num_drafts + 1))
