"""Answers prompts that come as lines of JSON, one after the other, and says how long the tokens took.

For engines that are measured without a server. What an engine prints goes to the standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

READY = "ready"


class Voice(Protocol):
    """An engine that answers one request at a time."""

    def answer(self, prompt: list[int], num_output: int) -> Iterator[Sequence[int]]:
        """Yield `num_output` greedy tokens as they come."""
        ...


def speak(make: Callable[[], Voice]) -> None:
    """Answer until the input ends. Timed is what comes behind the first tokens."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    voice = make()
    print(READY, file=channel)
    for line in sys.stdin:
        asked = json.loads(line)
        token_ids: list[int] = []
        num_early, began_s = 0, 0.0
        for new in voice.answer(asked["prompt"], asked["num_output"]):
            token_ids += new
            if not num_early:
                num_early, began_s = len(token_ids), time.perf_counter()
        seconds = time.perf_counter() - began_s
        told = {"token_ids": token_ids, "num_timed": len(token_ids) - num_early, "seconds": seconds}
        print(json.dumps(told), file=channel)
