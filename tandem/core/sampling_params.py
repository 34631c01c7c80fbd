"""Sampling parameters of a request. Immutable, validated once at construction.

Invariant: an instance that exists can be honoured; anything else was refused with `InvalidRequestError`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tandem.core.errors import InvalidRequestError, shown
from tandem.core.reasoning import Reasoning
from tandem.core.speculate import DRAFTER_CHOICES

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_LIST_TOKENS = 4096
MAX_CHOICES = 128
MAX_GRAMMAR_CHARACTERS = 2**20
MAX_TOKEN_ID = 2**31 - 1
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it and must stay within float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options, in the order they act: penalties, bias and bans → temperature → top-k → top-p → min-p.

    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1`, `min_p == 0` switch their filter off. `max_tokens` of None
    means up to the context limit. `logprobs` and `prompt_logprobs` are the number of alternatives reported beside the
    chosen token (0 = only the chosen one), None = not reported. `bad_words` are token sequences that must never be
    completed. `seed` of None lets the engine draw one.

    `grammar` is what the answer must match, in llguidance's own form; it begins after the thinking that `reasoning`
    describes. `skip_special_tokens` leaves special tokens out of the text.

    `speculate` names the drafter whose guesses are checked, or is "off"; "auto" and None leave that to the worker. The
    tokens are the same whatever it is.

    Raises:
        InvalidRequestError: naming the field, its value and the accepted range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    grammar: str | None = None
    reasoning: Reasoning | None = None
    skip_special_tokens: bool = True
    speculate: str | None = None

    def __post_init__(self) -> None:
        _require_int("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID, optional=True)
        _require_int("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        _require_float("temperature", self.temperature, 0.0, 100.0)
        _require_int("top_k", self.top_k, 0, MAX_TOKEN_ID)
        _require_float("top_p", self.top_p, 0.0, 1.0, above_minimum=True)
        _require_float("min_p", self.min_p, 0.0, 1.0)
        _require_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _require_float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _require_float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _require_int("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _require_int("n", self.n, 1, MAX_CHOICES)
        _require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _require_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        _require_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        _require_bool("ignore_eos", self.ignore_eos)
        _require_bool("skip_special_tokens", self.skip_special_tokens)
        if self.speculate is not None and self.speculate not in DRAFTER_CHOICES:
            raise InvalidRequestError(f"speculate={shown(self.speculate)} must be one of {', '.join(DRAFTER_CHOICES)}")
        self._check_grammar()
        self._check_reasoning()
        self._check_token_lists()
        self._check_bad_words()
        self._check_stop()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def _check_token_lists(self) -> None:
        given: object = self.logit_bias
        if not isinstance(given, Mapping):
            raise InvalidRequestError(f"logit_bias={shown(given)} must map token ids to numbers")
        _require_count("logit_bias", len(given), MAX_LIST_TOKENS)
        for token_id, bias in given.items():
            _require_int("logit_bias key", token_id, 0, MAX_TOKEN_ID)
            _require_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        self._keep("logit_bias", dict(given))
        self._keep("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._keep("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids is empty, so no token could be chosen; omit it or add some"
                )

    def _check_bad_words(self) -> None:
        words = tuple(_token_ids("bad_words entry", word) for word in _entries("bad_words", self.bad_words))
        _require_count("bad_words", sum(map(len, words)), MAX_LIST_TOKENS)
        if () in words:
            raise InvalidRequestError("bad_words holds an empty token sequence, which would ban everything")
        self._keep("bad_words", words)

    def _check_grammar(self) -> None:
        given: object = self.grammar
        if given is None:
            return
        if not isinstance(given, str) or not 0 < len(given) <= MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequestError(f"grammar={shown(given)} must have 1 to {MAX_GRAMMAR_CHARACTERS} characters")
        if self.ignore_eos or self.min_tokens:
            raise InvalidRequestError("ignore_eos and min_tokens do not go with a grammar, which says the end")

    def _check_reasoning(self) -> None:
        given: object = self.reasoning
        if given is not None and not isinstance(given, Reasoning):
            raise InvalidRequestError(f"reasoning={shown(given)} must be a Reasoning")

    def _check_stop(self) -> None:
        stops = _entries("stop", self.stop, MAX_STOP_STRINGS)
        for text in stops:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop holds {shown(text)}; each stop must be a non-empty string")
            if len(text) > MAX_STOP_STRING_CHARACTERS:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters; at most {MAX_STOP_STRING_CHARACTERS} are accepted"
                )
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidRequestError(f"stop holds {shown(text)}, which is not valid Unicode and could never match")
        self._keep("stop", stops)

    def _keep(self, name: str, value: object) -> None:
        """Replace a field by its own immutable copy, so that the caller's later changes do not reach it."""
        object.__setattr__(self, name, value)


def _require_int(name: str, value: object, minimum: int, maximum: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InvalidRequestError(f"{name}={shown(value)} must be an integer from {minimum} to {maximum}")


def _require_float(name: str, value: object, minimum: float, maximum: float, *, above_minimum: bool = False) -> None:
    """NOTE: the comparison refuses NaN and infinities too."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value <= maximum
    if not is_number or (above_minimum and value == minimum):
        lower = f"above {minimum}" if above_minimum else f"at least {minimum}"
        raise InvalidRequestError(f"{name}={shown(value)} must be a finite number {lower} and at most {maximum}")


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={shown(value)} must be true or false")


def _require_count(name: str, count: int, maximum: int) -> None:
    if count > maximum:
        raise InvalidRequestError(f"{name} has {count} entries; at most {maximum} are accepted")


def _entries(name: str, value: object, maximum: int = MAX_LIST_TOKENS) -> tuple[object, ...]:
    """`value` as a tuple; counted before it is copied."""
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name}={shown(value)} must be a list")
    _require_count(name, len(value), maximum)
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[object, ...]:
    token_ids = _entries(name, value)
    for token_id in token_ids:
        _require_int(f"{name} entry", token_id, 0, MAX_TOKEN_ID)
    return token_ids


def validate_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidRequestError` for token ids that the model's logits do not have, naming the field and the first id
    that is not below `vocab_size`.
    """
    reasoning = params.reasoning
    fields: tuple[tuple[str, Iterable[int]], ...] = (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", (token_id for word in params.bad_words for token_id in word)),
        ("reasoning", () if reasoning is None else (*reasoning.start_token_ids, *reasoning.end_token_ids)),
    )
    for name, token_ids in fields:
        outside = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
        if outside is not None:
            raise InvalidRequestError(
                f"{name} names token {outside}, but this model's vocabulary is 0 to {vocab_size - 1}"
            )
