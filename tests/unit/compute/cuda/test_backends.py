"""Refusals and host-side preparation of the CUDA backends; their results are checked on a GPU, where there is one."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest
import torch
from torch.nn import attention

from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionBackend, AttentionParams
from tandem.compute.cuda.flashinfer_backend import FlashInferBackend, PagedIndices
from tandem.compute.cuda.varlen_backend import VarlenBackend, missing_arguments
from tandem.compute.layer_states import LayerKV
from tandem.compute.step import AttentionBatch
from tests.helpers.attention_cases import Shape, build_step, random_request

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPEC = KVSpec(num_kv_heads=2, head_dim=128, dtype="bfloat16")


@pytest.mark.parametrize("backend", [VarlenBackend(CPU), FlashInferBackend(CPU)], ids=lambda backend: backend.name)
def test_refuses_a_device_that_is_not_cuda(backend: AttentionBackend) -> None:
    assert backend.refuses(SPEC, 16, 0.0) == "device cpu is not CUDA"


def test_varlen_refuses_what_flash_attention_lacks() -> None:
    """Told from the spec alone, so that the answer is the same without a GPU."""
    backend = VarlenBackend(CUDA)
    assert "soft-cap" in str(backend.refuses(SPEC, 16, 50.0))
    assert "float32" in str(backend.refuses(KVSpec(2, 128, "float32"), 16, 0.0))


class FakeFlashAttention:
    """As much of an implementation as PyTorch's registry looks at."""

    def remove(self) -> None:
        pass


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that needs FA3, with nothing active; what becomes active is forgotten afterwards."""
    if (missing := missing_arguments()) is not None:
        pytest.skip(missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_IMPLS", {})
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_ACTIVE", None)


@pytest.mark.usefixtures("hopper")
def test_varlen_activates_the_flash_attention_that_it_needs() -> None:
    attention.register_flash_attention_impl("FA3", register_fn=FakeFlashAttention)
    backend = VarlenBackend(CUDA)
    assert "head_dim=320" in str(backend.refuses(KVSpec(2, 320, "bfloat16"), 16, 0.0))
    assert attention.current_flash_attention_impl() is None
    assert backend.refuses(SPEC, 16, 0.0) is None
    assert attention.current_flash_attention_impl() == "FA3"


@pytest.mark.usefixtures("hopper")
def test_varlen_refuses_where_its_flash_attention_cannot_be_had() -> None:
    def fails() -> FakeFlashAttention:
        raise ImportError("No module named 'flash_attn_interface'")

    assert "Unknown flash attention impl 'FA3'" in str(VarlenBackend(CUDA).refuses(SPEC, 16, 0.0))
    attention.register_flash_attention_impl("FA3", register_fn=fails)
    reason = str(VarlenBackend(CUDA).refuses(SPEC, 16, 0.0))
    assert "No module named 'flash_attn_interface'; install" in reason


@pytest.mark.usefixtures("hopper")
def test_varlen_leaves_another_flash_attention_active() -> None:
    for name in ("FA3", "FA4"):
        attention.register_flash_attention_impl(name, register_fn=FakeFlashAttention)
    attention.activate_flash_attention_impl("FA4")
    assert "active: FA4" in str(VarlenBackend(CUDA).refuses(SPEC, 16, 0.0))
    assert attention.current_flash_attention_impl() == "FA4"


def test_varlen_call_matches_this_pytorch() -> None:
    """On meta tensors: argument names, types and the shape of the result, with no kernel run."""
    if (missing := missing_arguments()) is not None:
        pytest.skip(missing)
    pages = torch.empty(9, 2, 2, 16, 128, dtype=torch.bfloat16, device="meta")
    batch = AttentionBatch(
        query_start=torch.empty(3, dtype=torch.int32, device="meta"),
        seq_lens=torch.empty(2, dtype=torch.int32, device="meta"),
        block_tables=torch.empty(2, 4, dtype=torch.int32, device="meta"),
        slot_mapping=torch.empty(5, dtype=torch.int64, device="meta"),
        max_query_len=4,
        max_seq_len=50,
    )
    queries = torch.empty(5, 8, 128, dtype=torch.bfloat16, device="meta")
    kv = LayerKV(pages[:, 0], pages[:, 1])
    for window in (None, 20):
        out = VarlenBackend(CUDA).attend(queries, kv, batch, AttentionParams(8, 0.1, window))
        assert (out.shape, out.dtype) == (queries.shape, queries.dtype)


@pytest.mark.parametrize("window", [None, 1, 16, 21, 40])
def test_paged_indices_hold_the_visible_blocks_in_order(window: int | None) -> None:
    shape = Shape(window=window, block_size=8)
    mix = ((70, 1), (37, 9), (1, 1), (24, 24), (33, 1), (40, 8))
    requests = [random_request(shape, seq_len, query_len, seed) for seed, (seq_len, query_len) in enumerate(mix)]
    batch = build_step(shape, requests).batch
    pages = PagedIndices.of(batch, shape.block_size, window)
    for row, (seq_len, query_len) in enumerate(mix):
        first = shape.spec.needed(seq_len - query_len) // shape.block_size
        used = batch.block_tables[row, first : (seq_len - 1) // shape.block_size + 1].tolist()
        start, end = pages.indptr[row : row + 2].tolist()
        assert pages.indices[start:end].tolist() == used
        assert 0 not in used
        assert (end - start - 1) * shape.block_size + pages.last_page_len[row] == seq_len - first * shape.block_size
    assert pages.indptr.dtype == pages.indices.dtype == pages.last_page_len.dtype == torch.int32


class FakeWrapper:
    """FlashInfer's, as far as it is called: `run` tells which plan it would compute with."""

    made: ClassVar[list["FakeWrapper"]] = []

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        self.made.append(self)
        self.planned: tuple[int, float, int] | None = None

    def plan(self, query_start: torch.Tensor, *arguments: object, sm_scale: float, **options: object) -> None:
        self.planned = (int(query_start[-1]), sm_scale, cast(int, options["window_left"]))

    def run(self, queries: torch.Tensor, kv: object) -> tuple[int, float, int] | None:
        return self.planned


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWrapper]:
    """Those that are made, by a FlashInfer that is none."""
    monkeypatch.setattr(FakeWrapper, "made", [])
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=FakeWrapper))
    return FakeWrapper.made


def test_flashinfer_plans_once_for_layers_that_are_alike(wrappers: list[FakeWrapper]) -> None:
    """Each attends with the plan of its batch and parameters, whatever was planned in between."""
    backend, shape = FlashInferBackend(CPU), Shape(num_heads=2, num_kv_heads=1)
    steps = [build_step(shape, [random_request(shape, 9, num_tokens, 0)]) for num_tokens in (1, 4)]
    sharper = replace(shape.params, scale=2.0)
    first, second = (backend.prepare(step.batch, step.kv, {shape.params, sharper}) for step in steps)
    assert len(wrappers) == 4
    for batch, num_tokens in ((first, 1), (second, 4)):
        for params in (shape.params, sharper, shape.params):
            ran = backend.attend(steps[0].queries, steps[0].kv, batch, params)
            assert cast(object, ran) == (num_tokens, params.scale, -1)
    assert len(wrappers) == 4


def test_flashinfer_plans_in_the_wrapper_of_a_batch_that_is_gone(wrappers: list[FakeWrapper]) -> None:
    backend, shape = FlashInferBackend(CPU), Shape()
    step = build_step(shape, [random_request(shape, 9, 1, 0)])
    kept = backend.prepare(step.batch, step.kv, {shape.params})
    for _ in range(3):
        assert backend.prepare(step.batch, step.kv, {shape.params}).plans.keys() == {shape.params}
    assert len(wrappers) == 2
    assert kept.plans[shape.params].wrapper is wrappers[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_backend_on_a_gpu() -> None:
    """In a process of its own, because this one interprets Triton."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.gpu_checks"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the refusal on machines without an NVIDIA GPU")
def test_gpu_checks_say_so_without_a_gpu() -> None:
    command = [sys.executable, "-m", "bench.gpu_checks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stderr
