import pytest

from tandem.core.errors import InvalidRequestError
from tandem.workload.slo import Served, Slo, percentiles, slo_report

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def test_goodput_counts_those_that_got_everything_in_time() -> None:
    served = [
        Served(0.0, 0.5, 0.5 + 9 * 0.04, 10),
        Served(0.0, 1.5, 2.0, 11),
        Served(0.0, 0.5, 0.5 + 9 * 0.06, 10),
        Served(0.0, 0.9, 0.9, 1),
        Served(0.0, rejected=True),
        Served(0.0, 0.5, None, 4),
    ]
    report = slo_report(served, SLO, duration_s=10.0)
    assert (report.num_completed, report.num_rejected, report.num_failed) == (4, 1, 1)
    assert report.attainment == pytest.approx(2 / 6)
    assert report.goodput_per_s == pytest.approx(0.2)
    assert report.ttft_s is not None
    assert report.ttft_s.num_samples == 5
    assert report.ttft_s.maximum == 1.5
    assert report.tpot_s is not None
    assert report.tpot_s.num_samples == 3


def test_turning_users_away_does_not_improve_the_report() -> None:
    late, good = Served(0.0, 9.0, 9.5, 5), Served(0.0, 0.1, 0.2, 5)
    waited = slo_report([good, late], SLO, 10.0)
    refused = slo_report([good, Served(0.0, rejected=True)], SLO, 10.0)
    assert refused.attainment == waited.attainment
    assert refused.goodput_per_s == waited.goodput_per_s


def test_percentiles_are_samples() -> None:
    found = percentiles([float(i) for i in range(1, 101)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.maximum, found.mean) == (50, 90, 99, 100, 50.5)
    single = percentiles([3.0])
    assert single is not None
    assert (single.p50, single.p99) == (3, 3)
    assert percentiles([]) is None


def test_what_makes_no_report_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="0 requests"):
        slo_report([], SLO, 1.0)
    with pytest.raises(InvalidRequestError, match=r"in 0\.0 s"):
        slo_report([Served(0.0)], SLO, 0.0)
    with pytest.raises(InvalidRequestError, match="ttft_s=0"):
        Slo(0.0, 1.0)
