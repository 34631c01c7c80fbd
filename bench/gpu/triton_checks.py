"""Our Triton products, experts, latent attention and recurrence on the device, beside float64 or the reference.

Each also has to give a row the same bits alone and in company. Without a GPU they are interpreted, on small shapes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.results import Check, SectionResults
from bench.gpu.setting import Setting
from tandem.architecture.feed_forward import Clamp
from tandem.architecture.state import LatentSpec, RecurrentSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.cuda.latents import TritonLatentBackend
from tandem.compute.cuda.recurrent import TritonRecurrentBackend
from tandem.compute.latents import LatentsAsKV
from tandem.compute.layer_states import LayerLatents, LayerRecurrent
from tandem.compute.ops import ExpertWeights, Matrix
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams
from tandem.compute.step import AttentionBatch
from tandem.compute.torch.attention import ReferenceBackend
from tandem.compute.torch.recurrent import ReferenceRecurrentBackend
from tandem.kvcache.spec import build_layout
from tests.helpers.coded_matrices import E2M1, random_coded

BFLOAT16 = torch.bfloat16
FORMATS: Mapping[str, tuple[CodeKind, int, dict[str, Any]]] = {  # kind, group size (0 = a row), and what else it has
    "int4 g128": (CodeKind.TABLE4, 128, {"scales": BFLOAT16}),
    "int4 g32 zero points": (CodeKind.TABLE4, 32, {"scales": BFLOAT16, "offsets": torch.float32}),
    "mxfp4": (CodeKind.TABLE4, 32, {"table": E2M1, "scales": torch.float8_e8m0fnu}),
    "nvfp4": (CodeKind.TABLE4, 16, {"table": E2M1, "scales": torch.float8_e4m3fn, "factor": 0.3}),
    "nf4": (CodeKind.TABLE4, 64, {"table": torch.linspace(-1, 1, 16) ** 3}),
    "int8 channel": (CodeKind.INT8, 0, {"scales": BFLOAT16}),
    "int8 g128 zero points": (CodeKind.INT8, 128, {"offsets": BFLOAT16}),
    "int8 super-blocks": (CodeKind.INT8, 16, {"super_size": 256}),
    "fp8 g128": (CodeKind.E4M3, 128, {}),
    "fp8 tensor": (CodeKind.E4M3, 0, {"factor": 0.01}),
}
DECODES_AND_CHUNKS = ((1300, 1), (700, 90), (1, 1), (257, 257), (64, 1))  # (seq_len, query_len)
DRY_MIX = ((37, 1), (20, 9), (1, 1))


@torch.inference_mode()
def run(setting: Setting, results: SectionResults) -> None:
    """Every format, then experts, latents and recurrent layers."""
    dtypes = (torch.float32, torch.float16) if setting.is_dry else (BFLOAT16, torch.float16, torch.float32)
    for name in FORMATS:
        for dtype in dtypes[:1] if setting.is_dry else dtypes:
            with results.guarded(f"products, {name} {dtype}"):
                results.check(check_products(setting, name, dtype))
    for name in ("floats", "int4 g128", "fp8 g128"):
        with results.guarded(f"experts, {name}"):
            results.check(check_experts(setting, name))
    for kind in ("float32",) if setting.is_dry else ("bfloat16", "float32"):
        with results.guarded(f"latents {kind}"):
            results.check(check_latents(setting, kind))
    for is_delta in (False, True):
        with results.guarded(f"recurrence, {'delta' if is_delta else 'Mamba-2'}"):
            results.check(check_recurrence(setting, is_delta=is_delta))


def random_matrix(setting: Setting, name: str, shape: tuple[int, int], seed: int = 0) -> CodedMatrix:
    """In rows, on the device."""
    kind, group_size, options = FORMATS[name]
    matrix = random_coded(kind, shape, group_size or shape[1], seed=seed, **options)
    moved: dict[str, Any] = {key: tensor.to(setting.device) for key, tensor in matrix.tensors()}
    return replace(matrix, **moved)


def normal(setting: Setting, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(setting.device, dtype)


def is_invariant(call: Callable[[slice], torch.Tensor], num_rows: int) -> bool:
    """Some rows, alone and a few together, give the bits that they give in company of all."""
    whole = call(slice(0, num_rows))
    parts = (slice(0, 1), slice(num_rows // 2, num_rows // 2 + 13), slice(num_rows - 1, num_rows))
    return all(torch.equal(call(part), whole[part]) for part in parts)


def verdict(name: str, case: str, error: float, bound: float, *, invariant: bool) -> Check:
    note = "batch-invariant" if invariant else "DEPENDS ON BATCH"
    return Check(name, case, error <= bound and invariant, f"error {error:.1e} of {bound:.0e}, {note}")


def check_products(setting: Setting, name: str, dtype: torch.dtype) -> Check:
    """Relative to the sum of the magnitudes that are added up. NOTE: a table's numbers are rounded to `dtype`."""
    num_rows = setting.pick(300, 20)
    matrix = random_matrix(setting, name, (setting.pick(1040, 5), setting.pick(2336, 200)))
    kernels = TritonKernels()
    packed, x = kernels.pack_coded(matrix), normal(setting, 1, num_rows, matrix.shape[1], dtype=dtype)

    def call(rows: slice) -> torch.Tensor:
        return kernels.coded_linear(x[rows], packed, out_dtype=torch.float32)

    numbers = matrix.decode().double()
    magnitude = x.double().abs() @ numbers.abs().T + 1.0
    error = ((call(slice(0, num_rows)).double() - x.double() @ numbers.T).abs() / magnitude).max().item()
    is_rounded = name == "nf4" and dtype != torch.float32
    return verdict(
        "product by codes",
        f"{name} {dtype}",
        error,
        2**-8 if is_rounded else 1e-5,
        invariant=is_invariant(call, num_rows),
    )


def random_experts(setting: Setting, name: str, count: int, hidden: int, ffn: int) -> list[ExpertWeights]:
    """Of bfloat16 (float32 in a rehearsal), or of codes of that format."""

    def matrix(seed: int, outputs: int, inputs: int) -> Matrix | CodedMatrix:
        if name == "floats":
            dtype = torch.float32 if setting.is_dry else BFLOAT16
            return Matrix((torch.randn(outputs, inputs, device=setting.device) * inputs**-0.5).to(dtype))
        found = random_matrix(setting, name, (outputs, inputs), seed)
        return replace(found, factor=found.factor * inputs**-0.5)

    return [
        ExpertWeights(
            matrix(i, ffn, hidden), matrix(i + count, ffn, hidden), matrix(i + 2 * count, hidden, ffn), None, None, None
        )
        for i in range(count)
    ]


def check_experts(setting: Setting, name: str) -> Check:
    num_tokens, hidden, ffn = setting.pick(200, 20), setting.pick(512, 32), setting.pick(384, 32)
    count, top_k, clamp = 8, 3, Clamp(alpha=1.702, limit=4.0)
    experts = random_experts(setting, name, count, hidden, ffn)
    call = TritonKernels().experts("silu", clamp, experts)
    assert call is not None
    dtype = torch.float32 if setting.is_dry else BFLOAT16
    x, scores = normal(setting, 0, num_tokens, hidden, dtype=dtype), normal(setting, 1, num_tokens, count)
    weights, chosen = (each.contiguous() for each in scores.softmax(1).topk(top_k))

    def numbers(matrix: Any) -> torch.Tensor:
        found = matrix.decode() if isinstance(matrix, CodedMatrix) else matrix.tensor
        return found.double()

    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64, device=setting.device)
    for number, expert in enumerate(experts):
        gate, up = (x.double() @ numbers(each).T for each in (expert.gate, expert.up))
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        inner = ((up + 1) * gate * (clamp.alpha * gate).sigmoid()).to(dtype).double()
        share = (weights * (chosen == number)).sum(1, keepdim=True).double()
        expected += inner @ numbers(expert.down).T * share
    error = ((call(x, weights, chosen) - expected).abs() / (1 + expected.abs())).max().item()
    invariant = is_invariant(lambda rows: call(x[rows], weights[rows], chosen[rows]), num_tokens)
    return verdict("experts", name, error, 2e-2 if dtype == BFLOAT16 else 1e-4, invariant=invariant)


def batch_of(setting: Setting, mix: tuple[tuple[int, int], ...], block_size: int = 16) -> AttentionBatch:
    """Requests of (seq_len, query_len) whose blocks are 1, 2, ... in order."""
    counts = [-(-length // block_size) for length, _ in mix]
    tables = torch.zeros(len(mix), max(counts), dtype=torch.int32)
    first = 1
    for row, count in enumerate(counts):
        tables[row, :count] = torch.arange(first, first + count)
        first += count
    starts = torch.tensor([0, *(asked for _, asked in mix)]).cumsum(0).int()
    return AttentionBatch(
        query_start=starts.to(setting.device),
        seq_lens=torch.tensor([length for length, _ in mix], dtype=torch.int32, device=setting.device),
        block_tables=tables.to(setting.device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=setting.device),
        max_query_len=max(asked for _, asked in mix),
        max_seq_len=max(length for length, _ in mix),
    )


def check_latents(setting: Setting, dtype: str) -> Check:
    """Beside the reference in float32, over the same rows."""
    mix = DRY_MIX if setting.is_dry else DECODES_AND_CHUNKS
    rank, rotary, heads = setting.pick(512, 16), setting.pick(64, 8), setting.pick(128, 3)
    states = []
    for kind in (dtype, "float32"):
        arena = Arena(build_layout([LatentSpec(rank, rotary, kind)], 16), 200, setting.device)
        states.append(arena.layers[0])
    state, wide = states
    assert isinstance(state, LayerLatents)
    assert isinstance(wide, LayerLatents)
    state.rows.copy_(normal(setting, 0, *state.rows.shape))
    wide.rows.copy_(state.rows)
    queries = normal(setting, 1, sum(asked for _, asked in mix), heads, rank + rotary, dtype=state.rows.dtype)
    params, backend = AttentionParams(heads, (rank + rotary) ** -0.5), TritonLatentBackend(setting.device)
    batch = batch_of(setting, mix)
    found = backend.attend(queries, state, batch, params)
    expected = LatentsAsKV(ReferenceBackend()).attend(queries.float(), wide, batch, params)
    start, invariant = 0, True
    for row, request in enumerate(mix):
        alone = replace(batch_of(setting, (request,)), block_tables=batch.block_tables[row : row + 1])
        part = slice(start, start + request[1])
        invariant &= torch.equal(backend.attend(queries[part], state, alone, params), found[part])
        start += request[1]
    error = (found.float() - expected).abs().max().item()
    return verdict(
        "latent attention",
        f"{rank}+{rotary} {dtype}",
        error,
        3e-2 if dtype == "bfloat16" else 1e-4,
        invariant=invariant,
    )


def check_recurrence(setting: Setting, *, is_delta: bool) -> Check:
    """Beside the reference, which computes prompts chunk by chunk."""
    heads, rows, columns = setting.pick(48, 4), setting.pick(64, 6), setting.pick(128, 5)
    lengths = setting.pick(700, 40), setting.pick(13, 5)
    spec = RecurrentSpec(8, 3, "float32", (heads, rows, columns))
    outputs = []
    params = RecurrenceParams(normal(setting, 1, heads) * 0.5, normal(setting, 2, heads))
    q, k = (torch.nn.functional.normalize(normal(setting, seed, sum(lengths), 1, columns), dim=2) for seed in (3, 4))
    v, a = normal(setting, 5, sum(lengths), heads, rows), normal(setting, 6, sum(lengths), heads)
    b = normal(setting, 7, sum(lengths), heads) if is_delta else None

    def recur(backend: Any, mix: tuple[int, ...], part: slice) -> torch.Tensor:
        state = Arena(build_layout([spec], 16), 100, setting.device).layers[0]
        assert isinstance(state, LayerRecurrent)
        batch = backend.prepare(batch_of(setting, tuple((each, each) for each in mix)), state, ())
        inputs = RecurrenceInputs(q[part], k[part], v[part], a[part], None if b is None else b[part])
        out: torch.Tensor = backend.recur(inputs, params, state, batch)
        return out

    whole = slice(0, sum(lengths))
    backends = TritonRecurrentBackend(setting.device), ReferenceRecurrentBackend()
    outputs = [recur(backend, lengths, whole) for backend in backends]
    alone = recur(backends[0], lengths[1:], slice(lengths[0], None))
    error = (outputs[0] - outputs[1]).abs().max().item()
    case = f"{'delta' if is_delta else 'Mamba-2'}, {heads} x {rows} x {columns}"
    return verdict("recurrence", case, error, 1e-3, invariant=torch.equal(alone, outputs[0][lengths[0] :]))
