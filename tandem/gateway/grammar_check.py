"""Check that the workers can enforce a grammar, made before one is asked. Owned by one event loop.

Invariant: grammars wait for each other and for nothing else, and nothing else waits for them. Remembers a digest and
the outcome of the latest, never what they were compiled to, which only workers use.
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
    """Builds the vocabulary that grammars are compiled against when the first one comes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: dict[int, _Judge] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="tandem-grammars")  # they compile one at a time

    async def check(self, grammar: str, vocab_size: int) -> None:
        """Raises InvalidRequestError for one that is wrong or too large."""
        if vocab_size not in self._grammars:
            self._grammars = {vocab_size: _Judge(Grammars(self._tokenizer, vocab_size, self._eos_ids()))}
        judge, digest = self._grammars[vocab_size], sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        fault = judge.known(digest)
        if fault is None:
            fault = await asyncio.get_running_loop().run_in_executor(self._compiler, judge.judge, grammar, digest)
        if fault:
            raise InvalidRequestError(fault)

    def close(self) -> None:
        """What waits is dropped; nothing can be checked any more."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _eos_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)


class _Judge:
    """The outcomes for one vocabulary: what is wrong, or nothing."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    def known(self, digest: bytes) -> str | None:
        """What is wrong with the grammar of this digest; None: that is not remembered. Any thread may call."""
        return self._faults.get(digest)

    def judge(self, grammar: str, digest: bytes) -> str:
        """As `known`, after finding it out; in the compiler's thread alone."""
        fault = self._faults.get(digest)
        if fault is None:
            fault = self._faults[digest] = self._grammars.fault(grammar) or ""
            if len(self._faults) > MAX_REMEMBERED:
                self._faults.popitem(last=False)
        return fault
