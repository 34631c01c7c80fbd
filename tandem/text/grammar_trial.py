"""Script of the subprocess that compiles grammars first, because some crash the compiler and some never finish.

Its input is first the special tokens, as JSON by id, then grammars: a length of 4 bytes and UTF-8 text each. It answers
each grammar with one line of JSON: the error, or null, and the bytes that it takes compiled; it exits at a grammar that
exceeds its limits. It imports no other module of Tandem.
"""

import ctypes
import json
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

CPU_S = 1.0  # processor time for one grammar
MEMORY_BYTES = 2 << 30  # address space of the subprocess
MAX_COMPILED_BYTES = 64 << 20  # of one grammar; the largest schemas take 40 MiB
_STACK_BYTES = 4 << 20  # less than a thread has elsewhere, so that what passes here has room there


def main() -> None:
    """Serves until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    give_back = _give_back()
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = LLTokenizer(_Bytes(json.loads(_read(source) or "{}")))
    while (grammar := _read(source)) is not None:
        # NOTE: the processor's time, not the clock's; the signal has no handler, so it ends this process
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        give_back()
        before = _resident_bytes()
        fault, compiled = _compiled(grammar, tokenizer)
        num_bytes = max(0, _resident_bytes() - before)
        del compiled
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps([fault, num_bytes]).encode() + b"\n")
        answers.flush()


def _compiled(grammar: str, tokenizer: LLTokenizer) -> tuple[str | None, LLMatcher | None]:
    """The error in a grammar, or the compiled grammar with what its first mask needs."""
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if messages:  # NOTE: a warning is something that would be ignored
        return str(messages[0]), None
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    matcher.compute_bitmask()  # NOTE: only to see it survive
    return None, matcher


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _give_back() -> Callable[[], object]:
    """A function that returns freed memory to the system, so that the next grammar cannot hide in it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # NOTE: of glibc
    return (lambda: None) if trim is None else lambda: trim(0)


def _read(source: BinaryIO) -> str | None:
    """The next text; None at the end of the input."""
    header = source.read(4)
    return source.read(int.from_bytes(header, "little")).decode() if len(header) == 4 else None


class _Bytes(TokenizerWrapper):
    """A tokenizer with one token for each byte, and the special tokens at their ids."""

    def __init__(self, special: Mapping[str, str]) -> None:
        named = {int(token_id): token.encode() for token_id, token in special.items()}
        self.tokens = [named.get(token_id, b"") for token_id in range(max(named, default=0) + 1)]
        self.special_token_ids = list(named)
        self._first = len(self.tokens)
        self.tokens += [bytes([byte]) for byte in range(256)]
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = None  # type: ignore[assignment]

    def __call__(self, text: str) -> list[int]:
        return [self._first + byte for byte in text.encode()]


if __name__ == "__main__":
    main()
