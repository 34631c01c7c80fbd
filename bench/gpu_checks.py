"""Compares every CUDA attention backend and captured decode graphs with a float64 oracle: `python -m bench.gpu_checks`.

Prints a table, then one JSON line; exits 1 when a backend is wrong and does not refuse, 2 where there is no NVIDIA GPU.
The arena is NaN except for what may be read. Other people's kernels may need finite memory or depend on the batch,
which is reported; ours may not. Timings are of one layer, for orientation.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from bench.report import circumstances
from tandem.attention.base import AttentionBackend, AttentionBatch
from tandem.attention.flashinfer_backend import FlashInferBackend
from tandem.attention.reference import ReferenceBackend
from tandem.attention.triton_backend import TritonBackend
from tandem.attention.varlen_backend import VarlenBackend
from tandem.engine.graphs import DecodeGraphs, padded_sizes
from tandem.engine.inputs import ModelInputs
from tests.helpers.attention_cases import RequestCase, Shape, Step, build_step, oracle, random_request

TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}
MIX = ((1300, 1), (700, 90), (1, 1), (257, 257), (40, 2), (64, 1), (2100, 1))  # (seq_len, query_len)
OURS = ("triton",)
MODEL = Shape(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
SHAPES = (
    MODEL,
    replace(MODEL, num_heads=14, num_kv_heads=2, head_dim=64),
    replace(MODEL, head_dim=80, block_size=8),
    replace(MODEL, head_dim=96, block_size=128),
    replace(MODEL, num_heads=8, num_kv_heads=4, head_dim=256),
    replace(MODEL, window=100, block_size=32),
    replace(MODEL, window=512, softcap=50.0, block_size=64),
    replace(MODEL, dtype="float16"),
    replace(MODEL, dtype="float32", num_heads=8),
    replace(MODEL, dtype="float32", num_heads=8, head_dim=256),
)


@dataclass(frozen=True)
class Check:
    """One backend on one layer shape."""

    backend: str
    shape: str
    refused: str | None = None
    max_error: float | None = None
    reads_masked: bool = False
    batch_invariant: bool | None = None
    passed: bool = True


@dataclass(frozen=True)
class Timing:
    """One backend, one layer of MODEL."""

    backend: str
    decode_us: float  # 16 requests of 2,048 tokens
    prefill_us: float  # one request of 2,048 tokens


def describe(shape: Shape) -> str:
    parts = [f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}", f"block {shape.block_size}", shape.dtype]
    parts += [f"window {shape.window}"] if shape.window else []
    parts += [f"softcap {shape.softcap:g}"] if shape.softcap else []
    return " ".join(parts)


def attend(backend: AttentionBackend, step: Step) -> torch.Tensor:
    return backend.attend(step.queries, step.kv, step.batch, step.params)


def check(backend: AttentionBackend, shape: Shape) -> Check:
    refused = backend.refuses(shape.spec, shape.block_size, shape.softcap)
    if refused is not None:
        return Check(backend.name, describe(shape), refused)
    requests = [random_request(shape, seq_len, query_len, seed) for seed, (seq_len, query_len) in enumerate(MIX)]
    expected = torch.cat([oracle(shape, request) for request in requests]).cuda()
    step = build_step(shape, requests, device="cuda")
    out = attend(backend, step)
    reads_masked = bool(out.isnan().any())
    if reads_masked:
        make_finite(step)
        out = attend(backend, step)
    invariant = is_batch_invariant(backend, shape, requests, out, reads_masked)
    max_error = (out.double() - expected).abs().max().item()
    return Check(
        backend.name,
        describe(shape),
        max_error=max_error,
        reads_masked=reads_masked,
        batch_invariant=invariant,
        passed=max_error <= TOLERANCE[shape.dtype] and (backend.name not in OURS or (invariant and not reads_masked)),
    )


def make_finite(step: Step) -> None:
    step.kv.keys.nan_to_num_(0.0)
    step.kv.values.nan_to_num_(0.0)


def is_batch_invariant(
    backend: AttentionBackend, shape: Shape, requests: Sequence[RequestCase], batched: torch.Tensor, finite: bool
) -> bool:
    """Every request alone gives the bits that it gave in company."""
    start, same = 0, True
    for request in requests:
        step = build_step(shape, [request], device="cuda")
        if finite:
            make_finite(step)
        end = start + request.queries.shape[0]
        same &= torch.equal(attend(backend, step), batched[start:end])
        start = end
    return same


def check_graphs(backend: AttentionBackend) -> Check:
    """Captured decodes equal eager ones bit for bit, for batches that fit a size exactly and that do not."""
    decodes = [random_request(MODEL, 100 * index + 1, 1, index) for index in range(8)]
    step = build_step(MODEL, decodes, device="cuda")
    queries = step.queries.new_zeros((8, *step.queries.shape[1:]))
    make_finite(step)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]) -> torch.Tensor:
        return backend.attend(queries[: input_ids.shape[0]], step.kv, batches[0], step.params)

    graphs = DecodeGraphs(
        forward,
        padded_sizes(8),
        num_groups=1,
        block_size=MODEL.block_size,
        max_model_len=4096,
        device=torch.device("cuda"),
    )
    graphs.prepare()
    same = True
    for count in (3, 8, 1, 5):
        batch = replace(
            step.batch,
            query_start=step.batch.query_start[: count + 1],
            seq_lens=step.batch.seq_lens[:count],
            block_tables=step.batch.block_tables[:count],
            slot_mapping=torch.arange(count, device="cuda"),
        )
        queries.zero_()[:count] = step.queries[:count]
        rows = torch.arange(count, device="cuda")
        hidden = graphs.run(ModelInputs(rows, rows, (batch,), rows))
        expected = backend.attend(step.queries[:count], step.kv, batch, step.params)
        same &= hidden is not None and torch.equal(hidden, expected)
    return Check(f"{backend.name} in graphs", describe(MODEL), batch_invariant=same, passed=same)


def microseconds(call: Callable[[], object], repeats: int = 50) -> float:
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) * 1e6 / repeats


def time_backend(backend: AttentionBackend) -> Timing:
    decode = build_step(MODEL, [random_request(MODEL, 2048, 1, seed) for seed in range(16)], device="cuda")
    prefill = build_step(MODEL, [random_request(MODEL, 2048, 2048, 0)], device="cuda")
    return Timing(
        backend.name,
        decode_us=microseconds(lambda: attend(backend, decode)),
        prefill_us=microseconds(lambda: attend(backend, prefill)),
    )


def outcome(result: Check) -> str:
    if result.refused is not None:
        return f"refused: {result.refused}"
    error = "" if result.max_error is None else f"max error {result.max_error:.1e}"
    notes = [error, "batch-invariant" if result.batch_invariant else "DEPENDS ON BATCH"]
    notes += ["reads masked slots"] if result.reads_masked else []
    return f"{'ok' if result.passed else 'WRONG'}: {', '.join(note for note in notes if note)}"


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_checks needs an NVIDIA GPU and a CUDA build of PyTorch; nothing was checked", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    backends: list[AttentionBackend] = [TritonBackend(device), VarlenBackend(device), FlashInferBackend(device)]
    served = [backend for backend in backends if backend.refuses(MODEL.spec, MODEL.block_size, 0.0) is None]
    checks = [check(backend, shape) for backend in [ReferenceBackend(), *backends] for shape in SHAPES]
    checks += [check_graphs(backend) for backend in served if not isinstance(backend, FlashInferBackend)]
    timings = [time_backend(backend) for backend in served]
    for result in checks:
        print(f"{result.backend:<18} {result.shape:<48} {outcome(result)}")
    for timing in timings:
        print(f"{timing.backend:<18} decode {timing.decode_us:.0f} us, prefill {timing.prefill_us:.0f} us")
    report = {"checks": [asdict(result) for result in checks], "timings": [asdict(timing) for timing in timings]}
    print(json.dumps(circumstances() | {"cuda": torch.version.cuda} | report))
    return 0 if all(result.passed for result in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
