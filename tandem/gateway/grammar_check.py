"""Whether a grammar can be enforced by the workers, found out before one is asked. Owned by one event loop.

Invariant: grammars wait for each other and for nothing else, and nothing else waits for them.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tandem.text.grammar import Grammars
from tandem.text.tokenizer import Tokenizer


class GrammarCheck:
    """Builds the vocabulary that grammars are compiled against when the first one comes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: dict[int, Grammars] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="tandem-grammars")  # they compile one at a time

    async def check(self, grammar: str, vocab_size: int) -> None:
        """Raises InvalidRequestError for one that is wrong or too large."""
        if vocab_size not in self._grammars:
            self._grammars = {vocab_size: Grammars(self._tokenizer, vocab_size, self._eos_ids())}
        grammars = self._grammars[vocab_size]
        if grammars.known(grammar) is None:
            await asyncio.get_running_loop().run_in_executor(self._compiler, grammars.check, grammar)

    def close(self) -> None:
        """What waits is dropped; nothing can be checked any more."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _eos_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)
