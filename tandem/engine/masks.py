"""Makes the masks of answers held to a grammar, on a thread of its own, while the model computes their logits.

A mask has one bit a token: whether the grammar allows it next. One job a step: `start` before the model runs, `finish`
after it. Each answer has a *matcher* of its own, which follows it through its grammar. Only this thread moves matchers,
so a mask depends on its answer's grammar and tokens alone.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tandem.core.errors import TandemError
from tandem.engine.bitmask import ban_by_bits, ban_by_flags, banned_on_device
from tandem.engine.constraint import Constraint, Mask
from tandem.text.grammars import GrammarMatcher, Grammars

IntArray = npt.NDArray[np.int32]
_NO_MATCH = "the answer so far does not match its grammar"


class MaskMaker:
    """Makes the masks of one engine's answers.

    Args:
        grammars: compiles grammars and makes their matchers.
        vocab_size: width of the logits.
        device: where the logits are.

    `waited_s`: for how long `finish` has waited, in all.
    """

    def __init__(self, grammars: Grammars, vocab_size: int, device: torch.device) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tandem-masks")
        self._job: Future[list[Mask]] | None = None
        self._waiting: list[Constraint] = []
        self.waited_s = 0.0

    def start(self, constraints: Sequence[Constraint]) -> None:
        """Start making the masks for the next tokens of these answers; returns at once. Call `finish` afterwards."""
        assert self._job is None, "the masks of the step before were not taken"
        if constraints:
            self._waiting = list(constraints)
            self._job = self._thread.submit(self._make, self._waiting)

    def finish(self) -> None:
        """Wait for the masks of the last `start` and hand each to its constraint. Does nothing if there are none. If a
        matcher failed, the mask of its answer has an error and allows no token; the others are unaffected.
        """
        if self._job is None:
            return
        started_s = time.perf_counter()
        job, self._job = self._job, None
        masks = job.result()
        self.waited_s += time.perf_counter() - started_s
        for constraint, mask in zip(self._waiting, masks, strict=True):
            constraint.take(mask)
        self._waiting = []

    def close(self) -> None:
        """End the thread; `start` must not be called afterwards."""
        self._thread.shutdown()

    @torch.inference_mode()
    def _make(self, constraints: Sequence[Constraint]) -> list[Mask]:
        matchers, errors = self._advance(constraints)
        num_words = self._grammars.mask_bytes // 4
        rows = torch.zeros(len(constraints), num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        if matchers:
            self._grammars.fill_masks(matchers, rows.data_ptr(), len(constraints))
        for matcher, index in matchers:
            errors[index] = matcher.error
            if matcher.error is not None:
                rows[index] = 0
        ends = self._take_ends(rows.numpy())
        allows = np.any(rows.numpy() != 0, axis=1)
        return [
            Mask(ban, may_end, may_end and not allowed, error)
            for ban, may_end, allowed, error in zip(self._bans(rows), ends, allows.tolist(), errors, strict=True)
        ]

    def _advance(self, constraints: Sequence[Constraint]) -> tuple[list[tuple[GrammarMatcher, int]], list[str | None]]:
        """The matchers that can continue, each with its row, and for each other row the error."""
        matchers: list[tuple[GrammarMatcher, int]] = []
        errors: list[str | None] = [None] * len(constraints)
        for index, constraint in enumerate(constraints):
            try:
                matcher = constraint.advance(self._grammars)
            except TandemError as error:
                errors[index] = str(error)
                continue
            if matcher is None:
                errors[index] = _NO_MATCH
            else:
                matchers.append((matcher, index))
        return matchers, errors

    def _take_ends(self, rows: IntArray) -> list[bool]:
        """Read and clear the bit that says whether an answer may end. `rows`: [num_rows, num_words]."""
        word, bit = divmod(self._grammars.end_bit, 32)
        ends: list[bool] = ((rows[:, word] >> bit) & 1).astype(bool).tolist()
        rows[:, word] &= (1 << bit) - 1  # NOTE: it is the last bit that has a meaning
        return ends

    def _bans(self, rows: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
        """Functions that apply each mask in `rows` to a row of logits."""
        if self._device.type == "cpu":
            return [partial(ban_by_bits, bits) for bits in rows.numpy().view(np.uint8)]
        banned = banned_on_device(rows.to(self._device, non_blocking=True), self._vocab_size)
        return [partial(ban_by_flags, flags) for flags in banned]
