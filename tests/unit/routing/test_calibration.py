import random

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.routing.calibration import Calibration, CalibrationSettings
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, PrefillWork, Speed
from tests.unit.routing.builders import FAST, SLOW


def teach(
    calibration: Calibration, truth: PrefillSpeed, num_samples: int, *, seed: int = 0, noise: float = 0.05
) -> None:
    source = random.Random(seed)
    for _ in range(num_samples):
        num_tokens = int(source.lognormvariate(7.5, 1.2)) + 1
        work = PrefillWork.of(num_tokens, source.choice([0, num_tokens // 2]))
        calibration.observe_prefill("w", "kind", work, truth.ms(work) * source.lognormvariate(0, noise))


def error_of(calibration: Calibration, truth: PrefillSpeed) -> float:
    works = [PrefillWork.of(num_tokens, 0) for num_tokens in (100, 1000, 4000, 16_000)]
    found = calibration.speed("kind").prefill
    return max(abs(found.ms(work) / truth.ms(work) - 1) for work in works)


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 3.0, 30.0])
def test_converges_from_a_prior_that_is_far_off(factor: float) -> None:
    truth = PrefillSpeed(2.0 * factor, 0.05 * factor, 1e-6 * factor)
    calibration = Calibration(FAST)
    teach(calibration, truth, 300)
    assert error_of(calibration, truth) < 0.1


def test_follows_a_worker_that_becomes_slower() -> None:
    calibration = Calibration(FAST)
    teach(calibration, FAST.prefill, 300)
    teach(calibration, SLOW.prefill, 60, seed=1)
    assert error_of(calibration, SLOW.prefill) < 0.15


@pytest.mark.parametrize("factor", [100.0, 0.001])
def test_outliers_hardly_matter(factor: float) -> None:
    calibration = Calibration(FAST)
    source = random.Random(1)
    for i in range(60):
        teach(calibration, FAST.prefill, 9, seed=i)
        work = PrefillWork.of(source.randrange(100, 10_000), 0)
        calibration.observe_prefill("w", "kind", work, FAST.prefill.ms(work) * factor)
    assert error_of(calibration, FAST.prefill) < 0.15


def test_a_workers_first_samples_do_not_count_but_only_its_own() -> None:
    calibration = Calibration(FAST, settings=CalibrationSettings(num_warmup=3))
    work = PrefillWork.of(1000, 0)
    for _ in range(3):
        calibration.observe_prefill("cold", "kind", work, 60_000.0)
    assert calibration.speed("kind") is FAST
    calibration.observe_prefill("cold", "kind", work, 100.0)
    assert calibration.speed("kind") != FAST
    calibration.forget("cold")
    before = calibration.speed("kind")
    calibration.observe_prefill("cold", "kind", work, 60_000.0)
    assert calibration.speed("kind") is before


def test_samples_of_one_shape_leave_the_rest_near_the_prior_and_nothing_is_negative() -> None:
    calibration = Calibration(FAST)
    work = PrefillWork.of(1000, 0)
    for _ in range(500):
        calibration.observe_prefill("w", "kind", work, 2 * FAST.prefill.ms(work))
    found = calibration.speed("kind").prefill
    assert found.ms(work) == pytest.approx(2 * FAST.prefill.ms(work), rel=0.02)
    assert found.ms_per_pair >= FAST.prefill.ms_per_pair
    assert found.ms(PrefillWork.of(4000, 0)) == pytest.approx(2 * FAST.prefill.ms(PrefillWork.of(4000, 0)), rel=0.25)


def test_coefficients_never_become_negative() -> None:
    """Times that fall with the work would fit a negative slope."""
    calibration = Calibration(FAST)
    for i in range(300):
        num_tokens = 100 + 37 * (i % 50)
        calibration.observe_prefill("w", "kind", PrefillWork.of(num_tokens, 0), 500_000 / (num_tokens + 100))
        found = calibration.speed("kind").prefill
        assert min(found.ms_per_request, found.ms_per_token, found.ms_per_pair) >= 0


def test_decode_steps_are_learned_too() -> None:
    truth = DecodeSpeed(9.0, 0.1, 1e-4)
    calibration = Calibration(Speed(FAST.prefill, DecodeSpeed(5.0, 0.05, 5e-5)))
    source = random.Random(0)
    for _ in range(400):
        num_running = source.randrange(1, 64)
        num_context = num_running * source.randrange(100, 8000)
        measured_ms = truth.step_ms(num_running, num_context) * source.lognormvariate(0, 0.03)
        calibration.observe_step("w", "kind", num_running, num_context, measured_ms)
    found = calibration.speed("kind").decode
    for batch in (1, 16, 60):
        assert found.step_ms(batch, batch * 2000) == pytest.approx(truth.step_ms(batch, batch * 2000), rel=0.08)


def test_the_error_of_predictions_is_recorded() -> None:
    calibration = Calibration(FAST)
    teach(calibration, SLOW.prefill, 10)
    prefill, decode = calibration.errors()["kind"]
    assert prefill.num_samples == 7
    assert prefill.mean_absolute > 0.1
    assert decode.num_samples == 0
    teach(calibration, SLOW.prefill, 500, seed=2)
    assert calibration.errors()["kind"][0].mean_absolute < 0.08


@pytest.mark.parametrize(
    ("work", "measured_ms"),
    [
        *((PrefillWork.of(100, 0), each) for each in (0.0, -1.0, float("nan"), float("inf"), 1e200, 1e-300)),
        (PrefillWork(), 1.0),
        (PrefillWork(1e-300), 1.0),
        (PrefillWork(1.7e308), 1.0),
        (PrefillWork(float("nan"), 1.0), 1.0),
    ],
)
def test_what_is_no_measurement_is_refused_and_changes_nothing(work: PrefillWork, measured_ms: float) -> None:
    """One sample of a worker divided by zero, or made the speed of its kind zero for good."""
    calibration = Calibration(FAST, settings=CalibrationSettings(num_warmup=0))
    with pytest.raises(InvalidRequestError, match="measured_ms"):
        calibration.observe_prefill("w", "kind", work, measured_ms)
    assert calibration.speed("kind") == FAST


@pytest.mark.parametrize("work", [PrefillWork(1e18, 1e18, 1e18), PrefillWork(0, 1, 0)])
@pytest.mark.parametrize("measured_ms", [1e-6, 1e9])
def test_the_strangest_measurements_are_forgotten(work: PrefillWork, measured_ms: float) -> None:
    calibration = Calibration(FAST, settings=CalibrationSettings(num_warmup=0))
    for each in (PrefillWork(0, 0, 1), work, PrefillWork(1e18, 1e18, 1e18), work):
        calibration.observe_prefill("w", "kind", each, measured_ms)
    for _ in range(2000):
        calibration.observe_prefill("v", "kind", PrefillWork.of(100, 0), 10.0)
    assert calibration.speed("kind").prefill.prompt_ms(100, 0) == pytest.approx(10.0, rel=0.1)
