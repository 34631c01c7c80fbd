"""Profile of a workload: pairs of prompt and output lengths that represent all requests.

Made from a recorded trace or drawn from distributions, with a fixed seed, so the same description gives the same plan.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem.core.errors import ConfigurationError
from tandem.workload.lengths import Lengths

_NUM_SAMPLES = 1000
_SEED = 17


@dataclass(frozen=True)
class Profile:
    """Lengths of equally likely requests.

    Args:
        lengths: (prompt tokens, output tokens) of each.
        prefix_hit: share of a prompt's tokens whose KV is cached on the worker that computes the prompt.
    """

    lengths: Sequence[tuple[int, int]]
    prefix_hit: float = 0.0

    def __post_init__(self) -> None:
        if not self.lengths or min(map(min, self.lengths)) < 1:
            raise ConfigurationError("a workload needs at least one request, of one token in and one out or more")
        if not 0 <= self.prefix_hit < 1:
            raise ConfigurationError(f"prefix_hit={self.prefix_hit:g}; use a share of 0 or more and below 1")

    def cached(self, num_prompt_tokens: float) -> float:
        """Number of tokens of a prompt of this length that are cached and need no prefill."""
        return self.prefix_hit * num_prompt_tokens

    @cached_property
    def mean_prompt(self) -> float:
        return math.fsum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @cached_property
    def mean_output(self) -> float:
        return math.fsum(output for _, output in self.lengths) / len(self.lengths)

    @cached_property
    def mean_context(self) -> float:
        """Mean context of the requests decoding at one moment; long outputs count more, since they decode longer."""
        weighted = math.fsum(output * (prompt + output / 2) for prompt, output in self.lengths)
        return weighted / math.fsum(output for _, output in self.lengths)

    @cached_property
    def longest(self) -> int:
        """Tokens of the largest request, prompt and output."""
        return max(map(sum, self.lengths))

    def prompt_at(self, share: float) -> int:
        """The prompt length that `share` of the requests do not exceed."""
        prompts = sorted(prompt for prompt, _ in self.lengths)
        return prompts[max(0, math.ceil(share * len(prompts)) - 1)]


def draw_profile(prompts: Lengths, outputs: Lengths, prefix_hit: float = 0.0) -> Profile:
    """Profile with prompt and output lengths drawn independently from two distributions."""
    source = random.Random(_SEED)
    return Profile([(prompts.draw(source), outputs.draw(source)) for _ in range(_NUM_SAMPLES)], prefix_hit)


def sample_profile(lengths: Iterable[tuple[int, int]], prefix_hit: float = 0.0) -> Profile:
    """Profile of recorded lengths; many are thinned evenly over prompt lengths, keeping the largest request."""
    recorded = sorted(lengths)
    if len(recorded) > _NUM_SAMPLES:
        largest = max(recorded, key=sum)
        step = len(recorded) / (_NUM_SAMPLES - 1)
        recorded = [*(recorded[int((i + 0.5) * step)] for i in range(_NUM_SAMPLES - 1)), largest]
    return Profile(recorded, prefix_hit)
