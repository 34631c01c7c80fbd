"""All layers in one call give the bits of the layers one by one: hidden states and what is written into the arena.

The layers come one by one when attention has another name, though it is the same compiled attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.feed_forward import MixtureOfExpertsSpec
from tandem.architecture.fields import Fields
from tandem.architecture.model import LayerSpec
from tandem.architecture.state import KVSpec
from tandem.architecture.tensors import NormSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionBackend
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.native.attention import NativeBackend
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch, HiddenStates, WantedTokens
from tandem.compute.torch.attention import ReferenceBackend
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.base import StoredTensors, WeightFormat
from tandem.compute.weights.dense import DenseFormat
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.models import packed
from tandem.models.decoder import Decoder
from tandem.models.layers.rotary import build_rotary_tables
from tandem.models.layers.stack import build_stack
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.parameters import packed_names
from tests.helpers.rounded_weights import RoundedFormat, RoundedReader, Rounding

CPU = torch.device("cpu")
BLOCK_SIZE = 8
MAX_BLOCKS = 8
STEPS = ([5, 37, 20], [1, 1, 1], [1, 6, 1], [1])
"""Tokens of each request in each step."""


class OneByOne(NativeBackend):
    name = "native, one by one"


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return load_or_skip()


EXPERTS_THROUGHOUT: dict[str, Any] = {"mlp_only_layers": []}


def _save_experts_throughout(path: Path) -> Path:
    return checkpoints.save_tiny_qwen3_moe(path, **EXPERTS_THROUGHOUT)


BUILDERS = {name: build for name, build in checkpoints.BUILDERS.items() if name != "deepseek_v3"}  # it keeps no K and V
BUILDERS |= {"qwen3_moe-throughout": _save_experts_throughout}


@pytest.fixture(scope="module", params=sorted(BUILDERS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


INT8 = Rounding(CodeKind.INT8, None)
READERS = {
    "int8": RoundedReader(INT8, head=INT8),
    "int4": RoundedReader(Rounding(CodeKind.TABLE4, 32), is_packed=False),
    "fp8": RoundedReader(Rounding(CodeKind.E4M3, 16), left=("down_proj.weight", "w2.weight")),
    "int4, permuted": RoundedReader(Rounding(CodeKind.TABLE4, 16, has_offsets=True, is_permuted=True)),
    "int4 beside floats": RoundedReader(Rounding(CodeKind.TABLE4, 16), left=("v_proj.weight", "o_proj.weight")),
}


def _load(path: Path, dtype: str, kernels: NativeKernels, formats_of: FormatReader = read_formats) -> LoadedModel:
    return load_model(str(path), dtype=dtype, device=CPU, kernels=kernels, formats_of=formats_of)


def _run(
    decoder: Decoder,
    backend: AttentionBackend,
    asked: Sequence[Sequence[int]] | None = None,
    read: Sequence[HiddenStates] = (),
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The hidden states of every step, and the arena afterwards.

    `asked`: of how many of each request's last tokens. `read`: is filled in, one of each step.
    """
    layout = build_layout(decoder.spec.kv_specs, BLOCK_SIZE)
    arena = Arena(layout, 1 + len(STEPS[0]) * MAX_BLOCKS * len(layout.groups), CPU)
    tables = torch.randperm(arena.num_pages - 1, generator=torch.Generator().manual_seed(0)).int() + 1
    group_of = [layout.group_of_layer(layer)[0] for layer in range(layout.num_layers)]
    hidden = []
    steps = _inputs(layout, tables.view(len(layout.groups), -1, MAX_BLOCKS))
    for index, (input_ids, positions, batches) in enumerate(steps):
        by_layer = [batches[group] for group in group_of]
        wanted = None if asked is None else _wanted(by_layer, decoder.spec.wanted_states, asked[index])
        states = read[index] if read else None
        hidden.append(decoder.forward(input_ids, positions, arena.layers, by_layer, {KVSpec: backend}, wanted, states))
    return hidden, arena.pages


def _wanted(batches: Sequence[AttentionBatch], states: Sequence[int], nums: Sequence[int]) -> WantedTokens:
    """The last `nums` tokens of each request, of the layers' `states` that are read for them."""
    ends = batches[0].query_start[1:].tolist()
    rows = torch.cat([torch.arange(end - num, end) for end, num in zip(ends, nums, strict=True)])
    return WantedTokens(rows, {state: _part(batches[state], nums, rows) for state in states})


def _part(batch: AttentionBatch, nums: Sequence[int], rows: torch.Tensor) -> AttentionBatch:
    some = torch.tensor(nums) > 0
    lengths = torch.tensor(nums)[some]
    return AttentionBatch(
        query_start=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        seq_lens=batch.seq_lens[some],
        block_tables=batch.block_tables[some],
        slot_mapping=batch.slot_mapping[rows],
        max_query_len=max(nums),
        max_seq_len=batch.max_seq_len,
    )


def _inputs(
    layout: KVLayout, tables: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[AttentionBatch]]]:
    """Token ids, positions and one batch a KV group, for each step."""
    ends = [0] * len(STEPS[0])
    generator = torch.Generator().manual_seed(1)
    for lengths in STEPS:
        starts = ends[: len(lengths)]
        ends[: len(lengths)] = [start + length for start, length in zip(starts, lengths, strict=True)]
        ranges = [torch.arange(start, end) for start, end in zip(starts, ends, strict=False)]
        batches = [_batch(group, ranges, layout.block_size) for group in tables]
        positions = torch.cat(ranges)
        yield torch.randint(199, positions.shape, generator=generator), positions, batches


def _batch(table: torch.Tensor, ranges: Sequence[torch.Tensor], block_size: int) -> AttentionBatch:
    rows = zip(table, ranges, strict=False)
    slots = [row[at // block_size].long() * block_size + at % block_size for row, at in rows]
    lengths = [len(at) for at in ranges]
    seq_lens = [int(at[-1]) + 1 for at in ranges]
    return AttentionBatch(
        query_start=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=table[: len(ranges)],
        slot_mapping=torch.cat(slots),
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_stack_has_the_bits_of_its_layers(path: Path, dtype: str, kernels: NativeKernels) -> None:
    decoder = _load(path, dtype, kernels).decoder
    hidden, pages = _run(decoder, NativeBackend(CPU))
    expected, expected_pages = _run(decoder, OneByOne(CPU))
    assert all(torch.equal(step, right) for step, right in zip(hidden, expected, strict=True))
    assert torch.equal(pages, expected_pages)
    assert all(torch.isfinite(step).all() for step in hidden)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stack_of_codes_has_the_bits_of_its_layers(
    path: Path, dtype: str, reader: str, kernels: NativeKernels
) -> None:
    decoder = _load(path, dtype, kernels, READERS[reader]).decoder
    assert any(isinstance(weight.matrix, CodedMatrix) for weight in decoder.parameters.weights.values())
    hidden, pages = _run(decoder, NativeBackend(CPU))
    expected, expected_pages = _run(decoder, OneByOne(CPU))
    assert all(torch.equal(step, right) for step, right in zip(hidden, expected, strict=True))
    assert torch.equal(pages, expected_pages)
    assert all(torch.isfinite(step).all() for step in hidden)


def _read_rounding(fields: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Rows are rounded for int8 in keys and down, for int4 with offsets in the others."""
    four = Rounding(CodeKind.TABLE4, 32, has_offsets=True, rounds_rows=True)
    eight = Rounding(CodeKind.INT8, 32, rounds_rows=True)
    first = RoundedFormat(kernels, four, None, left=("k_proj.weight", "down_proj.weight"))
    return first, RoundedFormat(kernels, eight, eight), DenseFormat(kernels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [checkpoints.save_tiny_llama, _save_experts_throughout])
def test_a_stack_that_rounds_rows_has_the_bits_of_its_layers(
    tmp_path: Path, build: checkpoints.Builder, dtype: str, kernels: NativeKernels
) -> None:
    model = _load(build(tmp_path), dtype, kernels, _read_rounding)
    ropes = build_rotary_tables([mixer.rope for mixer in model.spec.mixers], 64, CPU)
    assert build_stack(model.spec, model.decoder.parameters, ropes, kernels) is not None
    hidden, pages = _run(model.decoder, NativeBackend(CPU))
    expected, expected_pages = _run(model.decoder, OneByOne(CPU))
    assert all(torch.equal(step, right) for step, right in zip(hidden, expected, strict=True))
    assert torch.equal(pages, expected_pages)


@pytest.mark.parametrize("reader", READERS)
def test_codes_give_the_hidden_states_of_their_numbers(path: Path, reader: str, kernels: NativeKernels) -> None:
    hidden, _ = _run(_load(path, "float32", kernels, READERS[reader]).decoder, NativeBackend(CPU))
    plain = load_model(str(path), dtype="float32", device=CPU, kernels=TorchKernels(), formats_of=READERS[reader])
    expected, _ = _run(plain.decoder, ReferenceBackend())
    for step, right in zip(hidden, expected, strict=True):
        torch.testing.assert_close(step, right, rtol=2e-4, atol=2e-4)


ASKED = ([1, 4, 20], [0, 1, 1], [0, 0, 0], [1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_those_asked_for_have_the_bits_they_have_among_all(path: Path, dtype: str, kernels: NativeKernels) -> None:
    """And the arena too: later steps read K and V of tokens that nobody asked for."""
    native = _load(path, dtype, kernels).decoder
    plain = load_model(str(path), dtype=dtype, device=CPU, kernels=TorchKernels()).decoder
    for decoder, backend in (
        (native, NativeBackend(CPU)),
        (native, OneByOne(CPU)),
        (plain, ReferenceBackend()),
    ):
        expected, expected_pages = _run(decoder, backend)
        hidden, pages = _run(decoder, backend, ASKED)
        for step, right, lengths, nums in zip(hidden, expected, STEPS, ASKED, strict=True):
            rows = [part[len(part) - num :] for part, num in zip(torch.split(right, lengths), nums, strict=True)]
            if decoder is native:
                assert torch.equal(step, torch.cat(rows))
            else:  # NOTE: PyTorch's products have other bits for other numbers of rows
                torch.testing.assert_close(step, torch.cat(rows), rtol=2e-2, atol=2e-2)
        assert torch.equal(pages, expected_pages)


def test_states_that_are_read_have_the_bits_of_the_layers(path: Path, kernels: NativeKernels) -> None:
    """Of all tokens, of those too that nobody asks for at the end; and reading changes no bit."""
    decoder = _load(path, "bfloat16", kernels).decoder
    layers = (0, decoder.spec.num_prompt_layers - 1)
    found: list[list[torch.Tensor]] = []
    for backend in (NativeBackend(CPU), OneByOne(CPU)):
        read = [HiddenStates(layers) for _ in STEPS]
        hidden, pages = _run(decoder, backend, ASKED, read)
        found.append([*hidden, pages, *(states.tensor for states in read)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    expected, _ = _run(decoder, NativeBackend(CPU), ASKED)
    assert all(torch.equal(one, other) for one, other in zip(expected, found[0], strict=False))
    assert [len(states.tensor) for states in read] == [sum(lengths) for lengths in STEPS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_change_no_bit(
    path: Path, dtype: str, kernels: NativeKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    decoder = load_model(str(path), dtype=dtype, device=CPU, kernels=kernels, packed_dir=tmp_path).decoder
    assert packed_names(decoder)
    expected, expected_pages = _run(_load(path, dtype, kernels).decoder, NativeBackend(CPU))
    for backend in (NativeBackend(CPU), OneByOne(CPU)):
        hidden, pages = _run(decoder, backend)
        assert all(torch.equal(step, right) for step, right in zip(hidden, expected, strict=True))
        assert torch.equal(pages, expected_pages)


def test_a_new_arena_is_noticed(tmp_path: Path, kernels: NativeKernels) -> None:
    """Pointers into the arena are remembered between steps."""
    decoder = _load(checkpoints.save_tiny_llama(tmp_path), "float32", kernels).decoder
    backend = NativeBackend(CPU)
    first, first_pages = _run(decoder, backend)
    again, pages = _run(decoder, backend)
    assert all(torch.equal(step, right) for step, right in zip(again, first, strict=True))
    assert torch.equal(pages, first_pages)


def test_biases_in_the_mlp_are_computed_layer_by_layer(tmp_path: Path, kernels: NativeKernels) -> None:
    model = _load(checkpoints.save_tiny_llama(tmp_path, mlp_bias=True), "float32", kernels)
    hidden, _ = _run(model.decoder, NativeBackend(CPU))
    expected, _ = _run(model.decoder, OneByOne(CPU))
    assert any(name.endswith("gate_proj.bias") for name in model.decoder.parameters.tensors)
    assert all(torch.equal(step, right) for step, right in zip(hidden, expected, strict=True))


@pytest.mark.parametrize(
    ("build", "options", "served"),
    [
        (checkpoints.save_tiny_llama, {}, True),
        (checkpoints.save_tiny_llama, {"head_dim": 20}, False),
        (checkpoints.save_tiny_llama, {"mlp_bias": True}, False),
        (checkpoints.save_tiny_mixtral, {}, True),
        (checkpoints.save_tiny_qwen3_moe, EXPERTS_THROUGHOUT, True),
        (checkpoints.save_tiny_qwen3_moe, {}, False),  # one layer has no experts
        (checkpoints.save_tiny_qwen2_moe, {}, False),  # shared experts
        (checkpoints.save_tiny_minimax_m2, {}, False),  # norms over all heads
        (checkpoints.save_tiny_gpt_oss, {}, False),  # sinks
        (checkpoints.save_tiny_deepseek_v3, {}, False),  # latents
        (checkpoints.save_tiny_gemma4, {}, False),  # per-layer embeddings, shared K and V
        (checkpoints.save_tiny_gemma4_moe, {}, False),  # blocks side by side
    ],
)
def test_what_has_a_stack(
    tmp_path: Path, kernels: NativeKernels, build: checkpoints.Builder, options: dict[str, Any], served: bool
) -> None:
    model = _load(build(tmp_path, **options), "float32", kernels)
    ropes = build_rotary_tables([mixer.rope for mixer in model.spec.mixers], 64, CPU)
    weights = model.decoder.parameters
    assert (build_stack(model.spec, weights, ropes, kernels) is not None) == served
    assert build_stack(model.spec, weights, ropes, TorchKernels()) is None


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("build", [checkpoints.save_tiny_llama, _save_experts_throughout])
def test_codes_have_a_stack(tmp_path: Path, kernels: NativeKernels, build: checkpoints.Builder, reader: str) -> None:
    model = _load(build(tmp_path), "float32", kernels, READERS[reader])
    ropes = build_rotary_tables([mixer.rope for mixer in model.spec.mixers], 64, CPU)
    is_served = reader != "fp8" or build is checkpoints.save_tiny_llama  # experts of floats and of codes are no call
    assert (build_stack(model.spec, model.decoder.parameters, ropes, kernels) is not None) == is_served


def test_a_router_with_a_norm_of_its_own_has_no_stack(tmp_path: Path, kernels: NativeKernels) -> None:
    model = _load(checkpoints.save_tiny_mixtral(tmp_path), "float32", kernels)
    ropes = build_rotary_tables([mixer.rope for mixer in model.spec.mixers], 64, CPU)
    norm = NormSpec("norm", model.spec.hidden_size, model.spec.final_norm.eps, weight=None)
    layers = tuple(_with_router_norm(layer, norm) for layer in model.spec.layers)
    assert build_stack(replace(model.spec, layers=layers), model.decoder.parameters, ropes, kernels) is None


def _with_router_norm(layer: LayerSpec, norm: NormSpec) -> LayerSpec:
    mixture = layer.feed_forward
    assert isinstance(mixture, MixtureOfExpertsSpec)
    return replace(layer, feed_forward=replace(mixture, router=replace(mixture.router, norm=norm)))
