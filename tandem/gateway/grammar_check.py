"""Whether a grammar can be enforced by the workers, found out before one is asked. Safe to share between threads."""

import threading

from tandem.text.grammar import Grammars
from tandem.text.tokenizer import Tokenizer


class GrammarCheck:
    """Builds the vocabulary that grammars are compiled against when the first one comes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._grammars: dict[int, Grammars] = {}

    def check(self, grammar: str, vocab_size: int) -> None:
        """Raises InvalidRequestError for one that is wrong or too large."""
        with self._lock:
            if vocab_size not in self._grammars:
                self._grammars = {vocab_size: Grammars(self._tokenizer, vocab_size, self._eos_ids())}
            grammars = self._grammars[vocab_size]
        grammars.check(grammar)

    def _eos_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)
