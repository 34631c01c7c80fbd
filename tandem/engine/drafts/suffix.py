"""Suffix drafter: guesses what most often followed the last tokens in prompt, output and recent answers of the scope.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975): the longer the match, the more tokens are drafted, as long
as the guessed token's share among the matching places is large enough. Arrays are scanned at each draft instead of
maintaining a suffix tree.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.engine.drafts.history import Match, TokenArray, TokenHistory, longest_match
from tandem.scheduler.output import NewRequest

MAX_SCOPE_TOKENS = 1 << 16  # of earlier answers that a scope keeps
MAX_SCOPES = 128  # whose answers are kept
_MIN_MATCH = 2  # tokens that must agree
_MAX_MATCH = 24  # tokens that are compared
_TOKENS_PER_MATCH = 2  # drafted for each token that agrees
_MIN_SHARE = 0.3  # of the matching places at which all guesses so far follow
_BREAK = -1  # between two answers; no token


@dataclass(slots=True)
class _Followed:
    hash_root: bytes
    tokens: TokenHistory
    num_prompt_tokens: int


class SuffixDrafter:
    """Implements `drafter.Drafter` by earlier text. Answers are shared only between requests of an equal `hash_root`
    (scope).
    """

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}
        self._answers: OrderedDict[bytes, TokenHistory] = OrderedDict()  # by hash root, the last used last

    def begin(self, request: NewRequest) -> None:
        tokens = TokenHistory([*request.prompt_token_ids, *request.output_token_ids])
        self._followed[request.request_id] = _Followed(request.hash_root, tokens, len(request.prompt_token_ids))

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._followed[request_id].tokens.extend(token_ids)

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        drafts = {request_id: self._guess(self._followed[request_id], limit) for request_id, limit in limits.items()}
        return {request_id: token_ids for request_id, token_ids in drafts.items() if token_ids}

    def end(self, request_id: str) -> None:
        """Add the answer to the scope's history and forget the request."""
        followed = self._followed.pop(request_id)
        answer = followed.tokens.tokens[followed.num_prompt_tokens :].tolist()
        if len(answer) <= _MIN_MATCH:
            return
        answers = self._answers.setdefault(followed.hash_root, TokenHistory(()))
        answers.extend([*answer, _BREAK])
        answers.keep_last(MAX_SCOPE_TOKENS)
        self._answers.move_to_end(followed.hash_root)
        if len(self._answers) > MAX_SCOPES:
            self._answers.popitem(last=False)

    def _guess(self, followed: _Followed, limit: int) -> list[int]:
        own = followed.tokens.tokens
        source, match = own, longest_match(own, own, _MIN_MATCH, _MAX_MATCH)
        answers = self._answers.get(followed.hash_root)
        if answers is not None and match.length < _MAX_MATCH:
            others = longest_match(answers.tokens, own, match.length + 1 if match.length else _MIN_MATCH, _MAX_MATCH)
            if others.length:
                source, match = answers.tokens, others
        return _likeliest(source, match, min(limit, _TOKENS_PER_MATCH * match.length))


def _likeliest(tokens: TokenArray, match: Match, num_tokens: int) -> list[int]:
    """The most common next tokens, one after the other; ties go to the most recent place. Once every place has reached
    the end of `tokens`, the guess itself is continued.
    """
    found: list[int] = []
    places = match.places
    share = 1.0
    while len(found) < num_tokens:
        inside = places[places < len(tokens)]
        if not len(inside):
            found.append(found[int(places[-1]) - len(tokens)])
            places = places[-1:] + 1
            continue
        following = tokens[inside]
        token_id = _most_common(following)
        is_it = following == token_id
        share *= float(is_it.mean())
        if token_id == _BREAK or share < _MIN_SHARE:
            break
        found.append(token_id)
        places = inside[is_it] + 1
    return found


def _most_common(tokens: TokenArray) -> int:
    """The most common token, among equals the one that comes last."""
    values, first_from_end, counts = np.unique(tokens[::-1], return_index=True, return_counts=True)
    most = counts == counts.max()
    return int(values[most][first_from_end[most].argmin()])
