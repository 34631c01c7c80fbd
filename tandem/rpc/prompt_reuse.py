"""Avoids sending long prompts twice: a call names a prompt that its receiver has stored, and only the tokens after it.

A caller numbers the long prompts that it sends; the receiver stores them under these names. A later prompt that begins
alike is sent as such a number, a number of tokens to take, and the tokens that follow. Names belong to one caller, so
no process has to trust another's. Both sides are bounded in bytes; prompts that the receiver has dropped are sent
whole. A release that does not know names refuses a call that uses one.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Generic, TypeVar

from tandem.core.errors import InvalidRequestError, TandemError, UnknownPromptError
from tandem.core.machine import random_bytes
from tandem.core.scope import CacheScope
from tandem.core.token_ids import packed
from tandem.rpc.form import TOKEN_BYTES
from tandem.rpc.messages import ComputeCall, GenerateCall, PairCall, PrefillCall
from tandem.rpc.prompt_messages import NamedPrompt

MIN_TOKENS = 4096  # shorter prompts are not stored; sending them costs no more than finding them
_MAX_ALIKE = 4  # prompts that are compared with a new one
_COMPARED = 16 * 1024  # tokens at once, which fit into the processor's caches
_CALLER_KEY_BYTES = 16  # of a caller's random identifier
_OVERHEAD_BYTES = 512  # memory of a stored prompt beside its tokens

Key = tuple[str, CacheScope, int, bytes]
C = TypeVar("C", PairCall, GenerateCall, PrefillCall)


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """Limits and sizes of stored prompts; tests and the simulation set smaller ones.

    Args:
        min_tokens: shorter prompts are neither named nor stored.
        least_shared: number of equal first tokens that makes a stored prompt worth using.
        sample, lengths: prompts that begin alike are found by the `sample` tokens before each of `lengths`.
        max_bytes: of all prompts, on each side.
    """

    min_tokens: int = MIN_TOKENS
    least_shared: int = 2048
    sample: int = 32
    lengths: tuple[int, ...] = tuple(1024 * 4**power for power in range(8))
    max_bytes: int = 64 * 2**20


current_prompt_sizes: ContextVar[PromptSizes] = ContextVar("current_prompt_sizes", default=PromptSizes())  # noqa: B039


class RememberedPrompts:
    """Receiver's side: prompts that callers have named. Owned by one event loop."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = current_prompt_sizes.get().max_bytes if max_bytes is None else max_bytes
        self._prompts: OrderedDict[tuple[bytes, int], array[int]] = OrderedDict()
        self.num_bytes = 0

    def whole(self, call: C) -> C:
        """Returns the call with its whole prompt; a named prompt is stored.

        Raises:
            UnknownPromptError: the prompt it refers to is not kept (any more).
            InvalidRequestError: it has no prompt, or a name that is none.
        """
        named, prompt = call.told, _prompt_of(call)
        if named is not None and len(named.keeper) != _CALLER_KEY_BYTES:
            raise InvalidRequestError(f"told.keeper has {len(named.keeper)} bytes; {_CALLER_KEY_BYTES} are needed")
        if named is not None and named.known is not None:
            prompt = self._grown(named, named.known)
        if not prompt:
            raise InvalidRequestError("the prompt has 0 token ids; at least 1 is needed")
        if named is None:
            return call
        self._keep((named.keeper, named.keep_as), packed(prompt))
        return _with_prompt(call, prompt, None)

    def _grown(self, named: NamedPrompt, known: int) -> "array[int]":
        kept = self._prompts.get((named.keeper, known))
        if kept is None or len(kept) < named.num_known:
            raise UnknownPromptError("the prompt that this call goes on from is not kept here; send the whole")
        self._prompts.move_to_end((named.keeper, known))
        grown = kept[: named.num_known]
        grown.extend(packed(named.more_token_ids))
        return grown

    def _keep(self, name: tuple[bytes, int], prompt: "array[int]") -> None:
        size = _OVERHEAD_BYTES + TOKEN_BYTES * len(prompt)
        if name in self._prompts or size > self._max_bytes:
            return
        self._prompts[name] = prompt
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._prompts.popitem(last=False)
            self.num_bytes -= _OVERHEAD_BYTES + TOKEN_BYTES * len(dropped)


@dataclass(slots=True)
class _SentPrompt:
    """A prompt that was sent. `keys`: its samples; `was_received`: the receiver has answered, so it has the prompt."""

    prompt: "array[int]"
    keys: tuple[Key, ...]
    was_received: bool = False

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD_BYTES + TOKEN_BYTES * len(self.prompt)


class ReusablePrompts:
    """Caller's side: prompts that this process has sent. Shared by its clients, and owned by one event loop."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._sizes = current_prompt_sizes.get()
        self._max_bytes = self._sizes.max_bytes if max_bytes is None else max_bytes
        self._numbers = count(1)
        self._sent: OrderedDict[int, _SentPrompt] = OrderedDict()
        self._alike: dict[Key, list[int]] = {}
        self._unable: set[str] = set()
        self.num_bytes = 0

    def shortened(self, process: str, call: C, *, is_whole: bool = False) -> C:
        """Returns the call to send: with only its new tokens if the process has enough of its prompt, and named if it
        is long.

        Args:
            process: an address, with the incarnation where the call is meant for one.
            is_whole: the call must contain its whole prompt.

        NOTE: prompts of other scopes are not compared, so that no tenant's call is quicker for another's.
        """
        sizes = self._sizes
        if len(_prompt_of(call)) < sizes.min_tokens or process in self._unable:
            return call
        prompt = packed(_prompt_of(call))
        keys = tuple(
            (process, call.scope, length, prompt[length - sizes.sample : length].tobytes())
            for length in sizes.lengths
            if length <= len(prompt)
        )
        number = next(self._numbers)
        known, num_known = (None, 0) if is_whole else self._longest(keys, prompt)
        self._add(number, _SentPrompt(prompt, keys))
        named = NamedPrompt(self._caller_key, number)
        if known is None:
            return _with_prompt(call, prompt, named)
        named = replace(named, known=known, num_known=num_known, more_token_ids=prompt[num_known:])
        return _with_prompt(call, (), named)

    @cached_property
    def _caller_key(self) -> bytes:
        return random_bytes(_CALLER_KEY_BYTES)

    def note_received(self, named: NamedPrompt) -> None:
        """Records that the process has answered, so it has the prompt."""
        if (entry := self._sent.get(named.keep_as)) is not None:
            entry.was_received = True

    def note_lost(self, named: NamedPrompt) -> None:
        """Records that the process no longer has the prompt to which the call refers."""
        if named.known is not None and named.known in self._sent:
            self._drop(named.known)

    def note_unable(self, process: str) -> None:
        """Records that the process stores no prompts: it accepted a whole call after it had refused a shortened one."""
        self._unable.add(process)

    def _longest(self, keys: Sequence[Key], prompt: "array[int]") -> tuple[int | None, int]:
        """The prompt at that process that shares most first tokens with this one, and their number."""
        best: tuple[int | None, int] = (None, 0)
        for key in reversed(keys):
            for number in self._alike.get(key, ())[: -_MAX_ALIKE - 1 : -1]:
                entry = self._sent[number]
                shared = min(_num_shared(entry.prompt, prompt), len(prompt) - 1) if entry.was_received else 0
                if shared >= self._sizes.least_shared and shared > best[1]:
                    best = number, shared
                if shared == len(entry.prompt):  # NOTE: the latest turn, of which earlier ones are beginnings
                    break
            if best[0] is not None:
                self._sent.move_to_end(best[0])
                return best
        return best

    def _add(self, number: int, entry: _SentPrompt) -> None:
        self._sent[number] = entry
        self.num_bytes += entry.num_bytes
        for key in entry.keys:
            self._alike.setdefault(key, []).append(number)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._sent)))

    def _drop(self, number: int) -> None:
        entry = self._sent.pop(number)
        self.num_bytes -= entry.num_bytes
        for key in entry.keys:
            alike = self._alike[key]
            alike.remove(number)
            if not alike:
                del self._alike[key]


class PromptSender(Generic[C]):
    """Sends one call: shortened if possible, and whole if that was refused.

    Call `next` for what is to be sent, then `note_answer` or `note_error`.
    """

    def __init__(self, prompts: ReusablePrompts, process: str, call: C) -> None:
        self._prompts = prompts
        self._process = process
        self._call: C = call
        self._sent: C | None = None
        self._refusal: TandemError | None = None
        self._was_answered = False

    def next(self) -> C:
        """Returns the call to send now."""
        is_unable = isinstance(self._refusal, InvalidRequestError)
        if is_unable:
            self._sent = self._call
        else:
            is_whole = self._refusal is not None
            self._sent = self._prompts.shortened(self._process, self._call, is_whole=is_whole)
        return self._sent

    def note_answer(self) -> None:
        """Records that the process has answered; only the first call has an effect."""
        if self._was_answered:
            return
        self._was_answered = True
        if self._sent is not None and self._sent.told is not None:
            self._prompts.note_received(self._sent.told)
        if isinstance(self._refusal, InvalidRequestError):
            self._prompts.note_unable(self._process)

    def note_error(self, error: TandemError) -> None:
        """Records that the process refused the call. Raises `error` unless sending the whole call may help."""
        named = None if self._sent is None else self._sent.told
        if self._was_answered or named is None or named.known is None:
            raise error
        self._refusal = error
        if isinstance(error, UnknownPromptError):
            self._prompts.note_lost(named)


def _prompt_of(call: PairCall | ComputeCall) -> Sequence[int]:
    return call.token_ids if isinstance(call, PairCall) else call.prompt_token_ids


def _with_prompt(call: C, prompt: Sequence[int], named: NamedPrompt | None) -> C:
    if isinstance(call, PairCall):
        return replace(call, token_ids=prompt, told=named)
    return replace(call, prompt_token_ids=prompt, told=named)


def _num_shared(first: "array[int]", second: "array[int]") -> int:
    """Number of equal first tokens.

    NOTE: a gateway has no NumPy, and bytes are compared faster than numbers. Copies of whole prompts would be new pages
    each time, which take ten times as long as comparing.
    """
    views = memoryview(first), memoryview(second)

    def is_equal(start: int, end: int) -> bool:
        mine, other = (view[start:end].tobytes() for view in views)
        return mine == other

    least = min(len(first), len(second))
    equal = next(
        (start for start in range(0, least, _COMPARED) if not is_equal(start, min(start + _COMPARED, least))), least
    )
    differ = min(equal + _COMPARED, least + 1)  # the first `equal` tokens are, the first `differ` are not
    while differ - equal > 1:
        middle = (equal + differ) // 2
        equal, differ = (middle, differ) if is_equal(equal, middle) else (equal, middle)
    return equal
