"""Small fleets and traces for the simulator's tests."""

from dataclasses import replace

from tandem.fleet_simulation.request import SimulatedRequest
from tandem.fleet_simulation.setting import SimulationSetting
from tandem.routing.admission import AdmissionLimits
from tandem.routing.snapshot import LinkState, RequestShape
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed
from tandem.workload.trace import TraceRequest

SPEED = Speed(PrefillSpeed(0.0, 0.1, 0.0), DecodeSpeed(10.0, 0.5, 0.001))
PATIENT = AdmissionLimits(max_ttft_ms=1e9, max_local_tokens=0)
INSTANT = LinkState(1e18, 0.0)


def setting(**changes: object) -> SimulationSetting:
    base = SimulationSetting(
        prefill=SPEED,
        decode=SPEED,
        prefill_kv_tokens=1_000_000,
        decode_kv_tokens=1_000_000,
        block_bytes=1,
        block_size=16,
        link=INSTANT,
        limits=PATIENT,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def asked(at_s: float, num_prompt: int = 1000, num_output: int = 1, block_ids: tuple[int, ...] = ()) -> TraceRequest:
    return TraceRequest(at_s, num_prompt, num_output, block_ids)


def request(
    number: int, num_prompt: int = 1000, num_output: int = 1, block_ids: tuple[int, ...] = (), num_blocks: int = 0
) -> SimulatedRequest:
    shape = RequestShape(request_id=str(number), num_tokens=num_prompt, num_expected_output=num_output)
    return SimulatedRequest(str(number), asked(0.0, num_prompt, num_output, block_ids), shape, num_blocks)
