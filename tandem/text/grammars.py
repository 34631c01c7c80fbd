"""Compiles grammars for one model's tokens, and creates matchers that follow an answer through its grammar.

Invariant: a matcher allows exactly the tokens whose text may come next; ids without text are never allowed. Masks are
bit fields with one bit for each token, and one more after the last token: whether the answer may end here.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from weakref import WeakValueDictionary

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from tandem.core.errors import InvalidRequestError
from tandem.text.grammar_sandbox import GrammarSandbox
from tandem.text.tokenizer import Tokenizer

MAX_CACHED = 256  # grammars, and errors of those that do not compile
MAX_CACHED_BYTES = 160 << 20  # of all of them, as far as a trial shows; it is a little more with the model's tokens
_MAX_MESSAGE_CHARACTERS = 400
_NO_TOKEN = "no token of this model can come next"
_REMEDIES = {
    "": _NO_TOKEN,
    "NoExtensionBias": _NO_TOKEN,
    "oneOf constraints are not supported": "oneOf whose options may hold at once cannot be enforced; use anyOf",
}


class GrammarMatcher:
    """Position of one answer in its grammar. Not to be shared between threads; made by `Grammars`."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    @property
    def error(self) -> str | None:
        """Reason why the matcher cannot continue, such as a mask that exceeded its limits; None if it can."""
        return _shortened(self.inner.get_error()) if self.inner.is_error() else None

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Advances by tokens of the answer. False: they do not match, and the matcher is invalid from then on."""
        return self.inner.try_consume_tokens(list(token_ids)) == len(token_ids)


class CompiledGrammar:
    """A compiled grammar; `Grammars` finds it in its cache for as long as a caller holds it. `num_bytes`: memory."""

    def __init__(self, prototype: LLMatcher, num_bytes: int) -> None:
        self.prototype = prototype
        self.num_bytes = num_bytes


class Grammars:
    """Compiles the grammars of one model. Any thread may call; the vocabulary is prepared on first use.

    Args:
        tokenizer: provides the text of each token.
        vocab_size: width of the model's logits.
        eos_token_ids: tokens that end an answer and never belong to its text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        self._vocabulary = _Vocabulary(tokenizer, vocab_size, frozenset(eos_token_ids))
        self._sandbox: GrammarSandbox | None = None
        self._compiling = threading.Lock()
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._cache: OrderedDict[str, CompiledGrammar | str] = OrderedDict()
        self._held: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        self._num_cached_bytes = 0

    @property
    def end_bit(self) -> int:
        """The bit of a mask that says whether the answer may end; bits of tokens lie below it."""
        return len(self._vocabulary.tokens)

    @property
    def mask_bytes(self) -> int:
        """Bytes of one row of masks; a multiple of four."""
        return (self.end_bit // 32 + 1) * 4

    def fault(self, grammar: str) -> str | None:
        """The error that `compiled` would raise, as text, or None.

        Nothing is cached: a compiled grammar takes 30 to 80 times the memory of its text, or more.

        Raises:
            CapacityError: as `compiled`.
        """
        with self._compiling:
            found = self._cached(grammar) or self._compile(grammar)
        return _refused(found) if isinstance(found, str) else None

    def compiled(self, grammar: str) -> CompiledGrammar:
        """Compiles a grammar, which takes up to a second of one core.

        Results are cached for the latest grammars, and for those that a caller holds.

        Raises:
            InvalidRequestError: it is wrong, too large, or no token could begin the answer.
            CapacityError: it could not be checked: the subprocess did not start, was killed or got no processor time.
        """
        found = self._cached(grammar)
        if found is None:
            with self._compiling:
                found = self._cached(grammar)
                if found is None:
                    found = self._compile(grammar)
                    self._remember(grammar, found)
        return _sound(found)

    def known(self, grammar: str) -> CompiledGrammar | None:
        """The cached result of `compiled`, else None. Raises InvalidRequestError where the cached result is an
        error.
        """
        found = self._cached(grammar)
        return None if found is None else _sound(found)

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the beginning of an answer; compiles the grammar if it is not cached. Raises as `compiled`."""
        prototype = self.compiled(grammar).prototype
        with self._lock:
            return GrammarMatcher(prototype.deep_copy())

    def fill_masks(self, matchers: Sequence[tuple[GrammarMatcher, int]], address: int, num_rows: int) -> None:
        """Writes masks of allowed tokens into CPU memory: each matcher's into the row given with it.

        There are `num_rows` rows of `mask_bytes` bytes, which begin at `address`. The row of a matcher that has an
        `error` afterwards is invalid.

        Releases the interpreter's lock meanwhile.
        """
        if self._executor is None:
            self._executor = LLExecutor()
        pairs = [(matcher.inner, row) for matcher, row in matchers]
        self._executor.unsafe_compute_mask_ptr(pairs, address, self.mask_bytes, num_rows)

    def close(self) -> None:
        """Ends the subprocess and threads; they are restarted on demand."""
        if self._sandbox is not None:
            self._sandbox.close()
        self._executor = None

    def _cached(self, grammar: str) -> CompiledGrammar | str | None:
        with self._lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
                return found
            return self._held.get(grammar)

    def _compile(self, grammar: str) -> CompiledGrammar | str:
        """The compiled grammar, or the error as text."""
        if self._tokenizer is None or self._sandbox is None:
            self._tokenizer = LLTokenizer(self._vocabulary.read())
            self._sandbox = GrammarSandbox(self._vocabulary.special_tokens)
        tried = self._sandbox.trial(grammar)
        if tried.fault is not None:
            return _shortened(tried.fault)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        trial = matcher.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()
        return _shortened(trial.get_error()) if trial.is_error() else CompiledGrammar(matcher, tried.num_bytes)

    def _remember(self, grammar: str, found: CompiledGrammar | str) -> None:
        with self._lock:
            if isinstance(found, CompiledGrammar):
                self._held[grammar] = found
            self._cache[grammar] = found
            self._num_cached_bytes += _size(grammar, found)
            while len(self._cache) > 1 and (len(self._cache) > MAX_CACHED or self._num_cached_bytes > MAX_CACHED_BYTES):
                self._num_cached_bytes -= _size(*self._cache.popitem(last=False))


def _size(grammar: str, found: CompiledGrammar | str) -> int:
    """Bytes that a cached grammar takes, or its error."""
    return len(grammar) + (found.num_bytes if isinstance(found, CompiledGrammar) else len(found))


def _sound(found: CompiledGrammar | str) -> CompiledGrammar:
    if isinstance(found, str):
        raise InvalidRequestError(_refused(found))
    return found


def _refused(fault: str) -> str:
    return f"the answer's grammar cannot be enforced: {fault}"


def _shortened(message: str) -> str:
    """llguidance's message without the parser's state."""
    words = " ".join(message.split("<state>")[0].split("<non-verbose/>")[0].split())
    return _REMEDIES.get(words.partition(".")[0], words[:_MAX_MESSAGE_CHARACTERS])


class _Vocabulary(TokenizerWrapper):
    """The bytes of each token, in the form that llguidance requires."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._num_known = min(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = eos_token_ids
        self._ids: dict[bytes, int] = {}
        self._special: frozenset[int] = frozenset()
        self._longest = 0
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        # NOTE: without one, llguidance adds a token after the last, which stands for the answer's end
        self.eos_token_id = None  # type: ignore[assignment]
        self.tokens: list[bytes] = [b""] * vocab_size
        self.special_token_ids: list[int] = []

    def read(self) -> "_Vocabulary":
        """Reads the bytes of every token, which takes a while; returns itself."""
        for token_id in range(self._num_known):
            token = self._tokenizer.token(token_id)
            if token is None:
                continue
            if token_id in self._eos_token_ids or self._tokenizer.is_special(token_id):
                self.tokens[token_id] = token.encode()
                self.special_token_ids.append(token_id)
            else:
                self.tokens[token_id] = self._tokenizer.token_bytes(token_id)
                self._ids.setdefault(self.tokens[token_id], token_id)
        self._special = frozenset(self.special_token_ids)
        self._longest = max(map(len, self._ids), default=0)
        return self

    @property
    def special_tokens(self) -> dict[int, str]:
        """Special tokens by id."""
        return {token_id: self.tokens[token_id].decode() for token_id in self.special_token_ids}

    def __call__(self, text: str) -> list[int]:
        """Tokens that write exactly `text`, which the grammar leaves no choice about; it must not raise.

        As the model would split it where its tokenizer agrees, else the longest token first.
        """
        data = text.encode()
        try:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        except InvalidRequestError:
            return self._greedy(data)
        is_exact = b"".join(map(self._bytes, token_ids)) == data
        return token_ids if is_exact and self._special.isdisjoint(token_ids) else self._greedy(data)

    def _bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < self._num_known else b""

    def _greedy(self, data: bytes) -> list[int]:
        found, start = [], 0
        while start < len(data):
            end = min(len(data), start + self._longest)
            while end > start and data[start:end] not in self._ids:
                end -= 1
            if end == start:
                break  # no token writes this, so the answer cannot go on, which the mask will say
            found.append(self._ids[data[start:end]])
            start = end
        return found
