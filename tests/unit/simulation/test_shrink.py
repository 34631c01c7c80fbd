"""A failing scenario is made smaller without losing what makes it fail."""

from tandem.simulation.scenario import Scenario, scenario_of
from tandem.simulation.shrink import shrunk


def test_only_what_matters_stays() -> None:
    scenario = next(one for one in map(scenario_of, range(100)) if len(one.faults) >= 4 and len(one.asks) >= 10)
    fault, asks = scenario.faults[2], {scenario.asks[1].number, scenario.asks[7].number}
    num_runs = 0

    def fails(smaller: Scenario) -> bool:
        nonlocal num_runs
        num_runs += 1
        return fault in smaller.faults and asks <= {ask.number for ask in smaller.asks}

    small = shrunk(scenario, fails)
    assert small.faults == (fault,)
    assert {ask.number for ask in small.asks} == asks
    assert num_runs < 100


def test_it_gives_up_after_so_many_runs() -> None:
    scenario = scenario_of(1)
    asked: list[Scenario] = []

    def fails(smaller: Scenario) -> bool:
        asked.append(smaller)
        return False

    assert shrunk(scenario, fails, max_runs=5) == scenario
    assert len(asked) == 5
