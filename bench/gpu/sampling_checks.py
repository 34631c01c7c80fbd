"""The sampler and grammar masks on the device, beside the same on the CPU.

Greedy choices must be equal, ties included. Draws may differ where a uniform number falls into the rounding of a
parallel sum, which is one in thousands.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from bench.gpu.results import Check, SectionResults
from bench.gpu.setting import Setting
from tandem.core.sampling_params import SamplingParams
from tandem.engine.bitmask import ban_by_bits
from tandem.engine.constraint import Mask
from tandem.engine.logits import SamplingState
from tandem.engine.masks import MaskMaker
from tandem.engine.sampler import Sampler

VOCAB, ROWS = 151936, 64
LEAST_EQUAL = 0.98
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain draw": {},
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 40, "temperature": 0.7},
    "top-p": {"top_p": 0.9},
    "top-k, top-p, min-p": {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias and bans": {"temperature": 0.0, "logit_bias": {7: 9.0}, "bad_words": ((11,), (3, 12)), "min_tokens": 2},
    "allowed tokens": {"allowed_token_ids": tuple(range(5, 500, 7))},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


def run(setting: Setting, results: SectionResults) -> None:
    """Every way to choose, a mixed batch of them all, and masks."""
    for name, options in CASES.items():
        with results.guarded(f"sampler, {name}"):
            results.check(check_sampler(setting, name, [options]))
    with results.guarded("sampler, mixed"):
        results.check(check_sampler(setting, "all in one batch", list(CASES.values())))
    with results.guarded("grammar masks"):
        results.check(check_masks(setting))


@torch.inference_mode()
def check_sampler(setting: Setting, name: str, options: Sequence[dict[str, Any]]) -> Check:
    """The same logits and seeds on both; row i has the i-th options in turn."""
    vocab, rows = setting.pick(VOCAB, 3000), setting.pick(ROWS, 20)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2)) * 3
    logits[:, vocab - 9] = logits[:, 17] = logits.amax(-1)  # ties, whose lower id wins
    chosen = [
        Sampler(rows_together=together).sample(logits.to(device), _states(options, rows, vocab))
        for device, together in ((torch.device("cpu"), False), (setting.device, True))
    ]
    equal = [a.token_id == b.token_id and a.error == b.error for a, b in zip(*chosen, strict=True)]
    drift = max((abs(a.logprobs.logprob - b.logprobs.logprob) for a, b in zip(*chosen, strict=True)
                 if a.logprobs is not None and b.logprobs is not None), default=0.0)  # fmt: skip
    is_greedy = all(option.get("temperature") == 0.0 for option in options)
    passed = sum(equal) >= (1.0 if is_greedy else LEAST_EQUAL) * rows and drift < 1e-4
    return Check(f"sampler, {name}", f"{rows} x {vocab}", passed, f"{sum(equal)} of {rows} equal, drift {drift:.0e}")


def _states(options: Sequence[dict[str, Any]], rows: int, vocab: int) -> list[SamplingState]:
    history = [5, 9, 3, 17, 17]
    return [
        SamplingState(SamplingParams(**options[row % len(options)]), row, history, [9, 3][: row % 3], [2], vocab)
        for row in range(rows)
    ]


class _RandomGrammars:
    """Stands in for compiled grammars: each row's bits are random."""

    def __init__(self, vocab: int) -> None:
        self.end_bit = vocab
        self.mask_bytes = (vocab // 32 + 1) * 4
        self.written = np.zeros((0, 0), dtype=np.uint32)

    def fill_masks(self, matchers: Sequence[tuple[object, int]], address: int, num_rows: int) -> None:
        self.written = np.random.default_rng(4).integers(0, 2**32, (num_rows, self.mask_bytes // 4), dtype=np.uint32)
        ctypes.memmove(address, self.written.ctypes.data, self.written.nbytes)


class _Waiting:
    """Stands in for a constraint that wants a mask."""

    error = None
    mask: Mask | None = None

    def advance(self, grammars: object) -> "_Waiting":
        return self

    def take(self, mask: Mask) -> None:
        self.mask = mask


def check_masks(setting: Setting) -> Check:
    """Bits made on the mask maker's thread and copied while the device is busy ban what they ban on the CPU."""
    vocab, rows, device = setting.pick(VOCAB, 3001), setting.pick(ROWS, 5), setting.device
    grammars, waiting = _RandomGrammars(vocab), [_Waiting() for _ in range(rows)]
    maker = MaskMaker(cast(Any, grammars), vocab, device)
    size = setting.pick(8192, 64)
    busy = torch.randn(size, size, device=device)
    try:
        for _ in range(4):
            busy = busy @ busy * 1e-3
        maker.start(cast(Any, waiting))
        maker.finish()
    finally:
        maker.close()
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5))
    same = True
    for index, one in enumerate(waiting):
        ours, theirs = logits[index].clone().to(device), logits[index].clone()
        assert one.mask is not None
        one.mask.ban(ours)
        ban_by_bits(grammars.written[index].view(np.uint8)[: -(-vocab // 8)], theirs)
        same &= torch.equal(ours.cpu(), theirs)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("tandem-masks")]
    detail = "as on the CPU" if same else "DIFFERS"
    return Check("grammar masks", f"{rows} x {vocab}", same and not threads, detail)
