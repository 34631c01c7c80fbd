"""Virtual time goes forward only, and equal times keep their order."""

from tandem.fleet_simulation.events import EventQueue


def test_order_and_clock() -> None:
    events, seen = EventQueue(), list[tuple[str, float]]()

    def note(name: str) -> None:
        seen.append((name, events.now_s))

    events.at(2.0, lambda: note("second"))
    events.at(1.0, lambda: note("first"))
    events.at(2.0, lambda: note("third"))
    events.run()
    assert seen == [("first", 1.0), ("second", 2.0), ("third", 2.0)]


def test_the_past_is_now() -> None:
    events, seen = EventQueue(), list[float]()
    events.at(5.0, lambda: events.at(1.0, lambda: seen.append(events.now_s)))
    events.run()
    assert seen == [5.0]
