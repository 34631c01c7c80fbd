"""Parts of the updates that a prefill worker sends to the decode worker that reads a prompt's KV."""

from dataclasses import dataclass

from tandem.core.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """The first token after the prompt, sampled by the prefill worker."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class LeasedDraftState:
    """The drafter's state for a request: `num_bytes` in pages under the prefill's lease, as `num_rows` rows, one a
    position, from position `first` on.
    """

    first: int
    num_rows: int
    num_bytes: int
    page_ids: tuple[int, ...]
