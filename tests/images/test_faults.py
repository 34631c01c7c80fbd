"""A fleet of containers under load: workers killed, frozen, unplugged, drained and added while streams run; none lost.

Each test leaves the fleet as it found it. Load goes on before, during and after what happens; every stream is compared
with the tokens of an undisturbed one.
"""

import time
from collections.abc import Iterator

import pytest

from tests.faults.streams import Known
from tests.images.fleet import MODEL, Fleet, role_of
from tests.images.journal import Journal
from tests.images.load import Load, running_load

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
AFTER = 8  # streams that start after a fault and end before the test does
NOTICED_S = 10.0
GRACE_S = 40
SILENCE_S = 10.0  # a longer one is told about: where the request's time went


@pytest.fixture
def load(fleet: Fleet, known: list[Known], journal: Journal, request: pytest.FixtureRequest) -> Iterator[Load]:
    """In the end no stream is lost, and nothing is left in any worker."""
    label = request.node.name.removeprefix("test_")
    before_s = journal.elapsed_s
    with running_load(fleet.url, MODEL, known, label) as load:
        yield load
    journal.tell(f"{label}: {load.tally}; {journal.elapsed_s - before_s:.1f} s")
    if load.tally.longest_silence_s > SILENCE_S:
        journal.tell(f"  {load.tally.most_silent}: {fleet.timeline(load.tally.most_silent)}")
    assert not load.tally.lost, load.tally.lost
    assert load.tally.num_exact >= AFTER
    fleet.until(lambda: nothing_is_held(fleet), 15, "idle")


def nothing_is_held(fleet: Fleet) -> bool:
    """No worker runs, leases or transfers anything."""
    listed = {name: worker for name, worker in fleet.workers().items() if role_of(name) in ("prefill", "decode")}
    busy = ("used", "leased", "transferring")
    return all(
        worker["num_running"] == 0 and not any(worker["blocks"].get(state) for state in busy)
        for worker in listed.values()
        if worker["is_alive"]
    )


def wait_whole(fleet: Fleet) -> float:
    """Until the gateway knows of all four workers again; how long that took, seconds."""
    return fleet.until(
        lambda: set(WORKERS) <= fleet.alive("prefill") | fleet.alive("decode"), 60, "all four workers known"
    )


def links_of(fleet: Fleet) -> set[tuple[str, str, str]]:
    """Reader, source and what carries the bytes."""
    return {
        (name, link["source_id"], f"{link['transport']} ({link['path']})")
        for name, worker in fleet.workers().items()
        for link in worker.get("links", ())
    }


def test_undisturbed(fleet: Fleet, load: Load, journal: Journal) -> None:
    load.wait_more(3 * AFTER)
    fleet.until(lambda: {reader for reader, _, _ in links_of(fleet)} >= {"decode-0", "decode-1"}, 30, "links known")
    for reader, source, transport in sorted(links_of(fleet)):
        journal.tell(f"  {reader} reads from {source} by {transport}")
    load.wait_more(AFTER)


def test_health_checks_say_so(fleet: Fleet, journal: Journal) -> None:
    names = [name for name in fleet.containers if name != "redis"]
    assert [name for name in names if fleet.containers[name].is_healthy()] == names
    journal.tell("health checks of all images agree")


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_killed(fleet: Fleet, load: Load, journal: Journal, name: str) -> None:
    fleet.containers[name].kill()
    journal.tell(f"  {name} killed")
    noticed_s = fleet.until(lambda: name not in fleet.alive(role_of(name)), NOTICED_S, "missed")
    load.wait_more(AFTER)
    ready_s = fleet.start_ready(name)
    known_s = wait_whole(fleet)
    journal.tell(
        f"  {name} missed after {noticed_s:.1f} s; a new one ready in {ready_s:.1f} s, known {known_s:.1f} s later"
    )
    load.wait_more(AFTER)


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
def test_paused(fleet: Fleet, load: Load, journal: Journal, name: str) -> None:
    fleet.containers[name].pause()
    journal.tell(f"  {name} frozen")
    noticed_s = fleet.until(lambda: name not in fleet.alive(role_of(name)), NOTICED_S, "missed")
    load.wait_more(AFTER)
    fleet.containers[name].unpause()
    journal.tell(f"  {name} missed after {noticed_s:.1f} s; thawed, known {wait_whole(fleet):.1f} s later")
    load.wait_more(AFTER)


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
def test_partitioned(fleet: Fleet, load: Load, journal: Journal, name: str) -> None:
    container = fleet.containers[name]
    ip = container.ip()
    fleet.network.disconnect(name)
    journal.tell(f"  {name} unplugged")
    noticed_s = fleet.until(lambda: name not in fleet.alive(role_of(name)), NOTICED_S, "missed")
    load.wait_more(AFTER)
    fleet.network.connect(name, ip=ip)
    journal.tell(f"  {name} missed after {noticed_s:.1f} s; plugged in, known {wait_whole(fleet):.1f} s later")
    load.wait_more(AFTER)


@pytest.mark.parametrize("name", ["prefill-1", "decode-0"])
def test_drained(fleet: Fleet, load: Load, journal: Journal, name: str) -> None:
    start_s = time.monotonic()
    exit_code = fleet.containers[name].stop(GRACE_S)
    took_s = time.monotonic() - start_s
    journal.tell(f"  {name} stopped by SIGTERM in {took_s:.1f} s with exit code {exit_code}")
    assert exit_code == 0
    assert took_s < GRACE_S
    load.wait_more(AFTER)
    fleet.start_ready(name)
    wait_whole(fleet)
    load.wait_more(AFTER)


def test_scaled(fleet: Fleet, load: Load, journal: Journal) -> None:
    added = ("prefill-2", "decode-2")
    ready_s = fleet.start_ready(*added)
    known_s = fleet.until(lambda: set(added) <= fleet.alive("prefill") | fleet.alive("decode"), 20, "both known")
    journal.tell(f"  {' and '.join(added)} ready in {ready_s:.1f} s, known {known_s:.1f} s later")
    fleet.until(lambda: all(_has_worked(fleet, name) for name in added), 60, "both given work")
    load.wait_more(AFTER)
    for name in added:
        assert fleet.containers[name].stop(GRACE_S) == 0
        fleet.remove(name)
    journal.tell("  both were given work, drained and left with exit code 0")
    load.wait_more(AFTER)


def test_router_killed(fleet: Fleet, load: Load, journal: Journal) -> None:
    fleet.containers["router-0"].kill()
    journal.tell("  router-0 killed")
    load.wait_more(AFTER)
    ready_s = fleet.start_ready("router-0")
    journal.tell(f"  a new one ready in {ready_s:.1f} s")
    load.wait_more(AFTER)


def test_redis_killed(fleet: Fleet, load: Load, journal: Journal) -> None:
    fleet.containers["redis"].kill()
    journal.tell("  redis killed")
    load.wait_more(AFTER)
    fleet.start_ready("redis")
    journal.tell("  a new, empty one runs")
    wait_whole(fleet)
    load.wait_more(AFTER)


def test_gateway_drained(fleet: Fleet, known: list[Known], journal: Journal) -> None:
    """Its streams end before it does."""
    with running_load(fleet.url, MODEL, known, "gateway_drained") as load:
        load.ask_no_more()
        running = load.running()
        start_s = time.monotonic()
        exit_code = fleet.containers["gateway"].stop(GRACE_S)
        took_s = time.monotonic() - start_s
    journal.tell(
        f"gateway_drained: {load.tally}; {len(running)} ran at SIGTERM; exit code {exit_code} in {took_s:.1f} s"
    )
    assert exit_code == 0
    assert running
    assert not load.tally.lost, load.tally.lost
    fleet.start_ready("gateway")


def test_nothing_was_killed_for_memory(fleet: Fleet, journal: Journal) -> None:
    assert not [name for name, container in fleet.containers.items() if container.state().oom_killed]
    journal.tell("no container met its memory limit")


def _has_worked(fleet: Fleet, name: str) -> bool:
    worker = fleet.workers()[name]
    return bool(worker["num_running"] or worker["blocks"].get("cached"))
