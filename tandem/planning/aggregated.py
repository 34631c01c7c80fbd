"""Sizing of aggregated serving, the alternative to two pools: workers that prefill and decode. Pure.

Chunks of prompts and decode steps share the worker's time: a chunk lengthens the step it is part of, decoding gets the
time that prompts leave, and a token whose step carries a chunk waits for all of it. No KV moves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem.planning.decode_batch import DecodeBatch
from tandem.planning.feasibility import misfits, tpot_problem, ttft_problem
from tandem.planning.needs import Need, Needs, largest_need
from tandem.planning.prefill_queue import PrefillQueue, prompt_queue
from tandem.planning.profile import Profile
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import Goals, PredictedLatency, SizedPool, Sizing


def size_aggregated(roofline: Roofline, profile: Profile, goals: Goals, rate_per_s: float) -> Sizing:
    """Fewest aggregated workers that meet the objectives; if none can, enough to sustain the load, and the reason."""
    return AggregatedSizing(roofline, profile, goals, rate_per_s).sizing()


@dataclass(frozen=True)
class AggregatedSizing:
    """Sizing of one kind of worker at one request rate."""

    roofline: Roofline
    profile: Profile
    goals: Goals
    rate_per_s: float

    def sizing(self) -> Sizing:
        ttft_problems, tpot_problems = self._problems
        num, limit, unmet = largest_need(self._needs())
        running, queue = self._batch(num).running(), self._queue(num)
        return Sizing(
            rate_per_s=self.rate_per_s,
            prefill=self._pool(num, limit),
            decode=None,
            ttft=PredictedLatency(mean_ms=queue.mean_ttft_ms(num), high_ms=queue.ttft_at(num, self.goals.share)),
            tpot=PredictedLatency(mean_ms=self._batch(num).step_ms(running), high_ms=self._tpot_ms(num)),
            num_running=running,
            longest_gap_ms=self._gap_ms(num),
            problems=list(dict.fromkeys([*ttft_problems, *tpot_problems, *unmet])),
        )

    @cached_property
    def _problems(self) -> tuple[Sequence[str], Sequence[str]]:
        """(Problems of TTFT, problems of TPOT) that no number of workers can solve."""
        fit = misfits(self.roofline, self.profile, "a worker")
        return (
            fit or ttft_problem(self._prompts, self.profile, self.goals, "workers"),
            fit or tpot_problem(self.roofline, self.profile, self.goals, "workers"),
        )

    def _needs(self) -> Needs:
        goals = self.goals
        needs: dict[str, Need] = {
            "prompt and token work": lambda num: self._queue(num).offered <= goals.max_use * num,
            "requests at once": lambda num: self._crowd(num) <= goals.max_running,
        }
        if self.roofline.kv_memory_bytes > 0:
            needs["KV memory"] = lambda num: self._kv_use(num) <= goals.max_use
        if not self._problems[0]:
            needs["TTFT"] = lambda num: self._queue(num).attainment(num, goals.ttft_ms) >= goals.share
        if not self._problems[1]:
            needs["TPOT"] = lambda num: self._tpot_ms(num) <= goals.tpot_ms
        return needs

    def _pool(self, num: int, limit: str) -> SizedPool:
        num_accelerators = num * self.roofline.num_accelerators
        return SizedPool(
            num_workers=num,
            num_accelerators=num_accelerators,
            limit=limit,
            time_use=self._queue(num).offered / num,
            kv_use=self._kv_use(num),
            link_use=0.0,
            usd_per_hour=num_accelerators * self.roofline.hardware.usd_per_hour,
        )

    @cached_property
    def _prompts(self) -> PrefillQueue:
        """Queue of prompts without any decoding."""
        return prompt_queue(self.roofline, self.profile, self.rate_per_s, self.goals.chunk_tokens)

    def _queue(self, num: int) -> PrefillQueue:
        """Queue of prompts each of whose chunks includes a decode step of the mean batch."""
        batch = self._batch(num)
        running = batch.running()
        along_ms = math.inf if math.isinf(running) else batch.along_ms(running)
        return self._prompts.slowed(along_ms)

    def _batch(self, num: int) -> DecodeBatch:
        """Decode batch that runs both together with chunks of prompts and in the time these leave."""
        prompts, goals = self._prompts, self.goals
        busy, chunk_ms = prompts.offered / num, prompts.service_ms / prompts.mean_chunks
        return DecodeBatch(self.roofline, self.profile, self.rate_per_s, num, goals.share, busy, chunk_ms)

    def _crowd(self, num: int) -> float:
        batch = self._batch(num)
        return batch.crowd(batch.running())

    def _tpot_ms(self, num: int) -> float:
        return self._batch(num).step_ms(max(1.0, self._crowd(num)))

    def _kv_use(self, num: int) -> float:
        promised = self.rate_per_s / num * self._queue(num).service_ms / 1000
        return self._batch(num).kv_use(self._crowd(num), promised)

    def _gap_ms(self, num: int) -> float:
        """Time between two tokens if the step includes the last full chunk of a long prompt."""
        prompt, crowd = self.profile.prompt_at(self.goals.share), self._crowd(num)
        computed = max(self.profile.cached(prompt), prompt - self.goals.chunk_tokens)
        chunk_ms = self.roofline.prefill_ms(prompt, computed)
        return math.inf if math.isinf(crowd) else chunk_ms + self._batch(num).along_ms(crowd)
