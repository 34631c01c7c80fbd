from tandem.planner_service.startups import Startups
from tandem.planner_service.targets import Replica


def starting(name: str, created_s: float = 0.0) -> Replica:
    return Replica(name=name, created_s=created_s)


def ready(name: str, ready_s: float, created_s: float = 0.0) -> Replica:
    return Replica(name=name, created_s=created_s, ready_s=ready_s)


def typical_s(startups: Startups) -> float | None:
    return startups.typical_s


def test_who_was_seen_to_start_tells_how_long_it_took() -> None:
    startups = Startups()
    startups.observe([starting("a"), starting("b")])
    assert typical_s(startups) is None
    startups.observe([ready("a", 40.0), starting("b")])
    assert typical_s(startups) == 40.0
    startups.observe([ready("a", 40.0), ready("b", 60.0)])
    assert typical_s(startups) == 50.0


def test_who_was_ready_at_first_sight_tells_nothing() -> None:
    """Its condition may have changed an hour after its start."""
    startups = Startups()
    startups.observe([ready("a", 3000.0)])
    startups.observe([ready("a", 3000.0)])
    assert typical_s(startups) is None


def test_who_comes_and_is_ready_between_two_looks_counts() -> None:
    startups = Startups()
    startups.observe([])
    startups.observe([ready("a", 4.0)])
    startups.observe([ready("a", 4.0)])
    assert typical_s(startups) == 4.0


def test_who_is_unready_for_a_moment_does_not_start_again() -> None:
    startups = Startups()
    startups.observe([starting("a")])
    startups.observe([ready("a", 10.0)])
    startups.observe([starting("a")])
    startups.observe([ready("a", 900.0)])
    assert typical_s(startups) == 10.0


def test_one_of_an_earlier_pod_of_that_name_is_forgotten() -> None:
    startups = Startups()
    startups.observe([starting("a")])
    startups.observe([])
    startups.observe([ready("a", 30.0, created_s=20.0)])
    assert typical_s(startups) == 10.0


def test_an_outlier_does_not_sway_the_rest_and_nonsense_is_left_out() -> None:
    startups = Startups()
    for number, ready_s in enumerate((10.0, 11.0, 12.0, 500.0, -1.0, 1e6)):
        startups.observe([starting(str(number))])
        startups.observe([ready(str(number), ready_s)])
    assert typical_s(startups) == 11.5
