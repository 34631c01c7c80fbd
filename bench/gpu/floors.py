"""Floors of the device: the best possible rates, and stopwatches that wait for it.

The floors: a large copy, counting bytes read and written, and a large matrix product of random numbers.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu.setting import Setting

COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Floors:
    """`bandwidth`: bytes/s, read and written; `matmul`: FLOP/s in bfloat16."""

    bandwidth: float
    matmul: float


def measure_floors(setting: Setting) -> Floors:
    """Half a second on a large GPU."""
    return Floors(_copy_bandwidth(setting), _matmul_rate(setting))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_s(call: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 1) -> list[float]:
    """Seconds of each call, with the device idle before and after."""
    for _ in range(warm_up):
        call()
    samples = []
    for _ in range(repeats):
        synchronise(device)
        started_s = time.perf_counter()
        call()
        synchronise(device)
        samples.append(time.perf_counter() - started_s)
    return samples


def device_s(call: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 3) -> float:
    """Seconds a call when the device never waits for the host: calls are queued back to back."""
    if device.type != "cuda":
        return statistics.median(wall_s(call, device, repeats, warm_up))
    for _ in range(warm_up):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3 / repeats


def _copy_bandwidth(setting: Setting) -> float:
    num_bytes = setting.pick(COPY_BYTES, 1 << 24)
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_s(lambda: target.copy_(source), setting.device, 10)


def _matmul_rate(setting: Setting) -> float:
    size = setting.pick(MATMUL_SIZE, 64)
    left, right = (torch.randn(size, size, device=setting.device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / device_s(lambda: left @ right, setting.device, 10)
