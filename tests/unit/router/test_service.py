import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
    LocalityUnavailableError,
    NoRoomError,
    UnavailableError,
)
from tandem.core.events import BlockEvent, BlockStored
from tandem.core.hashing import extend_hashes, resume_name, root_hash
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.gateway.routers import Routers
from tandem.locality.base import LocalityStats, PublishResult
from tandem.locality.embedded import EmbeddedIndex
from tandem.process.discovery import EmbeddedDiscovery
from tandem.process.fleet_view import FleetView
from tandem.process.fleet_watch import FleetWatch
from tandem.router.metrics import RouterMetrics
from tandem.router.prefix_lookup import PrefixLookup
from tandem.router.service import RouterService
from tandem.routing.admission import AdmissionLimits
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.pairing import Pairer
from tandem.routing.policies import PredictedCost
from tandem.routing.queue_place import QueuePlace
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Links, Role
from tandem.rpc.client import ClientPool, RouterClient, client_of
from tandem.rpc.message_forms import DECISIONS
from tandem.rpc.messages import PairCall, Registration, WorkerListing
from tandem.rpc.server import serve_router
from tests.helpers.secret import AS_GATEWAY, AS_ROUTER
from tests.unit.process.stub_workers import StubWorker, eventually, model, record, serving_worker, status
from tests.unit.routing.builders import FAST, LINK, queue_of

P, D = Role.PREFILL, Role.DECODE
PROMPT = tuple(range(2000))


class AwayIndex:
    """An index that cannot be reached."""

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        raise LocalityUnavailableError("away")

    def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        raise LocalityUnavailableError("away")

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        raise LocalityUnavailableError("away")

    def replace(self, worker_id: str, epoch: int, hashes: object, sequence: int) -> PublishResult:
        raise LocalityUnavailableError("away")

    def remove_worker(self, worker_id: str) -> None:
        raise LocalityUnavailableError("away")

    def stats(self) -> LocalityStats:
        raise LocalityUnavailableError("away")


class Routing:
    """A router whose workers' statuses are given by hand."""

    def __init__(self, is_away: bool = False, limits: AdmissionLimits | None = None) -> None:
        self.clock = ManualClock(100.0)
        calibration = Calibration(FAST)
        self.fleet = Fleet(limits or AdmissionLimits(), Links(LINK), calibration.speed)
        self.view = FleetView(self.fleet, calibration, self.clock)
        self.index = EmbeddedIndex()
        self.lookup = PrefixLookup(AwayIndex() if is_away else self.index, is_remote=is_away)
        self.registry = EmbeddedDiscovery(self.clock)
        connect = partial(client_of, credentials=AS_ROUTER)
        self.watch = FleetWatch([self.registry], connect, self.view, self.lookup.remove_worker, poll_s=600.0)
        self.metrics = RouterMetrics()
        self.service = RouterService(
            self.view,
            self.watch,
            Pairer(self.fleet, PredictedCost()),
            self.lookup,
            None if is_away else self.registry,
            self.metrics,
            self.clock,
        )

    def has(self, *names: str, **state: Any) -> None:
        """Workers p0, d1, b0… by the first letter of their name."""
        roles = {"p": P, "d": D, "b": Role.BOTH}
        for name in names:
            self.view.update(f"{name}:1", status(name, roles[name[0]], **state))

    def holds(self, worker_id: str, hashes: list[bytes]) -> None:
        self.index.replace(worker_id, 1, hashes, 0)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def test_a_worker_set_aside_is_counted_as_such() -> None:
    listing = WorkerListing(status=status("d", D), age_s=0.1, is_alive=True)
    metrics = RouterMetrics()
    metrics.show_workers([listing, replace(listing, slowness=16.0)])
    for state in ("ready", "aside"):
        labels = {"role": "decode", "state": state}
        assert metrics.registry.get_sample_value("tandem_router_workers", labels) == 1


@pytest.mark.parametrize(
    ("lifecycle", "age_s", "state"),
    [
        ("starting", 0.1, "starting"),
        ("recovering", 0.1, "recovering"),
        ("draining", 0.1, "draining"),
        ("recovering", 9.0, "dead"),
        ("ready", 0.1, "dead"),
    ],
)
def test_a_worker_that_reports_and_is_given_nothing_is_not_counted_as_dead(
    lifecycle: str, age_s: float, state: str
) -> None:
    """One that replaces its ranks was."""
    metrics = RouterMetrics()
    metrics.show_workers([WorkerListing(status=status("d", D, lifecycle=lifecycle), age_s=age_s, is_alive=False)])
    labels = {"role": "decode", "state": state}
    assert metrics.registry.get_sample_value("tandem_router_workers", labels) == 1


def hashes_of(
    token_ids: Sequence[int], fingerprint: str = "weights", block_size: int = 16, scope: CacheScope = UNSCOPED
) -> list[bytes]:
    hashes: list[bytes] = []
    root = root_hash(scope, model_fingerprint=fingerprint, block_size=block_size)
    extend_hashes(root, hashes, token_ids, block_size)
    return hashes


def call(**changes: Any) -> PairCall:
    fields: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "token_ids": PROMPT,
        "num_expected_output": 100,
        "scope": UNSCOPED,
    }
    return PairCall(**{**fields, **changes})


@asynccontextmanager
async def routing(*names: str, **options: Any) -> AsyncIterator[Routing]:
    made = Routing(**options)
    made.has(*names)
    try:
        yield made
    finally:
        made.lookup.close()


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def test_it_tells_what_its_process_uses() -> None:
    async def scenario() -> None:
        async with routing("d0") as made:
            made.clock.advance(2.0)
            usage = (await made.service.describe()).usage
            assert usage is not None
            assert usage.memory_bytes > 1 << 20
            assert usage.cpu_cores is not None

    run(scenario())


def test_an_answer_says_who_where_and_what_to_expect() -> None:
    async def scenario() -> None:
        async with routing("p0", "p1", "p2", "p3", "d0") as router:
            router.holds("p1", hashes_of(PROMPT[:800]))
            router.holds("d0", hashes_of(PROMPT[:160]))
            answer = await router.service.pair(call())
            assert answer.prefill is not None
            assert (answer.prefill.worker_id, answer.prefill.address, answer.prefill.incarnation) == ("p1", "p1:1", "1")
            assert (answer.decode.worker_id, answer.decode.address) == ("d0", "d0:1")
            assert (answer.prefill_cached_blocks, answer.decode_cached_blocks) == (50, 10)
            assert len(answer.spares) == 2
            assert {spare.worker_id for spare in answer.spares} < {"p0", "p2", "p3"}
            assert set(answer.predicted_ms) == {"queue", "prefill", "fetch", "transfer", "decode", "ttft", "total"}
            assert 0 < answer.predicted_ms["ttft"] < answer.predicted_ms["total"]
            assert answer.policy == "predicted cost"
            assert answer.decision_s > 0

    run(scenario())


def test_spares_are_alive_of_the_same_pool_not_excluded_and_the_least_busy_first() -> None:
    async def scenario() -> None:
        async with routing("p0", "d0") as router:
            router.has("p1", queued=queue_of(3000))
            router.has("p2", queued=queue_of(1000))
            router.has("p3", queued=queue_of(9000))
            router.has("p4", fingerprint="other")
            router.has("p5")
            router.view.update("p6:1", status("p6", lifecycle="draining"))
            router.has("p7")
            router.view.mark_lost("p7:1")
            answer = await router.service.pair(call(excluded=("p5",)))
            assert answer.prefill is not None
            assert answer.prefill.worker_id == "p0"
            assert [spare.worker_id for spare in answer.spares] == ["p2", "p1"]

    run(scenario())


def test_a_prefix_elsewhere_is_fetched_when_that_is_cheaper() -> None:
    async def scenario() -> None:
        async with routing("p0", "d0") as router:
            router.holds("d0", hashes_of(PROMPT))
            answer = await router.service.pair(call(token_ids=PROMPT + PROMPT))
            assert answer.prefill is not None
            assert answer.fetch_from is not None
            assert (answer.fetch_from.worker_id, answer.fetch_from.address) == ("d0", "d0:1")
            assert answer.num_fetch_blocks == 125
            assert answer.prefill_cached_blocks == 0

    run(scenario())


def test_the_scope_and_the_models_version_decide_what_counts_as_cached() -> None:
    async def scenario() -> None:
        async with routing("p0", "d0") as router:
            router.holds("p0", hashes_of(PROMPT, scope=CacheScope(salt="tenant")))
            assert (await router.service.pair(call(scope=CacheScope(salt="tenant")))).prefill_cached_blocks == 124
            assert (await router.service.pair(call(scope=UNSCOPED))).prefill_cached_blocks == 0
            router.holds("p0", hashes_of(PROMPT, "other weights"))
            assert (await router.service.pair(call())).prefill_cached_blocks == 0

    run(scenario())


def test_versions_of_a_model_are_never_mixed_and_each_counts_its_own_blocks() -> None:
    async def scenario() -> None:
        async with routing() as router:
            for version, names in (("v1", ("p1", "d1")), ("v2", ("p2", "d2"))):
                router.has(*names, served=model(fingerprint=version), fingerprint=f"pool {version}")
            router.holds("p2", hashes_of(PROMPT, "v2"))
            router.holds("p1", hashes_of(PROMPT, "v2"))
            answer = await router.service.pair(call())
            assert answer.prefill is not None
            assert (answer.prefill.worker_id, answer.decode.worker_id) == ("p2", "d2")
            assert answer.spares == ()
            router.view.mark_lost("d2:1")
            answer = await router.service.pair(call())
            assert answer.prefill is not None
            assert (answer.prefill.worker_id, answer.decode.worker_id) == ("p1", "d1")
            assert answer.prefill_cached_blocks == 0

    run(scenario())


def test_other_models_workers_are_never_chosen() -> None:
    async def scenario() -> None:
        async with routing("d0") as router:
            router.has("p1", "d1", served=model("other"), fingerprint="other pool")
            for number in range(5):
                answer = await router.service.pair(call(request_id=str(number)))
                assert (answer.prefill, answer.decode.worker_id) == (None, "d0")

    run(scenario())


def test_without_prefill_workers_decode_computes_prompts_of_any_length() -> None:
    async def scenario() -> None:
        async with routing("d0", "p0", limits=AdmissionLimits(max_local_tokens=0)) as router:
            assert (await router.service.pair(call())).prefill is not None
            router.view.mark_lost("p0:1")
            answer = await router.service.pair(call())
            assert (answer.prefill, answer.spares, answer.decode.worker_id) == (None, (), "d0")

    run(scenario())


def test_local_prefill_is_obeyed_whatever_it_costs() -> None:
    async def scenario() -> None:
        async with routing("p0", "p1", "d0", limits=AdmissionLimits(max_local_tokens=0)) as router:
            router.holds("p0", hashes_of(PROMPT))
            answer = await router.service.pair(call(local_prefill=True))
            assert (answer.prefill, answer.fetch_from, answer.spares) == (None, None, ())
            assert answer.decode.worker_id == "d0"

    run(scenario())


def test_the_excluded_get_nothing() -> None:
    async def scenario() -> None:
        async with routing("p0", "p1", "d0", "d1") as router:
            answer = await router.service.pair(call(excluded=("p0", "d1")))
            assert answer.prefill is not None
            assert (answer.prefill.worker_id, answer.decode.worker_id, answer.spares) == ("p1", "d0", ())
            with pytest.raises(UnavailableError) as refused:
                await router.service.pair(call(excluded=("d0", "d1")))
            assert refused.value.retry_after_s

    run(scenario())


@pytest.mark.parametrize(
    ("names", "lifecycle", "expected"),
    [
        ((), "ready", UnavailableError),
        (("p0",), "ready", UnavailableError),
        (("d0",), "starting", UnavailableError),
        (("d0",), "draining", UnavailableError),
    ],
)
def test_nobody_there_is_said_with_when_to_ask_again(
    names: tuple[str, ...], lifecycle: str, expected: type[UnavailableError]
) -> None:
    async def scenario() -> None:
        async with routing() as router:
            router.has(*names, lifecycle=lifecycle)
            with pytest.raises(expected, match="'m'") as refused:
                await router.service.pair(call())
            assert refused.value.retry_after_s == 2.0

    run(scenario())


def test_a_model_without_workers_is_unavailable_however_long_they_are_gone() -> None:
    async def scenario() -> None:
        async with routing("d0") as router:
            other = model("other", "other weights")
            router.view.update("b0:1", status("b0", Role.BOTH, served=other, fingerprint="other"))
            router.view.mark_lost("d0:1")
            with pytest.raises(
                UnavailableError, match="all workers of the model 'm' have stopped answering; try again"
            ):
                await router.service.pair(call())
            router.view.forget("d0")
            with pytest.raises(
                UnavailableError, match="no worker of the model 'm' has joined; models served: other"
            ) as refused:
                await router.service.pair(call())
            assert refused.value.retry_after_s == 2.0

    run(scenario())


def test_a_router_that_knows_another_model_only_is_not_believed_while_the_next_serves() -> None:
    async def scenario() -> None:
        async with routing() as first, routing("d0") as second, AsyncExitStack() as opened:
            first.view.update(
                "b0:1", status("b0", Role.BOTH, served=model("other", "other weights"), fingerprint="other")
            )
            servers = [await serve_router(router.service, "127.0.0.1:0", AS_ROUTER) for router in (first, second)]
            pool = ClientPool(partial(RouterClient, credentials=AS_GATEWAY))
            opened.push_async_callback(pool.close)
            for server in servers:
                opened.push_async_callback(server.stop, 0)
            addresses = [server.address for server in servers]
            address, answer = await Routers(addresses, pool, 2.0).pair(call())
            assert (address, answer.decode.worker_id) == (addresses[1], "d0")

    run(scenario())


@pytest.mark.parametrize(
    ("state", "changes", "expected", "reason"),
    [
        ({"num_total_blocks": 10, "num_free_blocks": 10}, {}, InvalidRequestError, "too_long"),
        ({"num_free_blocks": 10, "num_running": 4, "num_context_tokens": 4000}, {}, NoRoomError, "no_blocks"),
        ({"queued": queue_of(10**6)}, {}, CapacityError, "queue"),
        ({"queued": queue_of(10_000)}, {"max_ttft_ms": 100.0}, CapacityError, "queue"),
    ],
)
def test_refusals_are_errors_of_their_kind(
    state: dict[str, Any], changes: dict[str, Any], expected: type[Exception], reason: str
) -> None:
    async def scenario() -> None:
        async with routing() as router:
            router.has("d0", **state)
            with pytest.raises(expected) as refused:
                await router.service.pair(call(**changes))
            assert type(refused.value) is expected
            assert hasattr(refused.value, "retry_after_s") == issubclass(expected, CapacityError)
            assert getattr(refused.value, "retry_after_s", 1.0) is not None
            assert router.sample("tandem_router_decisions_total", policy="predicted cost", outcome=reason) == 1

    run(scenario())


def test_room_is_left_to_who_lost_its_worker_at_any_gateway() -> None:
    async def scenario() -> None:
        async with routing() as router:
            router.has("d0", num_free_blocks=10, num_running=4, num_context_tokens=4000)
            retry = call(place=QueuePlace(queue="one gateway", is_retry=True))
            other = call(request_id="other", place=QueuePlace(queue="another", waited_s=5.0))
            with pytest.raises(NoRoomError, match="is full"):
                await router.service.pair(retry)
            router.clock.advance(0.1)
            router.has("d0")
            with pytest.raises(UnavailableError):
                await router.service.pair(replace(retry, excluded=("d0",)))  # as it does before it asks for d0 again
            with pytest.raises(NoRoomError, match="is promised to requests that have waited longer, or that lost"):
                await router.service.pair(other)
            (latest,) = await router.service.decisions(1)
            assert "is promised" in latest.refusal
            assert (await router.service.pair(retry)).decode.worker_id == "d0"
            assert (await router.service.pair(other)).decode.worker_id == "d0"

    run(scenario())


@pytest.mark.parametrize("changes", [{"token_ids": ()}, {"token_ids": (2**32,) * 16}, {"num_expected_output": 0}])
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with routing("d0") as router:
            with pytest.raises(InvalidRequestError):
                await router.service.pair(call(**changes))

    run(scenario())


def test_an_index_that_is_away_costs_locality_only_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with routing("p0", "d0", is_away=True) as router:
            for number in range(3):
                prompt = tuple(range(number, number + 1000))
                answer = await router.service.pair(call(request_id=str(number), token_ids=prompt))
                assert answer.prefill_cached_blocks == 0
            assert router.lookup.num_unanswered == 3

    run(scenario())
    assert len(caplog.records) == 1


def test_outcomes_correct_the_count_of_what_runs_and_show_the_error() -> None:
    async def scenario() -> None:
        async with routing("p0", "d0") as router:
            answer = await router.service.pair(call())
            snapshot = router.fleet.snapshot("d0")
            assert snapshot is not None
            assert snapshot.num_running == 1
            await router.service.settle(Settlement(request_id="r", ttft_ms=answer.predicted_ms["ttft"] + 25.0))
            await router.service.settle(Settlement(request_id="never seen"))
            snapshot = router.fleet.snapshot("d0")
            assert snapshot is not None
            assert snapshot.num_running == 0
            assert router.sample("tandem_router_prediction_error_ms_count") == 1
            assert router.sample("tandem_router_prediction_error_ms_bucket", le="10.0") == 0
            assert router.sample("tandem_router_prediction_error_ms_bucket", le="30.0") == 1
            with pytest.raises(InvalidRequestError):
                await router.service.pair(call(request_id="long", token_ids=(1,) * 10**7))
            decision, refused = await router.service.decisions(2)
            assert (decision.prefill_id, decision.decode_id, decision.refusal) == ("p0", "d0", "")
            assert decision.measured_ms == {"ttft": pytest.approx(decision.predicted_ms["ttft"] + 25.0)}
            sent = DECISIONS.put([decision, refused])
            assert [one.request_id for one in DECISIONS.take(sent)] == ["r", "long"]
            assert (refused.request_id, refused.decode_id) == ("long", None)
            assert "tokens" in refused.refusal
            assert [one.request_id for one in await router.service.decisions(1)] == ["long"]

    run(scenario())


def test_workers_report_to_the_routers_own_index_and_list() -> None:
    async def scenario() -> None:
        async with routing("p0", "d0") as router:
            hashes = hashes_of(PROMPT)
            assert await router.service.publish("p0", 1, [], 1) is PublishResult.RESYNC
            assert await router.service.replace("p0", 1, hashes[:10], 1) is PublishResult.APPLIED
            events = [BlockStored(block_hash, None, 0) for block_hash in hashes[10:20]]
            assert await router.service.publish("p0", 1, events, 2) is PublishResult.APPLIED
            many = [BlockStored(hashlib.sha256(bytes([i % 256, i // 256])).digest(), None, 0) for i in range(1000)]
            assert await router.service.publish("p0", 1, many, 3) is PublishResult.APPLIED
            assert (await router.service.pair(call())).prefill_cached_blocks == 20
            await router.service.settle(Settlement(request_id="r"))
            await router.lookup.remove_worker("p0")
            assert (await router.service.pair(call())).prefill_cached_blocks == 0
            assert list(await router.service.register(Registration(record("p0")))) == [record("p0")]
            await router.service.unregister(record("p0"))
            assert list(await router.registry.workers()) == []

    run(scenario())


def test_a_worker_that_registers_is_watched_at_once() -> None:
    async def scenario() -> None:
        async with routing() as router, serving_worker(StubWorker(status("d0", D))) as server:
            task = asyncio.create_task(router.watch.run())
            await router.service.register(Registration(record("other", address="127.0.0.1:1")))
            await asyncio.sleep(0)
            await router.service.register(Registration(record("d0", address=server.address)))
            await eventually(lambda: [one.is_alive for one in router.view.listings()] == [True])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(scenario())


def test_with_redis_the_routers_own_index_and_list_are_not_there() -> None:
    async def scenario() -> None:
        async with routing("p0", is_away=True) as router:
            for refused in (
                router.service.register(Registration(record("p0"))),
                router.service.unregister(record("p0")),
                router.service.publish("p0", 1, [], 1),
                router.service.replace("p0", 1, [], 1),
            ):
                with pytest.raises(ConfigurationError, match="--redis"):
                    await refused

    run(scenario())


def test_a_request_paired_again_is_counted_once() -> None:
    async def scenario() -> None:
        async with routing("p0", "d0", "d1") as router:
            first = await router.service.pair(call())
            again = await router.service.pair(call(excluded=(first.decode.worker_id,)))
            assert again.decode != first.decode
            running = {}
            for name in ("p0", "d0", "d1"):
                snapshot = router.fleet.snapshot(name)
                assert snapshot is not None
                running[name] = snapshot.num_running
            assert running == {"p0": 1, first.decode.worker_id: 0, again.decode.worker_id: 1}

    run(scenario())


def test_requests_of_the_same_id_are_counted_apart() -> None:
    """A client's id comes twice at once through two gateways, and again before its first request is settled: the first
    one's load was taken off, and its end took off the second one's.
    """

    async def scenario() -> None:
        async with routing("p0", "d0") as router:

            def num_running() -> int:
                snapshot = router.fleet.snapshot("d0")
                assert snapshot is not None
                return snapshot.num_running

            await router.service.pair(call(pairing_id="first"))
            again = await router.service.pair(call(pairing_id="second"))
            assert num_running() == 2
            assert again.decode_cached_blocks == 124, "the first prompt is being computed"
            await router.service.settle(Settlement(request_id="r", pairing_id="first", ttft_ms=50.0))
            assert num_running() == 1
            first, second = await router.service.decisions(2)
            assert (first.request_id, first.measured_ms) == ("r", {"ttft": 50.0})
            assert (second.request_id, second.measured_ms) == ("r", {})
            await router.service.settle(Settlement(request_id="r", pairing_id="second"))
            assert num_running() == 0

    run(scenario())


@pytest.mark.parametrize("is_away", [False, True])
def test_a_prefix_asked_for_again_at_once_goes_to_who_is_about_to_hold_it(is_away: bool) -> None:
    """The index hears of blocks a moment after they are there; until then the router's own memory counts."""

    async def scenario() -> None:
        names = ("p0", "p1", "p2", "p3", "d0", "d1", "d2")
        async with routing(*names, is_away=is_away) as router:
            first = await router.service.pair(call(request_id="first"))
            await router.service.settle(Settlement(request_id="first", ttft_ms=50.0))
            longer = (*PROMPT, *range(5000, 5100))
            second = await router.service.pair(call(request_id="second", token_ids=longer))
            holders = {address.worker_id for address in (first.prefill, first.decode) if address is not None}
            computing = second.prefill or second.decode
            source = second.fetch_from or computing
            assert source.worker_id in holders
            assert max(second.num_fetch_blocks, second.prefill_cached_blocks, second.decode_cached_blocks) == 125
            stranger = await router.service.pair(
                call(request_id="stranger", token_ids=longer, scope=CacheScope(salt="tenant"))
            )
            assert (stranger.prefill_cached_blocks, stranger.decode_cached_blocks) == (0, 0)

    run(scenario())


def test_a_prefix_counts_as_far_as_its_states_let_it_go_on() -> None:
    """A prompt that left another's in the middle was paired with a worker for a prefix that it could not use: the
    worker held K and V up to there, and constant states 60 blocks before.
    """

    async def scenario() -> None:
        async with routing("d0") as router:
            router.has("p0", names_states=True)
            held = hashes_of(PROMPT)
            router.holds("p0", [*held, *(resume_name(held[end - 1]) for end in (64, 125))])

            async def num_cached(name: str, token_ids: Sequence[int]) -> int:
                answer = await router.service.pair(call(request_id=name, token_ids=tuple(token_ids)))
                await router.service.settle(Settlement(request_id=name))
                return answer.prefill_cached_blocks

            assert await num_cached("longer", (*PROMPT, *PROMPT)) == 125
            assert await num_cached("parts", (*PROMPT[:1990], *PROMPT)) == 64
            assert await num_cached("parts early", (*PROMPT[:1000], *PROMPT)) == 0
            assert await num_cached("no token left", PROMPT) == 64, "there is no state after block 124"

    run(scenario())


@pytest.mark.parametrize(
    ("request_bytes", "in_prefill", "in_decode"), [(1, (124, 124, 64), (0, 0, 0)), (0, (0, 124, 0), (124, 124, 93))]
)
def test_what_was_just_sent_counts_to_where_its_states_are_kept(
    request_bytes: int, in_prefill: tuple[int, ...], in_decode: tuple[int, ...]
) -> None:
    """Of 2,000 tokens after 1,024 and 1,984, at the worker that computes them; all of them where layers are windowed
    and none keeps a constant state.
    """

    async def scenario() -> None:
        async with routing() as router:
            router.has("p0", "d0", names_states=True, request_bytes=request_bytes)
            await router.service.pair(call(request_id="first"))
            await router.service.settle(Settlement(request_id="first", ttft_ms=50.0))
            prompts = (PROMPT, (*PROMPT[:1990], *PROMPT), PROMPT[:1500])
            for token_ids, *num_cached in zip(prompts, in_prefill, in_decode, strict=True):
                answer = await router.service.pair(call(request_id="next", token_ids=token_ids))
                await router.service.settle(Settlement(request_id="next"))
                assert [answer.prefill_cached_blocks, answer.decode_cached_blocks] == num_cached

    run(scenario())


def test_a_prompt_that_was_never_computed_is_credited_to_nobody() -> None:
    async def scenario() -> None:
        async with routing("p0", "d0", "d1") as router:
            await router.service.pair(call(request_id="left"))
            await router.service.settle(Settlement(request_id="left"))
            second = await router.service.pair(call(request_id="second"))
            assert (second.prefill_cached_blocks, second.decode_cached_blocks) == (0, 0)
            again = await router.service.pair(call(request_id="second", excluded=(second.decode.worker_id,)))
            assert (again.prefill_cached_blocks, again.decode_cached_blocks) == (0, 0)

    run(scenario())
