"""Prompts sent to workers recently, whose blocks these workers will hold before the index knows.

Without it, a prefix requested again at once may be sent to a worker that computes it a second time. Entries expire
after `window_s`, when the index is up to date; they are guesses: if the worker lacks the blocks, the request is only
slower. Owned by one event loop.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Sent:
    hashes: Sequence[bytes]
    worker_ids: Sequence[str]
    sent_at_s: float
    ends: Sequence[int] | None


class SentPrompts:
    """Remembers the latest `max_prompts` of the last `window_s` seconds."""

    def __init__(self, *, window_s: float = 2.0, max_prompts: int = 64) -> None:
        self._window_s = window_s
        self._max_prompts = max_prompts
        self._sent: OrderedDict[str, _Sent] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def sent(
        self,
        key: str,
        hashes: Sequence[bytes],
        worker_ids: Sequence[str],
        now_s: float,
        ends: Sequence[int] | None = None,
    ) -> None:
        """Record that a request's prompt (`RequestShape.key`) with these block hashes goes to these workers, instead
        of those recorded before. `ends`: the numbers of leading blocks after which others can go on; None: after each.
        """
        self.forget(key)
        if hashes:
            self._sent[key] = _Sent(hashes, worker_ids, now_s, ends)
        if len(self._sent) > self._max_prompts:
            self._sent.popitem(last=False)

    def forget(self, key: str) -> None:
        """Remove a request whose prompt was not computed, or will be computed elsewhere."""
        self._sent.pop(key, None)

    def credit(self, hashes: Sequence[bytes], leading: Mapping[str, int], now_s: float) -> Mapping[str, int]:
        """Returns `leading` (leading blocks that each worker holds) raised by the prompts sent to workers."""
        self._expire(now_s)
        credited: dict[str, int] | None = None
        for sent in self._sent.values():
            num_common = _num_common(hashes, sent.hashes)
            if sent.ends is not None:
                num_common = max((end for end in sent.ends if end <= num_common), default=0)
            if not num_common:
                continue
            credited = dict(leading) if credited is None else credited
            for worker_id in sent.worker_ids:
                credited[worker_id] = max(num_common, credited.get(worker_id, 0))
        return leading if credited is None else credited

    def _expire(self, now_s: float) -> None:
        while self._sent and next(iter(self._sent.values())).sent_at_s < now_s - self._window_s:
            self._sent.popitem(last=False)


def _num_common(ours: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """Number of leading blocks that two chains share; chained hashes are equal exactly if everything before is."""
    most = min(len(ours), len(theirs))
    if not most or ours[0] != theirs[0]:
        return 0
    least = 1
    while least < most:
        middle = (least + most + 1) // 2
        if ours[middle - 1] == theirs[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least
