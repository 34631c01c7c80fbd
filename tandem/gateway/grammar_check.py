"""Checks that the workers can enforce a grammar, before one is contacted. Owned by one event loop.

Invariant: grammars are checked one at a time and delay no other work. Only digests and outcomes of the latest grammars
are kept, not the compiled grammars, which only workers use.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from tandem.core.errors import InvalidRequestError
from tandem.text.grammar import Grammars
from tandem.text.tokenizer import Tokenizer

MAX_REMEMBERED = 4096  # outcomes; each takes less than a kilobyte


class GrammarCheck:
    """Compiles grammars against the model's vocabulary, which is prepared when the first grammar arrives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: dict[int, _Judge] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="tandem-grammars")  # they compile one at a time

    async def check(self, grammar: str, vocab_size: int) -> None:
        """Raises InvalidRequestError for a grammar that is wrong or too large."""
        if vocab_size not in self._grammars:
            self._grammars = {vocab_size: _Judge(Grammars(self._tokenizer, vocab_size, self._eos_ids()))}
        judge, digest = self._grammars[vocab_size], sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        fault = judge.known(digest)
        if fault is None:
            fault = await asyncio.get_running_loop().run_in_executor(self._compiler, judge.judge, grammar, digest)
        if fault:
            raise InvalidRequestError(fault)

    def close(self) -> None:
        """Drops waiting checks; no grammar can be checked afterwards."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _eos_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)


class _Judge:
    """Outcomes of checks for one vocabulary size: an error message, or "" for a valid grammar."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    def known(self, digest: bytes) -> str | None:
        """The remembered outcome for this digest, or None. Any thread may call."""
        return self._faults.get(digest)

    def judge(self, grammar: str, digest: bytes) -> str:
        """The outcome for a grammar, compiled if it is not remembered; call in the compiler's thread only."""
        fault = self._faults.get(digest)
        if fault is None:
            fault = self._faults[digest] = self._grammars.fault(grammar) or ""
            if len(self._faults) > MAX_REMEMBERED:
                self._faults.popitem(last=False)
        return fault
