"""Compiles what the Triton backend would launch, for a GPU that is not there: `python -m tests.helpers.triton_compile`.

Prints one JSON list, an object a launch. Runs in a process of its own, because it takes Triton's driver over.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from tandem.compute.cuda.triton_backend import TritonBackend
from tests.helpers.attention_cases import Shape, build_step, random_request

SHAPE = Shape(num_heads=16, num_kv_heads=4, head_dim=128, window=900, softcap=50.0, dtype="bfloat16")
BATCHES = (  # (seq_len, query_len)
    ((5, 1),),
    ((600, 1), (1, 1), (40, 9)),
    ((33, 33),),
    tuple((700 + index, 1 + index % 2) for index in range(17)),
)


class AbsentGpu:
    """As much of a Triton driver as compiling takes."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cuda", 80, 32)


class Compiled:
    """Stands in for a kernel: a launch compiles and is recorded, nothing runs."""

    def __init__(self, kernel: Any, launches: list[dict[str, Any]]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            binary = self._kernel.warmup(*args, grid=grid, **kwargs)
            record = {
                "kernel": self._kernel.fn.__name__,
                "shared_bytes": binary.metadata.shared,
                "num_binaries": len(self._kernel.device_caches[0][0]),
            }
            self._launches.append(record)

        return launch


def main() -> None:
    import_module("triton.runtime").driver.set_active(AbsentGpu())
    kernels = import_module("tandem.compute.cuda.triton_paged")
    launches: list[dict[str, Any]] = []
    for name in ("decode_kernel", "combine_kernel", "prefill_kernel"):
        setattr(kernels, name, Compiled(getattr(kernels, name), launches))
    backend = TritonBackend(torch.device("cpu"))
    for batch in BATCHES:
        requests = [random_request(SHAPE, seq_len, query_len, seed) for seed, (seq_len, query_len) in enumerate(batch)]
        step = build_step(SHAPE, requests)
        backend.attend(step.queries, step.kv, step.batch, step.params)
    sys.stdout.write(json.dumps(launches))


if __name__ == "__main__":
    main()
