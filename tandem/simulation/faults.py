"""Injects faults into a running simulation: how each kind begins and ends."""

from collections.abc import Callable
from functools import partial

from tandem.simulation.fault import RANK_FAULTS, Fault, FaultInterval, FaultKind
from tandem.simulation.redis import STORE
from tandem.simulation.world import World


def begin_fault(world: World, fault: Fault) -> None:
    """Begin a fault and schedule its end."""
    world.trace.note(f"{world.loop.time():.9f}", "fault", fault)
    undo = _begun_of_ranks(world, fault) if fault.kind in RANK_FAULTS else _begun(world, fault)
    if undo is not None and fault.name in world.disks and fault.kind is FaultKind.DISK_FULL:
        world.in_world(world.loop.time() + fault.for_s, undo)  # NOTE: requests are to be served all the same
    elif undo is not None:
        other = "" if fault.kind in RANK_FAULTS else fault.other
        span = FaultInterval(fault.name, other, world.loop.time(), kind=fault.kind)
        world.spans.append(span)

        def end() -> None:
            span.until_s = world.loop.time()
            undo()

        world.in_world(world.loop.time() + fault.for_s, end)


def _begun(world: World, fault: Fault) -> Callable[[], None] | None:
    """Begin a fault; returns the function that ends it, None if it has no end or could not begin."""
    node, fabric = world.nodes.get(fault.name), world.fabric
    match fault.kind:
        case FaultKind.PAUSE if node is not None and not node.is_paused:
            node.is_paused = True
            return partial(setattr, node, "is_paused", False)
        case FaultKind.CRASH if node is not None:
            world.kill(fault.name, is_silent=bool(fault.size))
            return partial(_restart, world, fault)
        case FaultKind.SLOW if node is not None:
            node.slowness = fault.size
            return partial(setattr, node, "slowness", 1.0)
        case FaultKind.CUT | FaultKind.CUT_CALLS:
            is_readable = fault.kind is FaultKind.CUT_CALLS
            fabric.block(fault.name, fault.other, is_readable=is_readable)
            fabric.block(fault.other, fault.name, is_readable=is_readable)
            return partial(_heal, world, fault)
        case FaultKind.CUT_ONE_WAY:
            fabric.block(fault.name, fault.other)
            return partial(_heal, world, fault)
        case FaultKind.HALF_OPEN:
            fabric.half_open(fault.name, fault.other)
            return lambda: None  # NOTE: each connection ends by itself
        case FaultKind.CLOCK if node is not None:
            node.wall_offset_s += fault.size
        case FaultKind.LOSSY:
            former, fabric.conditions.slow_share = fabric.conditions.slow_share, 0.3
            return partial(setattr, fabric.conditions, "slow_share", former)
        case FaultKind.SLOW_READS:
            fabric.conditions.read_s = fault.size
            return partial(setattr, fabric.conditions, "read_s", 0.0)
        case FaultKind.STORE_DOWN:
            world.redis.is_down = True
            world.streams.cut_from(STORE)
            return partial(_restart_store, world)
        case FaultKind.STORE_FAILOVER:
            world.redis.fail_over(fault.size)
            world.streams.cut_from(STORE)
        case FaultKind.STORE_CLOCK:
            world.redis.clock_offset_s += fault.size
        case FaultKind.KUBERNETES_DOWN if world.kubernetes is not None:
            world.kubernetes.is_down = True
            return partial(setattr, world.kubernetes, "is_down", False)
        case FaultKind.DISK_FULL if fault.name == STORE:
            world.redis.is_full = True
            return partial(_empty_store, world)
        case FaultKind.DISK_FULL:
            world.disks[fault.name].fill()
            return world.disks[fault.name].empty
        case _:
            pass
    return None


def _begun_of_ranks(world: World, fault: Fault) -> Callable[[], None] | None:
    """As `_begun`, for faults of ranks. A worker that still forms its first group has no ranks yet; a dead one has none
    either.
    """
    system = world.environment.rank_systems.get(fault.name)
    process = None if system is None else system.ranks.get(int(fault.other.partition(" ")[0]))
    if system is None or process is None:
        return None
    match fault.kind:
        case FaultKind.RANK_KILLED:
            process.kill()
            return lambda: None
        case FaultKind.RANK_PAUSED:
            process.node.is_paused = True
            return partial(setattr, process.node, "is_paused", False)
        case FaultKind.RANK_SLOW:
            process.node.slowness = fault.size
            return partial(setattr, process.node, "slowness", 1.0)
        case FaultKind.RANKS_CUT:
            one, other = (system.name_of(int(number)) for number in fault.other.split())
            world.fabric.block(one, other)
            world.fabric.block(other, one)

            def heal() -> None:
                world.fabric.heal(one, other)
                world.fabric.heal(other, one)
                if (present := world.environment.rank_systems.get(fault.name)) is not None:
                    present.heal()  # NOTE: of a worker that may have been started again meanwhile

            return heal
        case _:
            system.is_refusing = True
            process.kill()
            return partial(setattr, system, "is_refusing", False)


def _empty_store(world: World) -> None:
    world.redis.is_full = False


def _restart_store(world: World) -> None:
    world.redis.is_down = False


def _restart(world: World, fault: Fault) -> None:
    if fault.name in world.ending:
        world.forget(fault.name)
        return
    is_pod = world.kubernetes is not None and fault.name.startswith(("prefill", "decode"))
    if is_pod and world.kubernetes is not None and fault.name not in world.kubernetes.pods:
        return
    world.start(fault.name)
    world.fabric.come_back(fault.name, fault.for_s)


def _heal(world: World, fault: Fault) -> None:
    world.fabric.heal(fault.name, fault.other)
    if fault.kind is not FaultKind.CUT_ONE_WAY:
        world.fabric.heal(fault.other, fault.name)
