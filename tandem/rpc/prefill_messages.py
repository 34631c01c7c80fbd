"""Parts of what a prefill worker tells the reader of a prompt's KV."""

from dataclasses import dataclass

from tandem.core.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """The token that follows the prompt."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class LeasedDraftState:
    """State of the drafter for a request, `num_bytes` in pages that its lease covers; `first` and `num_rows` as in
    `DraftState`.
    """

    first: int
    num_rows: int
    num_bytes: int
    page_ids: tuple[int, ...]
