"""Simulated model: KV is a hash of the prefix and tokens are hashes of the KV, so any wrong byte changes the output.

A position's KV is 16 bytes: BLAKE2b of the owner's name, the KV before it and its token. Ranks divide them as keys and
values of four heads. A token is chosen from the KV of every earlier position. `answer_of` is what a request must get,
computed from its tokens alone.
"""

import hashlib
from collections.abc import Sequence

from tandem.architecture.state import KVSpec

KV_BYTES = 16  # of a position
VOCAB_SIZE = 259  # the bytes, and three special tokens
EOS_TOKEN_ID = 258
MODEL = "simulated"
FINGERPRINT = "5" * 32
_FIRST_LETTER, _NUM_LETTERS = 64, 26
_EOS_SHARE = 40  # one token of so many

KV_SPEC = KVSpec(num_kv_heads=4, head_dim=1, dtype="float16", window=None)


def first_state(owner: str) -> bytes:
    """State before a prompt's first token, derived from the owner's name."""
    return hashlib.blake2b(owner.encode(), digest_size=KV_BYTES).digest()


def next_state(state: bytes, token_id: int) -> bytes:
    """The KV of a token, given the state before it."""
    return hashlib.blake2b(state + token_id.to_bytes(4, "little"), digest_size=KV_BYTES).digest()


def token_after(states: bytes, seed: int | None) -> int:
    """The token chosen after these states, the KV of all positions so far; `seed`: None = greedy."""
    key = b"greedy" if seed is None else seed.to_bytes(16, "little", signed=True)
    number = int.from_bytes(hashlib.blake2b(states, key=key, digest_size=8).digest(), "little")
    return EOS_TOKEN_ID if number % _EOS_SHARE == 0 else _FIRST_LETTER + number // _EOS_SHARE % _NUM_LETTERS


def answer_of(owner: str, prompt: Sequence[int], max_tokens: int, *, seed: int | None, ignore_eos: bool) -> list[int]:
    """The expected tokens of a request."""
    state, states, tokens = first_state(owner), bytearray(), list[int]()
    for token_id in prompt:
        state = next_state(state, token_id)
        states += state
    while len(tokens) < max_tokens:
        tokens.append(token_after(bytes(states), seed))
        if tokens[-1] == EOS_TOKEN_ID and not ignore_eos:
            break
        state = next_state(state, tokens[-1])
        states += state
    return tokens
