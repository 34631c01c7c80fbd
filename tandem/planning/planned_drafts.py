"""Speculative decoding as a plan assumes it: the drafter, how often its guesses are right, and how many are checked."""

from dataclasses import dataclass

from tandem.architecture.draft_cost import DrafterCost
from tandem.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDrafts:
    """Drafts of decode steps.

    Args:
        drafter: what guesses; None = guesses are taken from the text, which costs nothing.
        acceptance: share of guesses that are right, of those whose earlier guesses were.
        most: the most drafts of a request's step.
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
        """Weights that the drafter holds for itself."""
        return 0.0 if self.drafter is None else self.drafter.weight_bytes

    def kv_bytes(self, num_tokens: float) -> float:
        """State that the drafter keeps of a context of so many tokens."""
        return 0.0 if self.drafter is None else self.drafter.kv_bytes(num_tokens)

    @property
    def head(self) -> DrafterCost | None:
        """The drafter, if it is a head, which computes prompts; None = it is none."""
        return self.drafter if self.drafter is not None and self.drafter.is_head else None

    def tokens(self, num_drafts: int) -> float:
        """Mean number of tokens that a step with so many drafts brings a request: 1 + a + a² + …

        Source: Leviathan et al. 2023, arXiv:2211.17192, equation 1.
        """
        return sum(self.acceptance**number for number in range(num_drafts + 1))
