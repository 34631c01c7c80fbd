"""Compiles what our Triton backends would launch, for GPUs that are not there: `python -m tests.helpers.triton_compile
SUITE...`, a suite a name of `SUITES` and perhaps `@` a compute capability, 80 for example.

Prints one JSON list, an object a launch. Runs in a process of its own, because it takes Triton's driver over.
"""

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from tandem.architecture.state import LatentSpec, RecurrentSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.cuda.latents import TritonLatentBackend
from tandem.compute.cuda.recurrent import TritonRecurrentBackend
from tandem.compute.cuda.triton_backend import TritonBackend
from tandem.compute.layer_states import LayerLatents, LayerRecurrent
from tandem.compute.ops import ExpertWeights, Matrix
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams
from tandem.compute.step import AttentionBatch
from tandem.kvcache.spec import build_layout
from tests.helpers.attention_cases import Shape, build_step, random_request
from tests.helpers.coded_matrices import E2M1, random_coded

CPU = torch.device("cpu")
SHAPE = Shape(num_heads=16, num_kv_heads=4, head_dim=128, window=900, softcap=50.0, dtype="bfloat16")
BATCHES = (  # (seq_len, query_len)
    ((5, 1),),
    ((600, 1), (1, 1), (40, 9)),
    ((33, 33),),
    tuple((700 + index, 1 + index % 2) for index in range(17)),
)
INSTRUCTIONS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "fma.rn.f32")  # of matrix products, the widest first
CODES: Mapping[str, CodedMatrix] = {
    "int4": random_coded(CodeKind.TABLE4, (1024, 2048), 128, scales=torch.bfloat16, offsets=torch.bfloat16),
    "mxfp4": random_coded(CodeKind.TABLE4, (1024, 2048), 32, scales=torch.float8_e8m0fnu, table=E2M1),
    "int8": random_coded(CodeKind.INT8, (1024, 2048), 2048, scales=torch.bfloat16),
    "fp8": random_coded(CodeKind.E4M3, (1024, 2048), 128),
}


class AbsentGpu:
    """As much of a Triton driver as compiling takes. A device's number is its compute capability."""

    capability = 80

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cuda", self.capability, 32)


class Compiled:
    """Stands in for a kernel: a launch compiles and is recorded, nothing runs."""

    def __init__(self, kernel: Any, gpu: AbsentGpu, launches: list[dict[str, Any]]) -> None:
        self._kernel = kernel
        self._gpu = gpu
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            binary = self._kernel.warmup(*args, grid=grid, **kwargs)
            record = {
                "kernel": self._kernel.fn.__name__,
                "capability": self._gpu.capability,
                "shared_bytes": binary.metadata.shared,
                "num_binaries": len(self._kernel.device_caches[self._gpu.capability][0]),
                "instruction": next((each for each in INSTRUCTIONS if each in binary.asm["ptx"]), None),
            }
            self._launches.append(record)

        return launch


def attention() -> None:
    backend = TritonBackend(CPU)
    for batch in BATCHES:
        requests = [random_request(SHAPE, seq_len, query_len, seed) for seed, (seq_len, query_len) in enumerate(batch)]
        step = build_step(SHAPE, requests)
        backend.attend(step.queries, step.kv, step.batch, step.params)


def codes(name: str) -> None:
    """Few rows, and so many that a program adds all splits."""
    kernels, matrix = TritonKernels(), CODES[name]
    packed = kernels.pack_coded(matrix)
    for num_tokens in (1, 16, 1000):
        kernels.coded_linear(torch.zeros(num_tokens, matrix.shape[1], dtype=torch.bfloat16), packed)
    kernels.coded_gated_linear(torch.zeros(3, matrix.shape[1], dtype=torch.bfloat16), packed, packed, "silu")


def experts(name: str) -> None:
    """Of floats, or of the codes of that name."""
    kernels, matrix = TritonKernels(), CODES.get(name)
    each: Matrix | CodedMatrix = Matrix(torch.zeros(1024, 2048, dtype=torch.bfloat16))
    down: Matrix | CodedMatrix = Matrix(torch.zeros(2048, 1024, dtype=torch.bfloat16))
    if matrix is not None:
        each, down = matrix, random_coded(matrix.kind, (2048, 1024), 128, scales=torch.bfloat16)
    call = kernels.experts("silu", None, [ExpertWeights(each, each, down, None, None, None)] * 8)
    assert call is not None
    for num_tokens in (1, 1000):
        chosen = torch.zeros(num_tokens, 2, dtype=torch.int64)
        call(torch.zeros(num_tokens, 2048, dtype=torch.bfloat16), torch.zeros(num_tokens, 2), chosen)


def batch_of(starts: list[int], lengths: list[int]) -> AttentionBatch:
    return AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.ones(len(lengths), max(lengths) // 16 + 1, dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=max(b - a for a, b in itertools.pairwise(starts)),
        max_seq_len=max(lengths),
    )


def latents() -> None:
    """DeepSeek's sizes: one decode, and a chunk beside a long one."""
    state = Arena(build_layout([LatentSpec(512, 64, "bfloat16")], 16), 2, CPU).layers[0]
    assert isinstance(state, LayerLatents)
    for batch in (batch_of([0, 1], [9]), batch_of([0, 1, 40], [2000, 90])):
        queries = torch.zeros(int(batch.query_start[-1]), 16, 576, dtype=torch.bfloat16)
        TritonLatentBackend(CPU).attend(queries, state, batch, AttentionParams(16, 0.1))


def recurrent() -> None:
    """Granite 4's sizes, a gated delta rule, and a rate of each column, as of Mamba."""
    spec = RecurrentSpec(4352, 3, "bfloat16", (48, 64, 128))
    state = Arena(build_layout([spec], 16), 3, CPU).layers[0]
    assert isinstance(state, LayerRecurrent)
    backend, params = TritonRecurrentBackend(CPU), RecurrenceParams(torch.zeros(48), torch.zeros(48))
    for batch in (batch_of([0, 1], [9]), batch_of([0, 1, 40], [20, 39])):
        count, prepared = int(batch.query_start[-1]), backend.prepare(batch, state, ())
        q, v, a = (torch.zeros(count, *shape) for shape in ((1, 128), (48, 64), (48,)))
        for b in (None, a):
            backend.recur(RecurrenceInputs(q, q, v, a, b), params, state, prepared)
        scan = RecurrenceInputs(q, q, v, a, None)
        backend.recur(scan, RecurrenceParams(torch.zeros(48, 128), torch.zeros(48)), state, prepared)
        x, weight = torch.zeros(count, 4352, dtype=torch.bfloat16), torch.zeros(4, 4352)
        prepared.convolve(x, weight, None, state, has_activation=True)


def rows() -> None:
    """Qwen3-8B's sizes, of one token and of a chunk that begins at an odd address; and an element-wise product."""
    kernels = TritonKernels()
    hidden, weight, head = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((9, 4096), (4096,), (128,)))
    cache, table = torch.zeros(4, 8, 16, 128, dtype=torch.bfloat16), torch.zeros(50, 64)
    for first, count in ((0, 1), (1, 8)):
        tokens = slice(first, first + count)
        kernels.rms_norm(hidden[tokens], weight, 1e-6)
        kernels.rms_norm(hidden[tokens], weight, 1e-6, residual=hidden[tokens])
        wide = torch.zeros(count, 12288, dtype=torch.bfloat16)
        kernels.gated_product(wide, wide, "silu")
        q, k, v = (torch.zeros(count, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))
        vector = torch.zeros(9, dtype=torch.int64)[tokens]
        kernels.rope_and_write(q, k, v, table, table, vector, vector, cache, cache, q_norm=head, k_norm=head)
    kernels.gated_product(wide, wide, "gelu_tanh")
    kernels.rotate(q, table, table, vector)


SUITES: Mapping[str, Callable[[], None]] = {
    "attention": attention,
    "latents": latents,
    "recurrent": recurrent,
    "rows": rows,
    "experts": lambda: experts("floats"),
    "experts of int4": lambda: experts("int4"),
    "experts of fp8": lambda: experts("fp8"),
    **{name: lambda name=name: codes(name) for name in CODES},  # type: ignore[misc]
}
MODULES = ("triton_paged", "triton_coded", "triton_experts", "triton_latents", "triton_recurrent", "triton_rows")


def kernels_of(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if name.endswith("_kernel")]


def main() -> None:
    launches: list[dict[str, Any]] = []
    gpu = AbsentGpu()
    import_module("triton.runtime").driver.set_active(gpu)
    for name in MODULES:
        module = import_module(f"tandem.compute.cuda.{name}")
        for kernel in kernels_of(module):
            setattr(module, kernel, Compiled(getattr(module, kernel), gpu, launches))
    for argument in sys.argv[1:] or ["attention"]:
        suite, _, capability = argument.partition("@")
        gpu.capability = int(capability or 80)
        begin = len(launches)
        SUITES[suite]()
        for launch in launches[begin:]:
            launch["suite"] = suite
    sys.stdout.write(json.dumps(launches))


if __name__ == "__main__":
    main()
