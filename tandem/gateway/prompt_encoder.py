"""Encodes prompts to token ids, in bounded memory and without delaying the event loop that owns it.

A chat's prompt is cut where the tokenizer splits it whatever the text around, so the pieces between two cuts are
encoded one by one; those known to the cache (`known_prefixes`) are neither encoded nor hashed again. A beginning is a
known first part of a prompt, which a resumed request continues. Token ids and hashes equal those of encoding the whole.
Invariant: a text that might exceed the maximum by far is counted part by part before it is encoded; the longest texts
share one thread, so that they only wait for each other.
"""

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

from tandem.core.errors import InvalidRequestError
from tandem.core.hashing import HASH_BYTES, further_hashes
from tandem.core.heap import trim_heap
from tandem.gateway.errors import RequestError
from tandem.gateway.known_prefixes import CutBeginning, CutPrompt, KnownPrefixes, Piece
from tandem.text.cuts import CutRule
from tandem.text.tokenizer import Tokenizer

LONG_TEXT = 2048  # characters; encoding more, about a millisecond, must not hold up other streams
CHARACTERS_PER_CALL = 64 * 1024  # of a long text that are counted, or of a chat that are encoded, in one call
COUNTED_CONTEXTS = 64  # multiple of the context length that a text may have whose tokens are only counted
_QUICK_TOKENS = 4096  # cutting, hashing and joining that many takes a fraction of a millisecond
_KNOWN_TOKENS_PER_TOKEN = 64  # cached tokens that are joined in the time that hashing and joining one new token takes
_QUICK_CHARACTERS_PER_TOKEN = 16  # characters that are cut in the time that hashing and joining one token takes
_SEAM_TOKENS = 64  # tokens that cutting a part out of a text may add to it
_WHOLE_BYTES = 512 * 1024  # of UTF-8 that may be encoded whole: at most one token, some 300 bytes of memory, for each
_WHOLE_BYTES_PER_TOKEN = 8  # real text has about four
_MAX_COUNTED_TOKENS = 512 * 1024  # of a text whose tokens are only counted, unless one context has more
_MAX_CHARACTERS = 8 * 2**20  # of a whole prompt
_MAX_CHARACTERS_PER_TOKEN = 1024  # of a whole prompt on average; long runs of spaces have hundreds

T = TypeVar("T")


class CannotResumeError(InvalidRequestError):
    """A request cannot be resumed from a known beginning; `known_body` then reads the whole body. No client sees it."""


@dataclass(frozen=True, slots=True)
class ChainRoot:
    """Root of a prompt's chain of block hashes: `digest` covers model and tenant (`core.hashing.root_hash`)."""

    digest: bytes
    block_size: int


@dataclass(frozen=True, slots=True)
class EncodingCounts:
    """Bytes, tokens and blocks of one prompt: those found in the cache (`known`), and all.

    Args:
        num_unread_messages: messages that were neither parsed nor rendered.
        why_whole: reason why all messages of a long chat were parsed and rendered.
    """

    num_known_bytes: int
    num_bytes: int
    num_known_tokens: int
    num_tokens: int
    num_known_blocks: int
    num_blocks: int
    num_unread_messages: int = 0
    why_whole: str = ""

    @property
    def attributes(self) -> dict[str, str | int]:
        """The counts as attributes of a request's trace."""
        why: dict[str, str | int] = {"read_whole": self.why_whole} if self.why_whole else {}
        return why | {
            "known_bytes": self.num_known_bytes,
            "new_bytes": self.num_bytes - self.num_known_bytes,
            "known_tokens": self.num_known_tokens,
            "new_tokens": self.num_tokens - self.num_known_tokens,
            "known_blocks": self.num_known_blocks,
            "new_blocks": self.num_blocks - self.num_known_blocks,
            "unread_messages": self.num_unread_messages,
        }


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens.

    Args:
        token_ids: 32 bits each; not to be modified.
        hashes: concatenated hashes of its full blocks.
        cut: the text in UTF-8, cut into the pieces that were encoded one by one.
        ends: for each piece, the number of tokens up to its end.
    """

    token_ids: "array[int]"
    hashes: bytes
    cut: CutPrompt
    ends: Sequence[int]
    counts: EncodingCounts

    @property
    def pieces(self) -> Sequence[bytes]:
        """The text of each piece; that of a beginning from which the prompt was resumed is empty."""
        return self.cut.pieces


class PromptEncoder:
    """Encodes the prompts of one model. `rule`: where its chats may be cut; `known`: cache of encoded pieces."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rule: CutRule = CutRule(None, "no rule was given"),  # noqa: B008 - immutable
        known: KnownPrefixes | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._rule = rule
        self.known = KnownPrefixes() if known is None else known
        self._texts = ThreadPoolExecutor(4, thread_name_prefix="tandem-texts")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="tandem-long-texts")

    async def encode(
        self, text: str, max_model_len: int, *, add_special_tokens: bool, is_only_counted: bool = False
    ) -> list[int]:
        """The token ids of `text`.

        Args:
            is_only_counted: it may have the tokens of `COUNTED_CONTEXTS` contexts, up to `_MAX_COUNTED_TOKENS`.

        Raises:
            RequestError: it has too many characters, or leaves no room for one output token.
            InvalidRequestError: the tokenizer cannot encode it, for example because it is no Unicode text.
        """
        most = _most(max_model_len, is_only_counted=is_only_counted)

        def encoded() -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        if len(text) <= LONG_TEXT:
            token_ids = encoded()
        elif _is_small(text, most):
            token_ids = await _run(self._texts, encoded)
        else:
            await self._check_num_tokens(text, most, max_model_len)
            token_ids = await _run(self._long_texts, partial(_trimmed, encoded))
        if len(token_ids) > most:
            raise too_long(str(len(token_ids)), max_model_len)
        return token_ids

    async def encode_chat(
        self,
        text: str,
        max_model_len: int,
        root: ChainRoot,
        *,
        add_special_tokens: bool,
        is_only_counted: bool = False,
        beginning: CutBeginning | None = None,
    ) -> EncodedPrompt:
        """Encodes a chat's prompt and hashes its blocks; only the text after its longest cached beginning is processed.

        Args:
            beginning: the beginning of the prompt, if `text` only continues it.

        Raises:
            InvalidRequestError: as `encode`.
            CannotResumeError: the beginning's tokens were evicted, or the prompt may be too long to be resumed.
        """
        token, most = self._rule.token, _most(max_model_len, is_only_counted=is_only_counted)
        if beginning is not None and (add_special_tokens or beginning.num_bytes + len(text) > _longest(most)):
            raise CannotResumeError("the beginning of the prompt cannot be resumed")
        if token is None or add_special_tokens or len(text) > _longest(most):
            ids = await self.encode(
                text, max_model_len, add_special_tokens=add_special_tokens, is_only_counted=is_only_counted
            )
            cut = CutPrompt([data := text.encode()], [], [len(data)])
            return await self._chained(cut, root, [], [ids])
        size = len(text) // _QUICK_CHARACTERS_PER_TOKEN
        cut = await self._maybe_in_thread(size, partial(CutPrompt.of, text, token, root.digest, beginning))
        known = self.known.leading(cut.keys)
        if beginning is not None and len(known) < len(beginning.keys):
            raise CannotResumeError("the beginning of the prompt was forgotten")
        num_tokens = sum(len(piece.token_ids) for piece in known) // 4
        new = await self._encode_pieces(cut.pieces[len(known) :], most, num_tokens, max_model_len)
        return await self._chained(cut, root, known, new)

    def beginning(self, prompt: EncodedPrompt, num_bytes: int) -> CutBeginning | None:
        """The first `num_bytes` of a prompt, for `encode_chat` of a later one; None where prompts are not cut."""
        return None if self._rule.token is None else prompt.cut.beginning(num_bytes, self._rule.token)

    async def count_tokens(
        self, prompt: EncodedPrompt, places: Sequence[int], *, add_special_tokens: bool
    ) -> list[int]:
        """For each place, the number of tokens that end at or before it.

        Args:
            places: numbers of characters from the prompt's start; of a resumed one, from the last cut of its beginning.
        """
        starts = [0, *accumulate(len(piece.decode()) for piece in prompt.pieces)]
        found = []
        for place in places:
            index = min(bisect_right(starts, place), len(prompt.pieces)) - 1
            text = prompt.pieces[index].decode()
            ends = await self.token_ends(text, add_special_tokens=add_special_tokens)
            num_before = prompt.ends[index - 1] if index else 0
            found.append(num_before + bisect_right(ends, place - starts[index]))
        return found

    async def token_ends(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """For each token of `text`, the number of characters up to its end. The text must have been encoded before."""

        def ends() -> list[int]:
            return self._tokenizer.token_ends(text, add_special_tokens=add_special_tokens)

        if len(text) <= LONG_TEXT:
            return ends()
        return await _run(self._texts if len(text) <= _WHOLE_BYTES else self._long_texts, ends)

    async def _encode_pieces(
        self, pieces: Sequence[bytes], most: int, num_tokens: int, max_model_len: int
    ) -> list[list[int]]:
        """Token ids of each piece. `num_tokens`: tokens of the pieces before, which count towards `most` as well."""
        found: list[list[int]] = []
        num_bytes = sum(map(len, pieces))
        threads = self._texts if num_bytes <= _small_bytes(most) else self._long_texts
        for batch in _batches(pieces):
            encoded = partial(self._encoded, batch)
            if sum(map(len, batch)) > _small_bytes(most):
                text = batch[0].decode("utf-8", "surrogatepass")
                await self._check_num_tokens(text, most - num_tokens, max_model_len, num_tokens)
                encoded = partial(_trimmed, encoded)
            ids = encoded() if num_bytes <= LONG_TEXT else await _run(threads, encoded)
            found += ids
            num_tokens += sum(map(len, ids))
            if num_tokens > most:
                is_all = len(found) == len(pieces)
                raise too_long(str(num_tokens) if is_all else f"at least {num_tokens}", max_model_len)
        return found

    def _encoded(self, pieces: Sequence[bytes]) -> list[list[int]]:
        return self._tokenizer.encode_each([piece.decode("utf-8", "surrogatepass") for piece in pieces])

    async def _chained(
        self, cut: CutPrompt, root: ChainRoot, known: Sequence[Piece], new: Sequence[Sequence[int]]
    ) -> EncodedPrompt:
        """Joins and hashes the whole prompt and adds its new pieces to the cache."""
        num_known = sum(len(piece.token_ids) for piece in known) // 4
        size = sum(map(len, new)) + num_known // _KNOWN_TOKENS_PER_TOKEN
        prompt, pieces = await self._maybe_in_thread(size, partial(_joined, cut, root, known, new))
        self.known.add(cut.keys, pieces)
        return prompt

    async def _maybe_in_thread(self, size: int, work: Callable[[], T]) -> T:
        """Runs `work` at once if `size` shows that it is done within a millisecond, else in a thread."""
        return work() if size <= _QUICK_TOKENS else await _run(self._texts, work)

    def close(self) -> None:
        """Drops waiting work; no long text can be encoded afterwards."""
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._long_texts.shutdown(wait=False, cancel_futures=True)

    async def _check_num_tokens(self, text: str, most: int, max_model_len: int, num_before: int = 0) -> None:
        """Raises RequestError as soon as more than `most` tokens are counted; its message adds `num_before`."""
        longest = _longest(most + num_before)
        num_tokens = 0
        for start in range(0, min(len(text), longest), CHARACTERS_PER_CALL):
            num_tokens += await _run(self._long_texts, partial(self._count, text, start)) - _SEAM_TOKENS
            if num_tokens > most:
                raise too_long(f"at least {num_before + num_tokens}", max_model_len)
        if len(text) > longest:
            raise RequestError(
                f"prompt is too long: {len(text)} characters, of which at most {longest} are tokenised; this model's "
                f"maximum context length is {max_model_len} tokens",
                param="prompt",
                code="context_length_exceeded",
            )

    def _count(self, text: str, start: int) -> int:
        piece = text[start : start + CHARACTERS_PER_CALL]
        return len(self._tokenizer.encode(piece, add_special_tokens=False))


def check_length(token_ids: Sequence[int], max_model_len: int) -> None:
    """Raises RequestError unless there is at least one token and the context has room for one more."""
    if not token_ids:
        raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
    if len(token_ids) >= max_model_len:
        raise too_long(str(len(token_ids)), max_model_len)


def too_long(num_tokens: str, max_model_len: int) -> RequestError:
    """Error for a prompt that exceeds the context.

    NOTE: contains both Anthropic's and OpenAI's wording, which clients look for to shorten a conversation.
    """
    return RequestError(
        f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum; this model's maximum context length "
        f"is {max_model_len} tokens; shorten it",
        param="prompt",
        code="context_length_exceeded",
    )


def _most(max_model_len: int, *, is_only_counted: bool) -> int:
    """Maximum number of tokens of a prompt."""
    most = max_model_len - 1
    return max(most, min(COUNTED_CONTEXTS * max_model_len, _MAX_COUNTED_TOKENS)) if is_only_counted else most


def _longest(most: int) -> int:
    """Maximum number of characters of a text that is encoded, if the prompt may have `most` tokens."""
    return min(_MAX_CHARACTERS_PER_TOKEN * most, _MAX_CHARACTERS)


def _is_small(text: str, most: int) -> bool:
    """Whether encoding it whole takes little memory, whatever its content."""
    small = _small_bytes(most)
    return len(text) <= small and len(text.encode("utf-8", "surrogatepass")) <= small


def _small_bytes(most: int) -> int:
    return max(CHARACTERS_PER_CALL, min(_WHOLE_BYTES, _WHOLE_BYTES_PER_TOKEN * most))


def _batches(pieces: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Groups pieces into batches that are encoded in one call: of a bounded size, or one single large piece."""
    batch: list[bytes] = []
    size = 0
    for piece in pieces:
        if batch and size + len(piece) > CHARACTERS_PER_CALL:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece)
    if batch:
        yield batch


def _joined(
    cut: CutPrompt, root: ChainRoot, known: Sequence[Piece], new: Sequence[Sequence[int]]
) -> tuple[EncodedPrompt, list[Piece]]:
    """Joins the tokens of `known` pieces and of `new` ones, given as ids; returns the prompt and all its pieces."""
    packed = [*(piece.token_ids for piece in known), *(array("I", ids).tobytes() for ids in new)]
    token_ids = array("I")
    token_ids.frombytes(b"".join(packed))
    ends = list(accumulate(len(data) // 4 for data in packed))
    known_hashes = b"".join(piece.hashes for piece in known)
    hashes = known_hashes + further_hashes(root.digest, known_hashes, token_ids, root.block_size)
    starts = [0, *(end // root.block_size * HASH_BYTES for end in ends)]
    more = [
        Piece(packed[index], hashes[starts[index] : starts[index + 1]]) for index in range(len(known), len(cut.keys))
    ]
    num_bytes, num_known = cut.sizes, len(known)
    counts = EncodingCounts(
        num_known_bytes=sum(num_bytes[:num_known]),
        num_bytes=sum(num_bytes),
        num_known_tokens=ends[num_known - 1] if known else 0,
        num_tokens=len(token_ids),
        num_known_blocks=len(known_hashes) // HASH_BYTES,
        num_blocks=len(hashes) // HASH_BYTES,
    )
    return EncodedPrompt(token_ids, hashes, cut, ends, counts), [*known, *more]


def _trimmed(work: Callable[[], T]) -> T:
    """Runs `work`, which frees some hundred bytes a token in small buffers, and returns that memory to the system."""
    try:
        return work()
    finally:
        trim_heap()


async def _run(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)
