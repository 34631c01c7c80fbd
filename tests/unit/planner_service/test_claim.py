from tandem.planner_service.claim import Claim


def test_what_we_asked_for_is_no_interference() -> None:
    claim = Claim(60.0)
    assert not claim.is_broken_by(3, 0.0)
    claim.acquire(5, 0.0)
    assert not claim.is_broken_by(5, 10.0)
    assert not claim.yields(10.0)


def test_another_number_is_respected_for_a_while() -> None:
    claim = Claim(60.0)
    claim.acquire(5, 0.0)
    assert claim.is_broken_by(2, 10.0)
    assert claim.yields(69.0)
    assert not claim.is_broken_by(2, 20.0)
    assert not claim.yields(71.0)


def test_each_time_for_longer_up_to_a_bound() -> None:
    claim, held_s = Claim(60.0), []
    for now_s in range(0, 7000, 1000):
        claim.acquire(5, float(now_s))
        assert claim.is_broken_by(2, float(now_s))
        held_s.append(claim.yields_for_s)
    assert held_s == [60.0, 120.0, 240.0, 480.0, 960.0, 960.0, 960.0]


def test_a_change_while_it_yields_is_respected_too() -> None:
    claim = Claim(60.0)
    claim.acquire(5, 0.0)
    assert claim.is_broken_by(2, 0.0)
    assert claim.is_broken_by(4, 50.0)
    assert claim.yields(169.0)


def test_long_peace_is_forgiven() -> None:
    claim = Claim(60.0)
    claim.acquire(5, 0.0)
    claim.is_broken_by(2, 0.0)
    claim.acquire(3, 100.0)
    assert not claim.is_broken_by(3, 400.0)
    claim.is_broken_by(9, 401.0)
    assert claim.yields_for_s == 60.0


def test_a_write_of_unknown_end_is_nobodys_interference() -> None:
    claim = Claim(60.0)
    claim.acquire(5, 0.0)
    claim.release()
    assert not claim.is_broken_by(7, 1.0)
