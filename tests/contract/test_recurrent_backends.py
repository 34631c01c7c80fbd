"""Backends of the recurrence beside its definition: groups of heads, delta, decays of columns by steps or by rates.

A block has several pages, which hold the heads of a layer and its neighbours.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.architecture.state import KVSpec, RecurrentSpec
from tandem.compute.arena import Arena
from tandem.compute.cuda.recurrent import TritonRecurrentBackend
from tandem.compute.layer_states import LayerRecurrent
from tandem.compute.native.recurrent import NativeRecurrentBackend
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams, advance_past_accepted
from tandem.compute.step import AttentionBatch, Drafted
from tandem.compute.torch.recurrent import ReferenceRecurrentBackend
from tandem.kvcache.spec import build_layout
from tests.helpers.native_kernels import load_or_skip

HEADS, GROUPS, ROWS, COLUMNS, TOKENS, BLOCK_SIZE = 4, 2, 6, 5, 90, 8
PAGES = 5
LAST_BLOCK = (TOKENS - 1) // BLOCK_SIZE


def pages_of(block_id: int) -> npt.NDArray[np.int32]:
    """No two neighbours; the first is the block itself."""
    others = 1000 - (block_id * (PAGES - 1) + np.arange(PAGES - 1)) if block_id else np.zeros(PAGES - 1)
    return np.concatenate(([block_id], others)).astype(np.int32)


BLOCK_PAGES = {block_id: pages_of(block_id) for block_id in range(2 * LAST_BLOCK + 3)}


def matrices_of(state: LayerRecurrent, block_ids: Iterable[int]) -> torch.Tensor:
    """[num_blocks, heads, rows, columns]."""
    return state.read_matrices(torch.tensor(np.stack([pages_of(block_id) for block_id in block_ids])).long())


def columns_of(state: LayerRecurrent, block_ids: Iterable[int]) -> torch.Tensor:
    """[num_blocks, taps - 1, channels]."""
    return state.read_columns(torch.tensor(np.stack([pages_of(block_id) for block_id in block_ids])).long())


def batch_of(start: int, stop: int) -> AttentionBatch:
    """One request whose blocks are 1, 2, ...; tokens `start` to `stop - 1` are computed."""
    return AttentionBatch(
        query_start=torch.tensor([0, stop - start], dtype=torch.int32),
        seq_lens=torch.tensor([stop], dtype=torch.int32),
        block_tables=torch.arange(1, LAST_BLOCK + 2, dtype=torch.int32)[None],
        slot_mapping=torch.arange(start, stop),
        max_query_len=stop - start,
        max_seq_len=stop,
        block_pages=BLOCK_PAGES,
    )


class Form(StrEnum):
    """Families of recurrences."""

    PLAIN = "a decay of each head"
    BY_RATE = "a rate of each column"
    DELTA = "delta"
    DELTA_BY_COLUMN = "delta, a decay of each column"


def inputs_of(form: Form, start: int, stop: int) -> RecurrenceInputs:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(TOKENS, *shape, generator=generator)

    q, k, v = draw(GROUPS, COLUMNS), draw(GROUPS, COLUMNS), draw(HEADS, ROWS)
    k = k / k.norm(dim=2, keepdim=True)
    a, b = draw(HEADS, COLUMNS) if form is Form.DELTA_BY_COLUMN else draw(HEADS), draw(HEADS)
    part = slice(start, stop)
    return RecurrenceInputs(
        q[part], k[part], v[part], a[part], b[part] if form in (Form.DELTA, Form.DELTA_BY_COLUMN) else None
    )


def recurrence(inputs: RecurrenceInputs, params: RecurrenceParams) -> tuple[torch.Tensor, torch.Tensor]:
    """As the definition reads, in float64: (what the queries read, the state after the last token)."""
    matrices, out = torch.zeros(HEADS, ROWS, COLUMNS, dtype=torch.float64), []
    for token in range(len(inputs.q)):
        q, k = (x[token].double().repeat_interleave(HEADS // GROUPS, 0) for x in (inputs.q, inputs.k))
        step = torch.nn.functional.softplus(inputs.a[token].double() + params.a_bias.double())
        decay = (-params.a_log.double().exp().view(HEADS, -1) * step.view(HEADS, -1)).exp()
        matrices = matrices * decay[:, None, :]
        added, beta = inputs.v[token].double(), step
        if inputs.b is not None:
            beta = inputs.b[token].double().sigmoid()
            added = added - (matrices * k[:, None, :]).sum(2)
        matrices = matrices + (beta[:, None] * added)[:, :, None] * k[:, None, :]
        out.append((matrices * q[:, None, :]).sum(2))
    return torch.stack(out), matrices


Backend = ReferenceRecurrentBackend | NativeRecurrentBackend | TritonRecurrentBackend
BACKENDS: dict[str, Callable[[torch.device], Backend]] = {
    "reference": ReferenceRecurrentBackend,
    "native": NativeRecurrentBackend,
    "triton": TritonRecurrentBackend,  # interpreted
}


def backend_of(name: str) -> Backend:
    if name == "native":
        load_or_skip()
    if name == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    return BACKENDS[name](torch.device("cpu"))


def params_of(form: Form) -> RecurrenceParams:
    generator = torch.Generator().manual_seed(8)
    shape = (HEADS, COLUMNS) if form is Form.BY_RATE else (HEADS,)
    a_log, a_bias = torch.randn(*shape, generator=generator), torch.randn(HEADS, COLUMNS, generator=generator)
    return RecurrenceParams(a_log, a_bias if form is Form.DELTA_BY_COLUMN else a_bias[:, 0])


def state_of() -> LayerRecurrent:
    """Of the second of three layers, whose heads lie in two pages. NOTE: a request that begins must not read what pages
    held before.
    """
    spec = RecurrentSpec(4, 3, "float32", (HEADS, ROWS, COLUMNS), ((HEADS, 1),))
    layout = build_layout([spec, spec, spec, KVSpec(1, 6, "float32")], BLOCK_SIZE)
    state = Arena(layout, 1001, torch.device("cpu")).layers[1]
    assert isinstance(state, LayerRecurrent)
    assert state.matrices is not None
    assert (state.num_pages, state.head_pages.tolist()) == (PAGES, [1, 1, 2, 2])
    state.matrices.fill_(torch.nan)
    return state


CUTS = [(90,), (1, 90), (37, 38, 64, 90), tuple(range(1, 91))]


@pytest.mark.parametrize(
    ("backend_name", "cuts"),
    [
        *((name, cuts) for name in ("reference", "native") for cuts in CUTS),
        ("triton", CUTS[2]),
        *(pytest.param("triton", cuts, marks=pytest.mark.slow) for cuts in CUTS if cuts != CUTS[2]),
    ],
    ids=lambda each: each if isinstance(each, str) else len(each),
)
@pytest.mark.parametrize("form", Form)
def test_any_cut_equals_the_recurrence(backend_name: str, form: Form, cuts: tuple[int, ...]) -> None:
    state, params, backend = state_of(), params_of(form), backend_of(backend_name)
    found = []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        batch = backend.prepare(batch_of(start, stop), state, ())
        found.append(backend.recur(inputs_of(form, start, stop), params, state, batch))
    expected, last = recurrence(inputs_of(form, 0, TOKENS), params)
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(matrices_of(state, [LAST_BLOCK + 1])[0].double(), last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend_name", ["reference", "native", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", Form)
def test_an_infinite_value_reaches_no_earlier_token(backend_name: str, form: Form) -> None:
    """Such as that of a draft token, which is then rejected."""
    state, params, backend, harmful = state_of(), params_of(form), backend_of(backend_name), 21
    inputs = inputs_of(form, 0, 30)
    expected, _ = recurrence(inputs, params)
    inputs.v[harmful] = torch.inf
    batch = backend.prepare(batch_of(0, 30), state, ())
    with np.errstate(invalid="ignore"):  # NOTE: the interpreter's numbers are NumPy's
        out = backend.recur(inputs, params, state, batch)
    torch.testing.assert_close(out[:harmful].double(), expected[:harmful], rtol=1e-4, atol=1e-4)
    assert not out[harmful:].isfinite().flatten(1).all(1).any()


@pytest.mark.parametrize("backend_name", ["native", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", Form)
def test_no_bit_depends_on_cuts_or_on_what_shares_the_step(backend_name: str, form: Form) -> None:
    """Two requests of the same tokens: one whole in one step; the other cut, its last part beside all of the first."""
    params, backend = params_of(form), backend_of(backend_name)
    cuts, state, found = (1, 2, 30, 37), state_of(), []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        batch = backend.prepare(batch_of(start, stop), state, ())
        found.append(backend.recur(inputs_of(form, start, stop), params, state, batch))
    whole, part = inputs_of(form, 0, TOKENS), inputs_of(form, cuts[-1], TOKENS)
    both = RecurrenceInputs(
        torch.cat((part.q, whole.q)),
        torch.cat((part.k, whole.k)),
        torch.cat((part.v, whole.v)),
        torch.cat((part.a, whole.a)),
        None if part.b is None or whole.b is None else torch.cat((part.b, whole.b)),
    )
    num_cut = TOKENS - cuts[-1]
    tables = torch.arange(1, 2 * LAST_BLOCK + 3, dtype=torch.int32).view(2, -1)
    step = AttentionBatch(
        query_start=torch.tensor([0, num_cut, num_cut + TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([TOKENS, TOKENS], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.arange(num_cut + TOKENS),
        max_query_len=TOKENS,
        max_seq_len=TOKENS,
        block_pages=BLOCK_PAGES,
    )
    out = backend.recur(both, params, state, backend.prepare(step, state, ()))
    assert torch.equal(torch.cat((*found, out[:num_cut])), out[num_cut:])
    first, second = (matrices_of(state, row.tolist()) for row in tables)
    assert torch.equal(first[-1], second[-1])


@pytest.mark.parametrize("backend_name", ["reference", "native", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_accepted", [0, 1, 9])
@pytest.mark.parametrize("form", Form)
def test_a_state_goes_on_past_accepted_drafts(backend_name: str, form: Form, num_accepted: int) -> None:
    """A token and nine drafts, which go beyond a block's end; the states are those of the accepted tokens alone."""
    params, backend, drafted, plain = params_of(form), backend_of(backend_name), state_of(), state_of()
    start, kept = 20, 21
    columns = torch.randn(TOKENS, drafted.columns.shape[2], generator=torch.Generator().manual_seed(9))
    for state, stop in ((drafted, start), (plain, start), (plain, kept + num_accepted)):
        at = 0 if stop == start else start
        batch = backend.prepare(batch_of(at, stop), state, ())
        batch.keep_columns(batch.with_columns(columns[at:stop], state), state)
        backend.recur(inputs_of(form, at, stop), params, state, batch)
    step = replace(batch_of(start, kept + 9), drafted=Drafted(np.array([9])))
    batch, inputs = backend.prepare(step, drafted, ()), inputs_of(form, start, kept + 9)
    batch.keep_columns(batch.with_columns(columns[start : kept + 9], drafted), drafted)
    batch.note_drafts(drafted, columns[start : kept + 9], (inputs, params))
    backend.recur(inputs, params, drafted, batch)
    advance_past_accepted(step, [num_accepted], {RecurrentSpec: backend}, drafted)
    page = 1 + (kept + num_accepted - 1) // BLOCK_SIZE
    blocks = range(page - (num_accepted == 9), page + 1)  # with the state at the end of the block before
    assert torch.equal(columns_of(drafted, blocks), columns_of(plain, blocks))
    exact = 0.0 if backend_name != "reference" else 1e-5
    torch.testing.assert_close(matrices_of(drafted, blocks), matrices_of(plain, blocks), rtol=exact, atol=exact)
