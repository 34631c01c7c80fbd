"""N-gram drafter: copies what followed the last tokens where they last occurred in prompt or output (prompt lookup)."""

from collections.abc import Mapping, Sequence

from tandem.engine.drafts.history import TokenHistory, continuation, longest_match
from tandem.scheduler.output import NewRequest

_MIN_MATCH = 2  # tokens that must agree
_MAX_MATCH = 8  # tokens that are compared


class NgramDrafter:
    """Implements `drafter.Drafter`: copies what followed the longest earlier match of the last tokens, the most recent
    one if several.

    Args:
        min_match: tokens that must agree.
        max_match: tokens that are compared.
    """

    def __init__(self, min_match: int = _MIN_MATCH, max_match: int = _MAX_MATCH) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._histories: dict[str, TokenHistory] = {}

    def begin(self, request: NewRequest) -> None:
        self._histories[request.request_id] = TokenHistory([*request.prompt_token_ids, *request.output_token_ids])

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._histories[request_id].extend(token_ids)

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        drafts: dict[str, Sequence[int]] = {}
        for request_id, limit in limits.items():
            tokens = self._histories[request_id].tokens
            match = longest_match(tokens, tokens, self._min_match, self._max_match)
            if match.length:
                drafts[request_id] = continuation(tokens, int(match.places[-1]), limit)
        return drafts

    def end(self, request_id: str) -> None:
        del self._histories[request_id]
