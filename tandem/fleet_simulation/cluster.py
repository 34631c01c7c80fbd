"""Simulated cluster: the router's real decisions, workers modelled by their speed, and a scaling policy.

`routing.pairing` refuses each request of a trace or assigns workers, which prefill it, hand its KV over and decode it;
a decode worker may also do it all. The policy plans, and workers report to the router, at intervals. Not modelled:
decode workers' own prefix caches, contention of links, failures, and a request's move to another worker when its own
drains (it is finished there instead).
"""

from collections.abc import Iterable
from functools import partial

from tandem.fleet_simulation.decode_worker import DecodeWorker
from tandem.fleet_simulation.events import EventQueue
from tandem.fleet_simulation.observer import SimulatedObserver
from tandem.fleet_simulation.prefill_worker import PrefillWorker
from tandem.fleet_simulation.replicas import ReplicaPool, SimulatedReplica
from tandem.fleet_simulation.reports import decode_report, prefill_report
from tandem.fleet_simulation.request import SimulatedRequest
from tandem.fleet_simulation.result import PoolSizes, SimulationResult
from tandem.fleet_simulation.setting import SimulationSetting
from tandem.planning.observation import ScalingPolicy
from tandem.routing.admission import Refusal
from tandem.routing.candidates import num_blocks_of
from tandem.routing.fleet import Fleet
from tandem.routing.pairing import Pairer, Pairing
from tandem.routing.policies import PredictedCost
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Links, RequestShape
from tandem.workload.trace import TraceRequest

_EXPECTED_OUTPUT = 256  # tokens of an answer, until some have ended


class Cluster:
    """One run of a fleet with this setting, whose pools the policy scales; call `run` once."""

    def __init__(self, setting: SimulationSetting, policy: ScalingPolicy) -> None:
        self._setting = setting
        self._policy = policy
        self._events = EventQueue()
        speeds = {"prefill": setting.prefill, "decode": setting.decode}
        self._pairer = Pairer(Fleet(setting.limits, Links(setting.link), speeds.__getitem__), PredictedCost())
        self._prefill = ReplicaPool(
            "p", self._events, setting.startup_s, self._make_prefill, lambda w: w.num_running, self._prefill_changed
        )
        self._decode = ReplicaPool(
            "d", self._events, setting.startup_s, self._make_decode, lambda w: w.num_accepted, self._decode_changed
        )
        self._observer = SimulatedObserver(setting, self._prefill, self._decode)
        self._wanted = (setting.num_prefill, setting.num_decode)
        self._requests: list[SimulatedRequest] = []
        self._sizes: list[PoolSizes] = []
        self._reasons: list[tuple[float, str]] = []
        self._output_tokens = self._num_outputs = 0
        self._num_open = 0
        self._num_changes = 0
        self._coming = True

    def run(self, trace: Iterable[TraceRequest]) -> SimulationResult:
        """Replay a trace until its last request has ended. Arrivals must be in order."""
        for _ in range(self._setting.num_prefill):
            self._prefill.start(0.0)
        for _ in range(self._setting.num_decode):
            self._decode.start(0.0)
        arrivals = iter(trace)
        self._events.at(0.0, partial(self._next_arrival, arrivals, None))
        self._events.at(self._setting.report_s, self._report_all)
        self._events.at(self._setting.interval_s, self._plan)
        self._events.run()
        return SimulationResult(
            served=[request.served() for request in self._requests],
            sizes=self._sizes,
            duration_s=self._events.now_s,
            prefill_accelerator_s=self._prefill.replica_s() * self._setting.prefill_accelerators,
            decode_accelerator_s=self._decode.replica_s() * self._setting.decode_accelerators,
            num_changes=self._num_changes,
            reasons=self._reasons,
        )

    @property
    def _over(self) -> bool:
        return not self._coming and self._num_open == 0

    def _next_arrival(self, arrivals: Iterable[TraceRequest], recorded: TraceRequest | None) -> None:
        if recorded is not None:
            self._arrive(recorded)
        following = next(iter(arrivals), None)
        self._coming = following is not None
        if following is not None:
            self._events.at(following.arrival_s, partial(self._next_arrival, arrivals, following))

    def _arrive(self, recorded: TraceRequest) -> None:
        request = SimulatedRequest(str(len(self._requests)), recorded, self._shape(recorded))
        self._requests.append(request)
        answer = self._pairer.pair(request.shape, self._events.now_s)
        if isinstance(answer, Refusal):
            request.rejected = True
            self._observer.arrived(request, 0)
            return
        self._num_open += 1
        self._observer.arrived(request, self._num_cached_tokens(request, answer))
        self._serve(request, answer)

    def _shape(self, recorded: TraceRequest) -> RequestShape:
        leading = {}
        if recorded.block_ids:
            for replica_id, replica in self._prefill.alive.items():
                if replica.ready and (num := replica.worker.cache.leading(recorded.block_ids)):
                    leading[replica_id] = num
        return RequestShape(
            request_id=str(len(self._requests)),
            num_tokens=recorded.num_prompt_tokens,
            num_expected_output=max(1, self._output_tokens // self._num_outputs)
            if self._num_outputs
            else _EXPECTED_OUTPUT,
            leading_blocks=leading,
        )

    def _num_cached_tokens(self, request: SimulatedRequest, answer: Pairing) -> int:
        """Number of the prompt's tokens that are cached, as known to the router when it decides."""
        source_id = answer.fetch_from_id or answer.prefill_id
        num_held = request.shape.leading_blocks.get(source_id, 0) if source_id is not None else 0
        block_size = self._setting.block_size
        return min(num_held, (request.recorded.num_prompt_tokens - 1) // block_size) * block_size

    def _serve(self, request: SimulatedRequest, answer: Pairing) -> None:
        decode = self._decode.alive[answer.decode_id].worker
        num_tokens = request.recorded.num_prompt_tokens + request.recorded.num_output_tokens
        request.num_reserved_blocks = num_blocks_of(num_tokens, self._setting.block_size)
        decode.accept(request, awaits_kv=answer.prefill_id is not None)
        if answer.prefill_id is None:
            prefill_s = self._setting.decode.prefill.prompt_ms(request.recorded.num_prompt_tokens, 0) / 1000
            decode.prefill(request, prefill_s, partial(self._began, decode, awaited_kv=False))
            return
        prefill = self._prefill.alive[answer.prefill_id].worker
        num_fetched, fetched_s = self._fetch(request, prefill, answer)
        prefill.prefill(request, partial(self._prefilled, prefill, decode), num_fetched, fetched_s)

    def _fetch(self, request: SimulatedRequest, prefill: PrefillWorker, answer: Pairing) -> tuple[int, float]:
        """Returns (number of leading blocks at the peer that sends them, time of their arrival)."""
        if answer.fetch_from_id is None:
            return 0, 0.0
        num_held = request.shape.leading_blocks[answer.fetch_from_id]
        num_bytes = (num_held - prefill.cache.leading(request.recorded.block_ids)) * self._setting.block_bytes
        return num_held, self._events.now_s + self._setting.link.ms(max(0, num_bytes)) / 1000

    def _prefilled(
        self, prefill: PrefillWorker, decode: DecodeWorker, request: SimulatedRequest, service_s: float
    ) -> None:
        """Delivers the first token at once. The prefill worker stays busy until the rest of the KV was sent."""
        request.first_token_s = self._events.now_s
        prefill.num_pulls += 1
        exposed_s = self._exposed_s(request.recorded.num_prompt_tokens, service_s)
        self._events.at(self._events.now_s + exposed_s, partial(self._handed_over, prefill, decode, request))

    def _exposed_s(self, num_tokens: int, service_s: float) -> float:
        """Time of the hand-off after prefill: that of the last chunk, or more if the link is slower than prefill."""
        setting, link = self._setting, self._setting.link
        num_last = num_blocks_of(min(num_tokens, setting.chunk_tokens), setting.block_size)
        all_ms = link.ms(num_blocks_of(num_tokens, setting.block_size) * setting.block_bytes)
        return max(link.ms(num_last * setting.block_bytes), all_ms - 1000 * service_s) / 1000

    def _handed_over(self, prefill: PrefillWorker, decode: DecodeWorker, request: SimulatedRequest) -> None:
        prefill.num_pulls -= 1
        self._began(decode, request, awaited_kv=True)

    def _began(self, decode: DecodeWorker, request: SimulatedRequest, awaited_kv: bool) -> None:
        if request.first_token_s is None:
            request.first_token_s = self._events.now_s
        self._observer.began(request)
        decode.join(request, awaited_kv)

    def _ended(self, request: SimulatedRequest) -> None:
        request.finished_s = self._events.now_s
        self._output_tokens += request.recorded.num_output_tokens
        self._num_outputs += 1
        self._num_open -= 1
        self._observer.ended(request)
        self._pairer.settle(Settlement(request_id=request.request_id))

    def _plan(self) -> None:
        observation = self._observer.observe(self._events.now_s, self._wanted)
        plan = self._policy.plan(observation)
        wanted = (plan.num_prefill, plan.num_decode)
        if wanted != self._wanted:
            self._num_changes += (wanted[0] != self._wanted[0]) + (wanted[1] != self._wanted[1])
            self._reasons.append((self._events.now_s, plan.reason))
            self._wanted = wanted
        self._prefill.scale(wanted[0])
        self._decode.scale(wanted[1])
        self._sizes.append(self._size())
        if not self._over:
            self._events.at(self._events.now_s + self._setting.interval_s, self._plan)

    def _size(self) -> PoolSizes:
        return PoolSizes(
            at_s=self._events.now_s,
            prefill_wanted=self._wanted[0],
            prefill_ready=len(self._prefill.ready()),
            prefill_alive=len(self._prefill.alive),
            decode_wanted=self._wanted[1],
            decode_ready=len(self._decode.ready()),
            decode_alive=len(self._decode.alive),
        )

    def _report_all(self) -> None:
        """Reports every worker to the router, and removes replicas that have drained."""
        self._prefill.sweep()
        self._decode.sweep()
        for prefill in self._prefill.alive.values():
            if prefill.ready:
                self._prefill_changed(prefill)
        for decode in self._decode.alive.values():
            if decode.ready:
                self._decode_changed(decode)
        if not self._over:
            self._events.at(self._events.now_s + self._setting.report_s, self._report_all)

    def _make_prefill(self) -> PrefillWorker:
        setting = self._setting
        num_blocks = setting.prefill_kv_tokens // setting.block_size
        return PrefillWorker(self._events, setting.prefill.prefill, num_blocks, setting.block_size)

    def _make_decode(self) -> DecodeWorker:
        setting = self._setting
        num_blocks = setting.decode_kv_tokens // setting.block_size
        return DecodeWorker(self._events, setting.decode, num_blocks, setting.max_running, self._ended)

    def _prefill_changed(self, replica: SimulatedReplica[PrefillWorker]) -> None:
        if replica.gone_s is None and replica.ready:
            self._pairer.fleet.report(prefill_report(replica, self._setting, self._events.now_s))
        else:
            self._pairer.fleet.remove(replica.replica_id)

    def _decode_changed(self, replica: SimulatedReplica[DecodeWorker]) -> None:
        if replica.gone_s is None and replica.ready:
            self._pairer.fleet.report(decode_report(replica, self._setting, self._events.now_s))
        else:
            self._pairer.fleet.remove(replica.replica_id)
