"""Finds places where a text may be cut so that its pieces, encoded one by one, give the tokens of the whole.

The gateway's cache of encoded prompts needs them. A tokenizer of the `tokenizers` library first splits a text at its
added tokens that are not normalised; the later steps see each piece by itself. So a text may be cut before such a
token, if the token is certain to be found whatever surrounds it. `cut_tokens` decides this from the tokenizer's rules.
"""

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tandem.core.errors import InvalidRequestError
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer

_FIRST_CHARACTERS = frozenset(string.punctuation) - {"_"}  # neither part of a word nor space, so no flag reaches across
_RANDOM = ("dropout", "alpha", "nbest_size")
_TEXTS = ("Hello", " two  words \n\n", "\u0301é", "x", "1", "▁")
_USER, _ANSWER, _SYSTEM = ({"role": role, "content": "Hi"} for role in ("user", "assistant", "system"))
_TRIALS: Sequence[Sequence[Mapping[str, Any]]] = (
    (_USER, _ANSWER, _USER, _ANSWER, _USER),
    (_SYSTEM, _USER, _ANSWER, _USER, _ANSWER, _USER),
)


@dataclass(frozen=True, slots=True)
class CutRule:
    """Rule by which prompts are cut: before every occurrence of `token`. None = nowhere, for `reason`."""

    token: str | None
    reason: str = ""

    @classmethod
    def find(cls, tokenizer: Tokenizer, template: ChatTemplate | None) -> "CutRule":
        """Chooses the token that the template writes most often, among those at which cutting is safe.

        Of equally frequent ones it chooses the one that comes last in a prompt, so that most of it lies before the last
        cut.
        """
        if template is None:
            return cls(None, "the model has no chat template")
        prompts = list(filter(None, (_rendered(template, messages) for messages in _TRIALS)))
        if not prompts:
            return cls(None, "the chat template refuses a short conversation")
        written = max(prompts, key=len)
        found = [token for token in cut_tokens(tokenizer.backend) if written.count(token) > 1]
        if not found:
            return cls(None, "the chat template writes no added token that is certain to be split off")
        token = max(found, key=lambda token: (written.count(token), written.rfind(token)))
        if not _holds(tokenizer, token):
            return cls(None, f"texts cut before {token!r} are encoded otherwise than in one piece")
        return cls(token)


def cut_tokens(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """Added tokens that are split off wherever they are written, in every text; empty where encoding is random.

    Such a token is not normalised, has no condition on its surroundings (`single_word`) and takes no space before it
    (`lstrip`); it begins with punctuation, so that a neighbour's conditions end at it; and no added token that is
    searched at the same time overlaps its beginning, contains it or continues it.
    """
    if any(getattr(backend.model, name, None) for name in _RANDOM):
        return frozenset()
    searched = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    contents = {token.content for token in searched}
    inside = "\0".join(content[1:] for content in contents)
    suffixes = {content[start:] for content in contents for start in range(1, len(content))}
    prefixes = {content[:end] for content in contents for end in range(1, len(content))}
    return frozenset(
        token.content
        for token in searched
        if _is_unconditional(token, has_special=not backend.encode_special_tokens)
        and token.content not in prefixes
        and token.content not in inside
        and suffixes.isdisjoint(_beginnings(token.content))
    )


def _is_unconditional(token: AddedToken, *, has_special: bool) -> bool:
    if token.single_word or token.lstrip or (token.special and not has_special):
        return False
    return token.content[0] in _FIRST_CHARACTERS and "\0" not in token.content


def _beginnings(content: str) -> Iterable[str]:
    return (content[:end] for end in range(1, len(content) + 1))


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str | None:
    try:
        return template.render(messages)
    except InvalidRequestError:
        return None


def _holds(tokenizer: Tokenizer, token: str) -> bool:
    """Whether cutting before `token` leaves the tokens of a few test texts unchanged."""

    def encoded(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    texts = (*_TEXTS, *(f"{text}{token}" for text in _TEXTS))
    return all(
        encoded(before + token + after) == [*encoded(before), *encoded(token + after)]
        for before in texts
        for after in texts
    )
