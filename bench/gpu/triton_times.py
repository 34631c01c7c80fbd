"""Times of our Triton kernels at the sizes of published models, as shares of their floors.

The floor of a call: its weights or states read once at the copy bandwidth, or its arithmetic at the matmul rate.
Products by codes stand beside the product by bfloat16 weights that they take the place of.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from bench.gpu.floors import Floors, device_s, measure_floors
from bench.gpu.results import SectionResults
from bench.gpu.setting import Setting
from bench.gpu.triton_checks import batch_of, normal, random_experts, random_matrix
from bench.report import Row
from tandem.architecture.state import LatentSpec, RecurrentSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.cuda.latents import TritonLatentBackend
from tandem.compute.cuda.recurrent import TritonRecurrentBackend
from tandem.compute.layer_states import LayerLatents, LayerRecurrent
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams
from tandem.kvcache.spec import build_layout

SHAPES = ((4096, 4096), (12288, 4096), (4096, 12288))  # of Qwen3-8B: out, in
FORMATS = ("bf16", "int4 g128", "mxfp4", "int8 channel", "fp8 g128")
ROWS = (1, 4, 16, 64, 256, 2048)
REPEATS = 10
COPIES_BYTES = 256 << 20  # of weights in turn, so that none of them stays in the cache
HIDDEN, FFN, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8  # of Qwen3-30B-A3B
RANK, ROTARY, LATENT_HEADS = 512, 64, 128  # of DeepSeek-V3
HEADS, HEAD_ROWS, COLUMNS = 48, 64, 128  # of Granite 4 Micro


@torch.inference_mode()
def products(setting: Setting, results: SectionResults) -> None:
    """By each format and by bfloat16, from one row to a prefill chunk."""
    floors = measure_floors(setting)
    for shape in ((5, 128),) if setting.is_dry else SHAPES:
        for name in FORMATS:
            num_bytes, calls = _products(setting, name, shape)
            for num_rows in setting.pick_all(ROWS, (2,)):
                x = normal(setting, 1, num_rows, shape[1], dtype=_dtype(setting))
                workload = f"product {shape[0]} x {shape[1]}, {num_rows} rows"
                with results.guarded(f"{workload}, {name}"):
                    seconds = _seconds(setting, [partial(call, x) for call in calls])
                    flops = 2.0 * num_rows * shape[0] * shape[1]
                    results.row(_row(workload, name, seconds, num_bytes, flops, floors))


def _products(
    setting: Setting, name: str, shape: tuple[int, int]
) -> tuple[int, Sequence[Callable[[torch.Tensor], torch.Tensor]]]:
    """Bytes of a weight, and products by several that are equal."""
    if name == "bf16":
        weight = normal(setting, 0, *shape, dtype=_dtype(setting))
        return weight.nbytes, [partial(_linear, weight.clone()) for _ in range(_copies(setting, weight.nbytes))]
    kernels = TritonKernels()
    packed = kernels.pack_coded(random_matrix(setting, name, shape))
    copies = [replace(packed, codes=packed.codes.clone()) for _ in range(_copies(setting, packed.num_bytes))]
    return packed.num_bytes, [lambda x, matrix=matrix: kernels.coded_linear(x, matrix) for matrix in copies]


def _linear(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight)


@torch.inference_mode()
def experts(setting: Setting, results: SectionResults) -> None:
    """A layer of Qwen3-30B-A3B: the floor counts the experts that are hit."""
    floors = measure_floors(setting)
    hidden, ffn, count = (HIDDEN, FFN, NUM_EXPERTS) if not setting.is_dry else (32, 32, 8)
    for name in ("floats", "int4 g128"):
        found = random_experts(setting, name, count, hidden, ffn)
        call = TritonKernels().experts("silu", None, found)
        assert call is not None
        size = 3 * hidden * ffn * (2.0 if name == "floats" else 0.53)
        for num_rows in setting.pick_all(ROWS, (2,)):
            x, scores = (normal(setting, seed, num_rows, width, dtype=dtype) for seed, width, dtype in (
                (1, hidden, _dtype(setting)), (2, count, torch.float32)
            ))  # fmt: skip
            weights, chosen = (each.contiguous() for each in scores.softmax(1).topk(TOP_K))
            hit = len(set(chosen.flatten().tolist()))
            workload = f"experts {count} x {ffn}, {num_rows} rows"
            with results.guarded(f"{workload}, {name}"):
                seconds = _seconds(setting, [partial(call, x, weights, chosen)])
                flops = 6.0 * num_rows * TOP_K * hidden * ffn
                results.row(_row(workload, name, seconds, int(hit * size), flops, floors))


@torch.inference_mode()
def latents(setting: Setting, results: SectionResults) -> None:
    """Decodes of DeepSeek-V3's layer at several batches and contexts."""
    floors = measure_floors(setting)
    rank, rotary, heads = (RANK, ROTARY, LATENT_HEADS) if not setting.is_dry else (16, 8, 3)
    dtype = "float32" if setting.is_dry else "bfloat16"
    params, backend = AttentionParams(heads, (rank + rotary) ** -0.5), TritonLatentBackend(setting.device)
    for batch_size in setting.pick_all((1, 16, 64), (2,)):
        for context in setting.pick_all((1024, 8192, 32768), (40,)):
            num_blocks = batch_size * -(-context // 16) + 1
            state = Arena(build_layout([LatentSpec(rank, rotary, dtype)], 16), num_blocks, setting.device).layers[0]
            assert isinstance(state, LayerLatents)
            batch = batch_of(setting, ((context, 1),) * batch_size)
            queries = normal(setting, 0, batch_size, heads, rank + rotary, dtype=state.rows.dtype)
            workload = f"latents {heads} heads, {batch_size} x {context}"
            with results.guarded(workload):
                seconds = _seconds(setting, [partial(backend.attend, queries, state, batch, params)])
                num_bytes = batch_size * context * (rank + rotary) * state.rows.itemsize
                flops = 2.0 * batch_size * context * heads * (2 * rank + rotary)
                results.row(_row(workload, "triton", seconds, num_bytes, flops, floors))


@torch.inference_mode()
def recurrence(setting: Setting, results: SectionResults) -> None:
    """Granite 4's layer: decodes read and write their states; a prompt is carried token by token."""
    floors = measure_floors(setting)
    heads, rows, columns = (HEADS, HEAD_ROWS, COLUMNS) if not setting.is_dry else (4, 6, 5)
    spec = RecurrentSpec(heads * rows + 2 * columns, 3, "float32", (heads, rows, columns))
    params, backend = (
        RecurrenceParams(*torch.zeros(2, heads, device=setting.device)),
        TritonRecurrentBackend(setting.device),
    )
    for mix in (((40, 1),), ((40, 1),) * setting.pick(64, 2), ((setting.pick(2048, 20),) * 2,)):
        state = Arena(build_layout([spec], 16), 3 * len(mix) + mix[0][0] // 16 + 2, setting.device).layers[0]
        assert isinstance(state, LayerRecurrent)
        prepared = backend.prepare(batch_of(setting, mix), state, ())
        num_tokens = sum(asked for _, asked in mix)
        q, v, a = (normal(setting, 0, num_tokens, *size) for size in ((1, columns), (heads, rows), (heads,)))
        x, weight = normal(setting, 0, num_tokens, spec.channels), normal(setting, 1, 4, spec.channels)
        calls = {
            "recurrence": partial(backend.recur, RecurrenceInputs(q, q, v, a, None), params, state, prepared),
            "convolution": partial(prepared.convolve, x, weight, None, state),
        }
        for name, call in calls.items():
            workload = f"{name} {heads} x {rows} x {columns}, {len(mix)} requests of {mix[0][1]}"
            with results.guarded(workload):
                num_bytes = 8 * len(mix) * heads * rows * columns if name == "recurrence" else 2 * x.nbytes
                results.row(_row(workload, "triton", _seconds(setting, [call]), num_bytes, 0.0, floors))


def _dtype(setting: Setting) -> torch.dtype:
    return torch.float32 if setting.is_dry else torch.bfloat16


def _copies(setting: Setting, num_bytes: int) -> int:
    return setting.pick(1 + COPIES_BYTES // num_bytes, 1)


def _seconds(setting: Setting, calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, where all are made in turn. NOTE: launches are counted as far as the device waits for them."""

    def in_turn() -> None:
        for call in calls:
            call()

    return device_s(in_turn, setting.device, setting.pick(REPEATS, 1), warm_up=setting.pick(2, 0)) / len(calls)


def _row(workload: str, system: str, seconds: float, num_bytes: int, flops: float, floors: Floors) -> Row:
    floor_s = max(num_bytes / floors.bandwidth, flops / floors.matmul)
    return Row(workload, system, "call", seconds * 1e6, "us", floor_s * 1e6, floor_s / seconds)
