"""Every CUDA attention backend, alone and in captured decode graphs, beside a float64 oracle.

The arena is NaN except for what may be read. Other people's kernels may need finite memory or depend on the batch,
which is reported; ours may not. Without a GPU our Triton kernels are interpreted, on small shapes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from bench.gpu.floors import wall_s
from bench.gpu.results import Check, SectionResults
from bench.gpu.setting import Setting
from bench.report import Row
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionBackend
from tandem.compute.cuda.flashinfer_backend import FlashInferBackend
from tandem.compute.cuda.triton_backend import TritonBackend
from tandem.compute.cuda.varlen_backend import VarlenBackend
from tandem.compute.layer_states import LayerKV
from tandem.compute.step import AttentionBatch
from tandem.compute.torch.attention import ReferenceBackend
from tandem.compute.torch.kernels import TorchKernels
from tandem.engine.graphs import DecodeGraphs, padded_sizes
from tandem.engine.inputs import ModelInputs
from tandem.kvcache.spec import build_layout
from tests.helpers.attention_cases import RequestCase, Shape, Step, build_step, oracle, random_request

TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}
MIX = ((1300, 1), (700, 90), (1, 1), (257, 257), (40, 2), (64, 1), (2100, 1))  # (seq_len, query_len)
DRY_MIX = ((37, 1), (20, 9), (1, 1))
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
DRY_MODEL = Shape(num_heads=4, num_kv_heads=2, head_dim=16)
DRY_SHAPES = (DRY_MODEL, replace(DRY_MODEL, window=20, softcap=30.0, block_size=8))
FAR_BYTES = 12 << 30  # past 2 ** 32 elements of two bytes


def run(setting: Setting, results: SectionResults) -> None:
    """All backends on all shapes, then graphs, far blocks and the time of one layer."""
    device = setting.device
    if not setting.is_dry:
        torch.backends.cuda.matmul.allow_tf32 = False
    ours = TritonBackend(device)
    backends: list[AttentionBackend] = [ours, VarlenBackend(device), FlashInferBackend(device)]
    shape = DRY_MODEL if setting.is_dry else MODEL
    served = [each for each in backends if each.refuses(shape.spec, shape.block_size, 0.0) is None] or [ours]
    for backend in [ReferenceBackend(), *backends]:
        for each in DRY_SHAPES if setting.is_dry else SHAPES:
            with results.guarded(f"{backend.name} {describe(each)}"):
                results.check(check(setting, backend, each))
    for backend in [*served, ReferenceBackend()]:
        with results.guarded(f"{backend.name} in a large arena"):
            results.check(check_far_blocks(setting, backend, shape))
    for backend in served:
        if backend.graph_safe:
            with results.guarded(f"{backend.name} in graphs"):
                results.check(check_graphs(setting, backend, shape))
        with results.guarded(f"{backend.name} one layer"):
            time_backend(setting, results, backend, shape)


def describe(shape: Shape) -> str:
    parts = [f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}", f"block {shape.block_size}", shape.dtype]
    parts += [f"window {shape.window}"] if shape.window else []
    parts += [f"softcap {shape.softcap:g}"] if shape.softcap else []
    return " ".join(parts)


def attend(backend: AttentionBackend, step: Step) -> torch.Tensor:
    batch = backend.prepare(step.batch, step.kv, {step.params})
    return backend.attend(step.queries, step.kv, batch, step.params)


def check(setting: Setting, backend: AttentionBackend, shape: Shape) -> Check:
    """One backend on one shape; a refusal passes. NOTE: on the CPU ours would refuse what the interpreter serves."""
    name = f"{backend.name} attention"
    refused = backend.refuses(shape.spec, shape.block_size, shape.softcap)
    if refused is not None and not (setting.is_dry and backend.name in OURS):
        return Check(name, describe(shape), True, f"refused: {refused}")
    device, mix = setting.device, DRY_MIX if setting.is_dry else MIX
    requests = [random_request(shape, seq_len, query_len, seed) for seed, (seq_len, query_len) in enumerate(mix)]
    expected = torch.cat([oracle(shape, request) for request in requests]).to(device)
    step = build_step(shape, requests, device=str(device))
    out = attend(backend, step)
    reads_masked = bool(out.isnan().any())
    if reads_masked:
        make_finite(step)
        out = attend(backend, step)
    invariant = is_batch_invariant(device, backend, shape, requests, out, reads_masked)
    max_error = (out.double() - expected).abs().max().item()
    notes = [f"max error {max_error:.1e}", "batch-invariant" if invariant else "DEPENDS ON BATCH"]
    notes += ["reads masked slots"] if reads_masked else []
    is_strict = backend.name not in OURS or (invariant and not reads_masked)
    return Check(name, describe(shape), max_error <= TOLERANCE[shape.dtype] and is_strict, ", ".join(notes))


def make_finite(step: Step) -> None:
    step.kv.keys.nan_to_num_(0.0)
    step.kv.values.nan_to_num_(0.0)


def is_batch_invariant(
    device: torch.device,
    backend: AttentionBackend,
    shape: Shape,
    requests: Sequence[RequestCase],
    batched: torch.Tensor,
    finite: bool,
) -> bool:
    """Every request alone gives the bits that it gave in company."""
    start, same = 0, True
    for request in requests:
        step = build_step(shape, [request], device=str(device))
        if finite:
            make_finite(step)
        end = start + request.queries.shape[0]
        same &= torch.equal(attend(backend, step), batched[start:end])
        start = end
    return same


def check_graphs(setting: Setting, backend: AttentionBackend, shape: Shape) -> Check:
    """Captured decodes equal eager ones bit for bit, for batches that fit a size exactly and that do not."""
    device = setting.device
    spacing, longest = setting.pick(100, 9), setting.pick(4096, 64)
    most = setting.pick(8, 3)
    decodes = [random_request(shape, spacing * index + 1, 1, index) for index in range(most)]
    step = build_step(shape, decodes, device=str(device))
    queries = step.queries.new_zeros((most, *step.queries.shape[1:]))
    make_finite(step)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]) -> torch.Tensor:
        batch = backend.prepare(batches[0], step.kv, {step.params})
        return backend.attend(queries[: input_ids.shape[0]], step.kv, batch, step.params)

    graphs = DecodeGraphs(
        forward,
        padded_sizes(most),
        num_groups=1,
        block_size=shape.block_size,
        max_model_len=longest,
        device=device,
        capture=not setting.is_dry,
    )
    graphs.prepare()
    same = True
    for count in setting.pick_all((3, 8, 1, 5), (2, 3)):
        batch = _first(step.batch, count)
        queries.zero_()[:count] = step.queries[:count]
        rows = torch.arange(count, device=device)
        hidden = graphs.run(ModelInputs(rows, rows, (batch,), rows))
        expected = attend(backend, replace(step, queries=step.queries[:count], batch=batch))
        same &= hidden is not None and torch.equal(hidden, expected)
    return Check(f"{backend.name} in graphs", describe(shape), same, "bit-identical" if same else "DIFFERS")


def _first(batch: AttentionBatch, count: int) -> AttentionBatch:
    return replace(
        batch,
        query_start=batch.query_start[: count + 1],
        seq_lens=batch.seq_lens[:count],
        block_tables=batch.block_tables[:count],
        slot_mapping=torch.arange(count, device=batch.seq_lens.device),
    )


@torch.inference_mode()
def check_far_blocks(setting: Setting, backend: AttentionBackend, shape: Shape) -> Check:
    """Written by the decoder's kernels and read by `backend` at the end of an arena beyond 32-bit offsets."""
    device, seq_len = setting.device, setting.pick(300, 30)
    layout = build_layout([shape.spec] * 2, shape.block_size)
    num_blocks = setting.pick(FAR_BYTES, 1 << 18) // layout.page_bytes
    arena = Arena(layout, num_blocks, device)
    request = random_request(shape, seq_len, 1, 3)
    blocks = torch.arange(num_blocks - 1, num_blocks - 1 - -(-seq_len // shape.block_size), -1, device=device)
    positions = torch.arange(seq_len, device=device)
    slots = blocks[positions // shape.block_size] * shape.block_size + positions % shape.block_size
    kv = arena.layers[1]
    assert isinstance(kv, LayerKV)
    dtype = kv.keys.dtype
    keys, values = request.keys.to(device, dtype), request.values.to(device, dtype)
    cos = torch.ones(seq_len, shape.head_dim // 2, device=device)  # with a sine of 0: nothing is turned
    TorchKernels().rope_and_write(
        torch.zeros_like(keys), keys, values, cos, torch.zeros_like(cos), positions, slots, kv.keys, kv.values
    )
    batch = AttentionBatch(
        query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32, device=device),
        block_tables=blocks.to(torch.int32)[None, :],
        slot_mapping=slots[-1:],
        max_query_len=1,
        max_seq_len=seq_len,
    )
    out = attend(backend, Step(request.queries.to(device, dtype), kv, batch, shape.params))
    max_error = (out.double() - oracle(shape, request).to(device)).abs().max().item()
    case = f"{num_blocks} blocks of {layout.page_bytes} bytes"
    passed = max_error <= TOLERANCE[shape.dtype]
    return Check(f"{backend.name} in a large arena", case, passed, f"max error {max_error:.1e}")


def time_backend(setting: Setting, results: SectionResults, backend: AttentionBackend, shape: Shape) -> None:
    """One layer, for orientation: 16 decodes at 2,048 tokens, one prompt of 2,048."""
    length, device = setting.pick(2048, 9), setting.device
    cases = {
        f"decode 16 x {length}": [random_request(shape, length, 1, seed) for seed in range(setting.pick(16, 1))],
        f"prefill {length}": [random_request(shape, length, length, 0)],
    }
    for case, requests in cases.items():
        step = build_step(shape, requests, device=str(device))
        prepared = backend.prepare(step.batch, step.kv, {step.params})
        layer = partial(backend.attend, step.queries, step.kv, prepared, step.params)
        samples = wall_s(layer, device, setting.pick(50, 1), warm_up=setting.pick(5, 0))
        results.row(Row(f"one layer, {case}", backend.name, "attention", statistics.median(samples) * 1e6, "us"))
