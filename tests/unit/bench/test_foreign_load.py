"""Foreign load during a measurement: neither our own processes nor those we started, but other virtual machines."""

import itertools
import types
from collections.abc import Iterator

import psutil
import pytest

from bench.load import ForeignLoad


def machine(monkeypatch: pytest.MonkeyPatch, *, own_s: float, **busy_s: float) -> None:
    """A machine whose counters have grown by these at the second look, one second after the first."""

    def looks(**grown: float) -> Iterator[types.SimpleNamespace]:
        after = {name: 1.0 + seconds for name, seconds in grown.items()}
        return iter([types.SimpleNamespace(**dict.fromkeys(grown, 1.0)), types.SimpleNamespace(**after)])

    whole, ours = looks(**busy_s), looks(user=own_s, system=0.0)
    process = types.SimpleNamespace(cpu_times=lambda: next(ours), children=lambda recursive: [])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(whole))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    clock = itertools.count()
    monkeypatch.setattr("bench.load.time", types.SimpleNamespace(perf_counter=lambda: float(next(clock))))


def test_time_that_another_virtual_machine_took_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, own_s=1.0, user=1.0, system=0.25, nice=0.0, steal=0.5)
    assert ForeignLoad().cores() == pytest.approx(0.75)


def test_a_system_that_knows_no_steal(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, own_s=1.0, user=1.0, system=0.25, nice=0.0)
    assert ForeignLoad().cores() == pytest.approx(0.25)


def test_never_less_than_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, own_s=2.0, user=1.0, system=0.0, nice=0.0, steal=0.0)
    assert ForeignLoad().cores() == 0.0
