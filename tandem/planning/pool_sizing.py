"""Sizing of prefill and decode pools for a workload: the fewest workers that meet the objectives, or why none can.

Predicts the steady state of random arrivals; the planner follows a changing load. Every requirement of a pool is a
named need, so that the result names the one that determines its size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem.planning.decode_batch import DecodeBatch
from tandem.planning.feasibility import misfits, tpot_problem, ttft_problem
from tandem.planning.needs import Need, Needs, largest_need
from tandem.planning.prefill_queue import PrefillQueue, prompt_queue
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import DeploymentSite, PredictedLatency, SizedPool, Sizing


def size_pools(site: DeploymentSite, rate_per_s: float) -> Sizing:
    """Fewest workers of each pool; if an objective cannot be met, enough to sustain the load, and the reason."""
    return PoolSizing(site, rate_per_s).sizing()


@dataclass(frozen=True)
class PoolSizing:
    """Sizing of one site at one request rate."""

    site: DeploymentSite
    rate_per_s: float

    def sizing(self) -> Sizing:
        num_prefill, prefill_limit, unmet = largest_need(self._prefill_needs())
        num_decode, decode_limit, unmet_too = largest_need(self._decode_needs())
        share, batch = self.site.goals.share, self._batch(num_decode)
        running = batch.running()
        crowd = batch.crowd(running)
        return Sizing(
            rate_per_s=self.rate_per_s,
            prefill=self._pool(
                self.site.prefill,
                num_prefill,
                prefill_limit,
                time_use=self._queue.offered / num_prefill,
                kv_use=None,
            ),
            decode=self._pool(
                self.site.decode, num_decode, decode_limit, time_use=None, kv_use=self._kv_use(num_decode)
            ),
            ttft=PredictedLatency(
                mean_ms=self._queue.mean_ttft_ms(num_prefill), high_ms=self._queue.ttft_at(num_prefill, share)
            ),
            tpot=PredictedLatency(mean_ms=batch.step_ms(running) + self._exposed_ms, high_ms=self._tpot_ms(num_decode)),
            num_running=running,
            longest_gap_ms=max(batch.step_ms(crowd), self.site.hand_off(self._long_prompt).exposed_ms),
            problems=[*self._problems[0], *self._problems[1], *unmet, *unmet_too],
        )

    @cached_property
    def _problems(self) -> tuple[Sequence[str], Sequence[str]]:
        """(Problems of prefill, problems of decode) that no number of workers can solve."""
        site = self.site
        prefill = misfits(site.prefill, site.profile, "a prefill worker")
        decode = misfits(site.decode, site.profile, "a decode worker")
        return (
            prefill or ttft_problem(self._queue, site.profile, site.goals, "prefill workers"),
            decode or tpot_problem(site.decode, site.profile, site.goals, "decode workers", self._exposed_ms),
        )

    def _prefill_needs(self) -> Needs:
        goals, queue = self.site.goals, self._queue
        needs: dict[str, Need] = {
            "prompt work": lambda num: queue.offered <= goals.max_use * num,
            "link": self._link_suffices,
        }
        if not self._problems[0]:
            needs["TTFT"] = lambda num: queue.attainment(num, goals.ttft_ms) >= goals.share
        return needs

    def _decode_needs(self) -> Needs:
        goals = self.site.goals
        needs: dict[str, Need] = {
            "token work": lambda num: math.isfinite(self._batch(num).running()),
            "requests at once": lambda num: self._crowd(num) <= goals.max_running,
            "link": self._link_suffices,
        }
        if self.site.decode.kv_memory_bytes > 0:
            needs["KV memory"] = lambda num: self._kv_use(num) <= goals.max_use
        if not self._problems[1]:
            needs["TPOT"] = lambda num: self._tpot_ms(num) <= goals.tpot_ms
        return needs

    def _pool(
        self, roofline: Roofline, num_workers: int, limit: str, *, time_use: float | None, kv_use: float | None
    ) -> SizedPool:
        num_accelerators = num_workers * roofline.num_accelerators
        return SizedPool(
            num_workers=num_workers,
            num_accelerators=num_accelerators,
            limit=limit,
            time_use=time_use,
            kv_use=kv_use,
            link_use=self._link_use(num_workers),
            usd_per_hour=num_accelerators * roofline.hardware.usd_per_hour,
        )

    @cached_property
    def _queue(self) -> PrefillQueue:
        site = self.site
        return prompt_queue(site.prefill, site.profile, self.rate_per_s, site.goals.chunk_tokens)

    @cached_property
    def _long_prompt(self) -> int:
        return self.site.profile.prompt_at(self.site.goals.share)

    @cached_property
    def _exposed_ms(self) -> float:
        """Exposed hand-off time of a long prompt per token of a mean output; in fact only its second token waits."""
        return self.site.hand_off(self._long_prompt).exposed_ms / max(1.0, self.site.profile.mean_output - 1)

    def _batch(self, num_workers: int) -> DecodeBatch:
        return DecodeBatch(self.site.decode, self.site.profile, self.rate_per_s, num_workers, self.site.goals.share)

    def _crowd(self, num_workers: int) -> float:
        batch = self._batch(num_workers)
        return batch.crowd(batch.running())

    def _tpot_ms(self, num_workers: int) -> float:
        return self._batch(num_workers).step_ms(max(1.0, self._crowd(num_workers))) + self._exposed_ms

    def _kv_use(self, num_workers: int) -> float:
        """Share of KV in use; a request's KV is reserved as soon as the computation of its prompt begins."""
        promised = self.rate_per_s / num_workers * self._queue.service_ms / 1000
        return self._batch(num_workers).kv_use(self._crowd(num_workers), promised)

    def _link_use(self, num_workers: int) -> float:
        return self.site.link_bytes_per_s(self.rate_per_s) / num_workers / self.site.link.usable_bytes_per_s

    def _link_suffices(self, num_workers: int) -> bool:
        return self._link_use(num_workers) <= self.site.goals.max_link_use
