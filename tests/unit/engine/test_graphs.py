"""Padding and selection of decode graphs, on CPU with capture off. Capture itself: `bench/gpu_checks.py`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tandem.compute.step import AttentionBatch
from tandem.compute.torch.attention import ReferenceBackend
from tandem.engine.current_device import current_device
from tandem.engine.graphs import DecodeGraphs, ForwardFunction, padded_sizes
from tandem.engine.inputs import ModelInputs
from tests.helpers.attention_cases import Shape, build_step, random_request

BLOCK_SIZE = 16
MAX_MODEL_LEN = 128


@pytest.mark.parametrize(
    ("max_num_requests", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (16, (1, 2, 4, 8, 16)), (40, (1, 2, 4, 8, 16, 32, 40))],
)
def test_padded_sizes(max_num_requests: int, sizes: tuple[int, ...]) -> None:
    assert padded_sizes(max_num_requests) == sizes


def decode_inputs(num_requests: int, max_seq_len: int = 40, max_query_len: int = 1, num_groups: int = 1) -> ModelInputs:
    rows = torch.arange(num_requests)
    batch = AttentionBatch(
        query_start=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens=(10 + rows).to(torch.int32),
        block_tables=torch.full((num_requests, 3), 7, dtype=torch.int32),
        slot_mapping=100 + rows,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    return ModelInputs(input_ids=50 + rows, positions=9 + rows, batches=(batch,) * num_groups, sample_rows=rows)


class Recorder:
    """A model that keeps what it was given, in copies, and answers with the token ids."""

    def __init__(self) -> None:
        self.input_ids = torch.empty(0)
        self.positions = torch.empty(0)
        self.batches: list[AttentionBatch] = []

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]
    ) -> torch.Tensor:
        self.input_ids, self.positions = input_ids.clone(), positions.clone()
        self.batches = [
            AttentionBatch(
                batch.query_start.clone(),
                batch.seq_lens.clone(),
                batch.block_tables.clone(),
                batch.slot_mapping.clone(),
                batch.max_query_len,
                batch.max_seq_len,
            )
            for batch in batches
        ]
        return input_ids[:, None].float()


def graphs(forward: ForwardFunction, max_num_requests: int = 8, num_groups: int = 1) -> DecodeGraphs:
    built = DecodeGraphs(
        forward,
        padded_sizes(max_num_requests),
        num_groups=num_groups,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        device=torch.device("cpu"),
        capture=False,
    )
    built.prepare()
    return built


def test_pads_to_the_smallest_size_that_fits() -> None:
    model = Recorder()
    hidden = graphs(model).run(decode_inputs(3))
    assert hidden is not None
    assert hidden[:, 0].tolist() == [50, 51, 52]
    assert model.input_ids.tolist() == [50, 51, 52, 0]
    assert model.positions.tolist() == [9, 10, 11, 0]


def test_padding_rows_are_one_token_on_the_null_block() -> None:
    """Also after a larger and longer batch has used the same rows."""
    model = Recorder()
    pool = graphs(model, num_groups=2)
    pool.run(decode_inputs(8, num_groups=2))
    pool.run(decode_inputs(3, num_groups=2))
    assert len(model.batches) == 2
    for batch in model.batches:
        assert batch.query_start.tolist() == [0, 1, 2, 3, 4]
        assert batch.seq_lens.tolist() == [10, 11, 12, 1]
        assert batch.slot_mapping.tolist() == [100, 101, 102, -1]
        assert batch.block_tables[:3, :3].eq(7).all()
        assert batch.block_tables[:3, 3:].eq(0).all()
        assert batch.block_tables[3].eq(0).all()
        assert batch.block_tables.shape[1] == MAX_MODEL_LEN // BLOCK_SIZE


def test_launch_lengths_do_not_depend_on_the_batch() -> None:
    model = Recorder()
    graphs(model).run(decode_inputs(3, max_seq_len=40))
    assert (model.batches[0].max_query_len, model.batches[0].max_seq_len) == (1, MAX_MODEL_LEN)


@pytest.mark.parametrize(
    "inputs",
    [decode_inputs(9), decode_inputs(2, max_query_len=5), decode_inputs(2, max_seq_len=MAX_MODEL_LEN + 1)],
    ids=["too many requests", "prefill tokens", "too long"],
)
def test_leaves_other_steps_to_the_caller(inputs: ModelInputs) -> None:
    model = Recorder()
    assert graphs(model).run(inputs) is None
    assert not model.batches


@pytest.mark.parametrize("window", [None, 20])
def test_attention_over_padded_rows_equals_unpadded(window: int | None) -> None:
    """The null block is NaN here, and padding rows read it: nothing of theirs may reach a real row."""
    shape = Shape(window=window, block_size=BLOCK_SIZE)
    step = build_step(shape, [random_request(shape, seq_len, 1, seq_len) for seq_len in (1, 60, 33)])
    queries = torch.cat([step.queries, torch.zeros(5, *step.queries.shape[1:])])

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]) -> torch.Tensor:
        return ReferenceBackend().attend(queries[: len(input_ids)], step.kv, batches[0], step.params)

    rows = torch.arange(3)
    batch = AttentionBatch(
        step.batch.query_start, step.batch.seq_lens, step.batch.block_tables, rows, 1, step.batch.max_seq_len
    )
    hidden = graphs(forward).run(ModelInputs(rows, rows, (batch,), rows))
    assert hidden is not None
    assert torch.equal(hidden, ReferenceBackend().attend(step.queries, step.kv, step.batch, step.params))


def test_current_device_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda:0")]

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", chosen)
    with current_device(torch.device("cuda:1")):
        assert current[-1] == torch.device("cuda:1")
    with current_device(torch.device("cpu")):
        assert current == [torch.device("cuda:0")]


def test_captures_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    captured: list[tuple[int, list[torch.device]]] = []

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Capturing(DecodeGraphs):
        def _capture_size(self, size: int, pool: Any) -> Any:
            captured.append((size, list(current)))

    monkeypatch.setattr("tandem.engine.graphs.current_device", chosen)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: list(current))
    device = torch.device("cpu")
    Capturing(Recorder(), (1, 2), num_groups=1, block_size=BLOCK_SIZE, max_model_len=64, device=device).prepare()
    assert captured == [(2, [device]), (1, [device])]
