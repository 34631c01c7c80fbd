"""Scenario of one run: nodes, requests and faults, as plain values derived from the seed.

A scenario without some of its faults or requests is a valid one, so a failing one can be reduced.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.core.randomness import choice_seed
from tandem.rpc.channel import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from tandem.simulation.fabric import NetworkConditions
from tandem.simulation.fault import RANK_FAULTS, Fault, FaultKind, rank_fault_at
from tandem.simulation.model import answer_of
from tandem.simulation.redis import STORE
from tandem.simulation.scaling import Scaling, planner_faults_at

TENANTS = ("alice", "bob", "carol")  # clients, each with an account key and a scope of the cache
WARM_UP_S = 2.0  # before the first request and fault
SPAN_S = 7.0  # in which requests and faults begin; bursts and requests that continue an answer may go on longer
MAX_FAULT_S = 14.0  # the longest duration of a fault
MAX_PROMPT_TOKENS = 150  # of the beginning that a prompt shares with others; its own tokens follow
MAX_PIN_S = 4.0  # the longest time for which a prompt is pinned
_MAX_FAULTS = 6
_HAND_OFFS_EVERY = 4
_RANKS_EVERY = 10
_FOLLOWING_SHARE = 0.25  # of requests that continue an earlier answer
_SHARED_SHARE = 0.7  # of requests that share a beginning with others
_BURST_SHARE = 0.6  # of requests that come in bursts
_OPEN_SHARE = 0.15  # of scenarios without account keys
_REDIS_SHARE = 0.3  # of scenarios that use Redis
_SCALED_SHARE = 0.25  # of scenarios with planners
_MORE_SHARE = 0.3  # of scenarios, see `_with_more`
_PINNED_SHARE = 0.4  # of those scenarios' requests
_DISK_FULL_SHARE = 0.4  # of those scenarios' disks
_HALF_OPEN_SHARE = 0.2  # of scenarios with half-open connections
_AT_BURST_SHARE = 0.5  # of the faults: when much is under way


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request of the client `owner`, made at `at_s` of the run. `number`: unique in the scenario. `seed`: None =
    greedy. `leaves_after_*`: the client disconnects after this many tokens or seconds; None: it stays. `pin_s`: the
    prompt is pinned for this time; None: not pinned.
    """

    number: int
    at_s: float
    owner: str
    gateway: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    ignore_eos: bool
    is_stream: bool
    leaves_after_tokens: int | None = None
    leaves_after_s: float | None = None
    num_choices: int = 1
    pin_s: float | None = None

    @property
    def request_id(self) -> str:
        return f"{self.owner}.{self.number}"

    @property
    def answers(self) -> list[list[int]]:
        """The expected tokens of each choice."""
        seeds = [None if self.seed is None else choice_seed(self.seed, index) for index in range(self.num_choices)]
        return [
            answer_of(self.owner, self.prompt, self.max_tokens, seed=seed, ignore_eos=self.ignore_eos) for seed in seeds
        ]

    def __str__(self) -> str:
        return (
            f"{self.at_s:6.2f} s {self.request_id} at {self.gateway}: {len(self.prompt)} tokens, "
            f"wants {self.num_choices} x {self.max_tokens}"
            f"{', streamed' if self.is_stream else ''}{'' if self.pin_s is None else f', kept for {self.pin_s:.1f} s'}"
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """Plan of one run. Processes are named ROLE-NUMBER.

    Args:
        seed: from which the run's random numbers are derived too.
        routers, prefills, decodes, gateways: names of processes.
        asks: the clients' requests, in the order of time.
        conditions: of the network while no fault is on.
        num_blocks: pages of each worker's pool of KV memory.
        lease_ttl_s: time after which a lease of KV blocks that is not renewed ends.
        max_local_tokens: a decode worker may compute a prompt itself if at most so many of its tokens are not cached.
        step_s: least duration of an engine's step.
        account_lease_s: time after which reserved spending expires that its gateway does not renew.
        is_open: gateways ask for no keys, and all requests are one client's.
        uses_redis: discovery and locality index are in Redis instead of in routers.
        scaling: settings of two planners; None = there are none.
        num_host_slots: pages of each worker's host tier (pinned KV in host memory); 0 = there is none.
        previous_release: names of processes that run the previous release, which neither send nor read newer fields.
        ranks: (worker, number of ranks) of workers with several ranks, processes that compute its model together.
        sends_prompt_suffixes: of a prompt with a known beginning only the new part is sent; few beginnings are
            remembered.
    """

    seed: int
    routers: tuple[str, ...]
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    gateways: tuple[str, ...]
    asks: tuple[ClientRequest, ...]
    faults: tuple[Fault, ...]
    conditions: NetworkConditions
    num_blocks: int
    lease_ttl_s: float
    max_local_tokens: int
    step_s: float
    account_lease_s: float
    is_open: bool
    uses_redis: bool = False
    scaling: Scaling | None = None
    num_host_slots: int = 0
    previous_release: tuple[str, ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    sends_prompt_suffixes: bool = False

    @property
    def planners(self) -> tuple[str, ...]:
        return () if self.scaling is None else ("planner-0", "planner-1")

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.routers, *self.prefills, *self.decodes, *self.gateways, *self.planners)


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed. Every fourth seed has many hand-offs (a prompt's KV moves from a prefill to a decode
    worker) and short leases; two of ten have workers of several ranks.
    """
    scenario = _hand_offs(seed) if seed % _HAND_OFFS_EVERY == _HAND_OFFS_EVERY - 1 else _other(seed)
    scenario = replace(scenario, faults=_sorted(scenario.faults, _half_open(random.Random(f"{seed} half"), scenario)))
    if has_ranks(seed):
        scenario = with_ranks(random.Random(f"{seed} ranks"), scenario)
    return replace(
        scenario,
        sends_prompt_suffixes=sends_prompt_suffixes(seed) or (bool(scenario.previous_release) and seed % 2 == 0),
    )


def has_ranks(seed: int) -> bool:
    """Whether a seed's scenario has workers of several ranks."""
    return seed % _RANKS_EVERY in (_RANKS_EVERY // 2, _RANKS_EVERY - 1)


def sends_prompt_suffixes(seed: int) -> bool:
    """Whether all processes of a seed's scenario send only the new part of prompts; in some scenarios a previous
    release cannot.
    """
    return seed % _RANKS_EVERY == _RANKS_EVERY - 1


def _other(seed: int) -> Scenario:
    draw = random.Random(f"{seed} more")
    return _with_more(draw, _mixed(seed)) if draw.random() < _MORE_SHARE else _mixed(seed)


def _mixed(seed: int) -> Scenario:
    """Requests and faults of all kinds; one choice a request and no pins."""
    draw = random.Random(f"{seed} scenario")
    routers = _named("router", draw.choice((1, 1, 2)))
    prefills = _named("prefill", draw.choice((1, 1, 2)))
    decodes = _named("decode", draw.choice((1, 2, 2)))
    gateways = _named("gateway", draw.choice((1, 1, 2)))
    names = (*routers, *prefills, *decodes, *gateways)
    bursts_s = [WARM_UP_S + draw.uniform(0, SPAN_S) for _ in range(2)]
    is_open = draw.random() < _OPEN_SHARE
    scales = random.Random(f"{seed} scaling")
    scaling = Scaling.drawn(scales) if scales.random() < _SCALED_SHARE else None
    return Scenario(
        seed=seed,
        routers=routers,
        prefills=prefills,
        decodes=decodes,
        gateways=gateways,
        asks=_asks(draw, TENANTS[:1] if is_open else TENANTS, gateways, bursts_s),
        faults=_sorted(_faults(draw, names, prefills, decodes, bursts_s), _planner_faults(scales, scaling)),
        conditions=NetworkConditions(
            draw.choice((1e-4, 4e-4, 5e-3)), draw.choice((0.0, 0.005, 0.03)), draw.choice((0.05, 0.3))
        ),
        num_blocks=draw.choice((34, 40, 64)),
        lease_ttl_s=draw.choice((1.0, 2.0, 4.0)),
        max_local_tokens=draw.choice((0, 0, 16)),
        step_s=draw.choice((0.005, 0.03, 0.06)),
        account_lease_s=draw.choice((4.0, 8.0)),
        is_open=is_open,
        uses_redis=random.Random(f"{seed} redis").random() < _REDIS_SHARE,
        scaling=scaling,
    )


def _with_more(draw: random.Random, scenario: Scenario) -> Scenario:
    """The scenario with several choices, pinned prompts, a host tier, full disks and processes of the previous
    release.
    """
    asks = [
        replace(
            ask,
            num_choices=draw.choice((1, 1, 2, 3)),
            pin_s=draw.uniform(0.5, MAX_PIN_S) if draw.random() < _PINNED_SHARE else None,
        )
        for ask in scenario.asks
    ]
    faults = [
        Fault(FaultKind.DISK_FULL, WARM_UP_S + draw.uniform(0, SPAN_S), draw.uniform(0.5, 6.0), name)
        for name in (STORE, *scenario.gateways)
        if draw.random() < _DISK_FULL_SHARE
    ]
    previous_share = draw.choice((0.0, 0.5))
    return replace(
        scenario,
        asks=tuple(asks),
        faults=_sorted(scenario.faults, faults),
        num_host_slots=draw.choice((0, 8, 24)),
        previous_release=tuple(name for name in scenario.names if draw.random() < previous_share),
    )


def with_ranks(draw: random.Random, scenario: Scenario) -> Scenario:
    """The scenario with workers of several ranks, which are lost, cut off or slow. NOTE: the previous release has no
    ranks.
    """
    workers = (*scenario.prefills, *scenario.decodes)
    widths = {name: draw.choice((1, 2, 2, 4)) for name in workers}
    widths[draw.choice(workers)] = draw.choice((2, 4))
    ranks = tuple((name, width) for name, width in widths.items() if width > 1)
    faults = [
        rank_fault_at(draw, WARM_UP_S + draw.uniform(0, SPAN_S), *draw.choice(ranks))
        for _ in range(draw.randint(1, _MAX_FAULTS))
    ]
    # NOTE: streams of several choices, lost together, wait for room behind each other
    least = 64 if any(ask.num_choices > 1 for ask in scenario.asks) else 0
    num_blocks = max(scenario.num_blocks, least)
    return replace(
        scenario, ranks=ranks, previous_release=(), faults=_sorted(scenario.faults, faults), num_blocks=num_blocks
    )


def _hand_offs(seed: int) -> Scenario:
    """Long prompts with short answers through a small pool, while decode workers pause for as long as a lease lasts."""
    draw = random.Random(f"{seed} hand-offs")
    prefills, decodes = _named("prefill", 1), _named("decode", 2)
    asks = [
        ClientRequest(
            number=number,
            at_s=WARM_UP_S + draw.uniform(0, SPAN_S),
            owner=draw.choice(TENANTS),
            gateway="gateway-0",
            prompt=tuple(draw.randrange(256) for _ in range(draw.randint(60, 180))),
            max_tokens=draw.choice((1, 4, 8)),
            seed=None,
            ignore_eos=False,
            is_stream=draw.random() < 0.5,
        )
        for number in range(40)
    ]
    faults = [
        Fault(FaultKind.PAUSE, WARM_UP_S + draw.uniform(0, SPAN_S), draw.uniform(0.6, 1.7), draw.choice(decodes))
        for _ in range(8)
    ]
    slow_s = draw.uniform(0.05, 0.3)
    faults += [
        Fault(FaultKind.SLOW_READS, WARM_UP_S + draw.uniform(0, SPAN_S), 3.0, "everybody", size=slow_s)
        for _ in range(2)
    ]
    cut_s = draw.uniform(0.6, 2.5)
    faults.append(
        Fault(FaultKind.CUT_CALLS, WARM_UP_S + draw.uniform(0, SPAN_S), cut_s, draw.choice(decodes), prefills[0])
    )
    return Scenario(
        seed=seed,
        routers=_named("router", 1),
        prefills=prefills,
        decodes=decodes,
        gateways=_named("gateway", 1),
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        conditions=NetworkConditions(),
        num_blocks=34,
        lease_ttl_s=1.0,
        max_local_tokens=0,
        step_s=draw.choice((0.005, 0.02)),
        account_lease_s=4.0,
        is_open=False,
    )


def _named(role: str, count: int) -> tuple[str, ...]:
    return tuple(f"{role}-{number}" for number in range(count))


def _asks(
    draw: random.Random, owners: Sequence[str], gateways: tuple[str, ...], bursts_s: Sequence[float]
) -> tuple[ClientRequest, ...]:
    """Single requests and bursts; some share a beginning, some continue an earlier answer."""
    stems = [tuple(draw.randrange(256) for _ in range(draw.choice((24, 56, 100)))) for _ in range(2)]
    asks: list[ClientRequest] = []
    for number in range(draw.randint(8, 26)):
        owner = draw.choice(owners)
        former = draw.choice(asks) if asks and draw.random() < _FOLLOWING_SHARE else None
        if former is not None:  # a conversation goes on
            owner, stem, at_s = former.owner, former.prompt + tuple(former.answers[0]), former.at_s + draw.uniform(0, 3)
        else:
            stem = draw.choice(stems)[: draw.choice((8, 100, 100))] if draw.random() < _SHARED_SHARE else ()
            is_burst = draw.random() < _BURST_SHARE
            at_s = WARM_UP_S + draw.uniform(0, SPAN_S)
            if is_burst:
                at_s = draw.choice(bursts_s) + draw.uniform(0, draw.choice((0.3, 3.0)))
        prompt = stem[:MAX_PROMPT_TOKENS] + tuple(draw.randrange(256) for _ in range(draw.randint(1, 40)))
        max_tokens = draw.choice((1, 4, 20, 20, 60))
        asks.append(
            ClientRequest(
                number=number,
                at_s=at_s,
                owner=owner,
                gateway=draw.choice(gateways),
                prompt=prompt,
                max_tokens=max_tokens,
                seed=None if draw.random() < 0.7 else draw.randrange(1 << 31),
                ignore_eos=draw.random() < 0.6,
                is_stream=draw.random() < 0.6,
                leaves_after_tokens=draw.randint(1, max_tokens) if draw.random() < 0.1 else None,
                leaves_after_s=draw.uniform(0.001, 0.5) if draw.random() < 0.1 else None,
            )
        )
    return tuple(sorted(asks, key=lambda ask: ask.at_s))


def _sorted(*faults: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted((fault for some in faults for fault in some), key=lambda fault: fault.at_s))


def _planner_faults(draw: random.Random, scaling: Scaling | None) -> list[Fault]:
    if scaling is None:
        return []
    drawn = planner_faults_at(draw, WARM_UP_S, SPAN_S)
    return [Fault(FaultKind(kind), at_s, for_s, name, other) for kind, at_s, for_s, name, other in drawn]


def _half_open(draw: random.Random, scenario: Scenario) -> list[Fault]:
    """Connections that only one of their ends knows to be closed, in a share of the scenarios."""
    if draw.random() >= _HALF_OPEN_SHARE:
        return []
    names = [*scenario.routers, *scenario.prefills, *scenario.decodes, *scenario.gateways, STORE]
    for_s = KEEPALIVE_S + KEEPALIVE_TIMEOUT_S
    pairs = [tuple(draw.sample(names, 2)) for _ in range(draw.randint(1, 4))]
    return [
        Fault(FaultKind.HALF_OPEN, WARM_UP_S + draw.uniform(0, SPAN_S), for_s, told, other) for told, other in pairs
    ]


def _faults(
    draw: random.Random,
    names: tuple[str, ...],
    prefills: tuple[str, ...],
    decodes: tuple[str, ...],
    bursts_s: Sequence[float],
) -> list[Fault]:
    faults = []
    apart = {FaultKind.KUBERNETES_DOWN, FaultKind.DISK_FULL, FaultKind.HALF_OPEN, *RANK_FAULTS}
    kinds = [kind for kind in FaultKind if kind not in apart]
    weights = [6, 4, 2, 3, 2, 1, 1, 3, 2, 1, 1, 1]
    for kind in draw.choices(kinds, weights, k=draw.randint(0, _MAX_FAULTS)):
        at_s, name = WARM_UP_S + draw.uniform(0, SPAN_S), draw.choice((*names, *prefills, *decodes, *decodes))
        if draw.random() < _AT_BURST_SHARE:
            at_s = draw.choice(bursts_s) + draw.uniform(0, 1.0)
        for_s = min(MAX_FAULT_S, 0.5 + draw.expovariate(1 / 2.5))
        other, size = "", 0.0
        match kind:
            case FaultKind.CRASH:
                size = float(draw.random() < 0.3)
                for_s = draw.uniform(0.1, MAX_FAULT_S if size else 4.0)
            case FaultKind.SLOW:
                size = draw.choice((4.0, 16.0, 40.0))
            case FaultKind.CUT | FaultKind.CUT_ONE_WAY | FaultKind.CUT_CALLS:
                others = [*prefills, *decodes, *names, STORE]
                other = draw.choice([one for one in others if one != name])
            case FaultKind.CLOCK:
                size, for_s = draw.uniform(-300, 300), 0.0
            case FaultKind.STORE_FAILOVER:
                name, size = STORE, draw.uniform(0, 1.0)
            case FaultKind.STORE_CLOCK:
                name, size, for_s = STORE, draw.uniform(0, 120), 0.0
            case FaultKind.STORE_DOWN:
                name = STORE
            case FaultKind.LOSSY:
                name = "everybody"
            case FaultKind.SLOW_READS:
                name, size = "everybody", draw.uniform(0.05, 0.5)
        faults.append(Fault(kind, at_s, for_s, name, other, size))
    return faults
