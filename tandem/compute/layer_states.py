"""Views of one layer's state in the arena's pages, one class for each kind of state; layers write through them and
backends read them.

A slot is the place of a token: block number * block size + offset in the block; -1 = the token is not stored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandem.architecture.entry_states import EntriesSpec, EntryInputsSpec, RowsSpec
from tandem.architecture.state import ChosenKVSpec, IndexedLatentSpec, KVSpec, LatentSpec, RecurrentSpec, StateSpec
from tandem.kvcache.spec import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K and V of one layer; strided over pages, so never contiguous across blocks."""

    keys: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]


@dataclass(frozen=True, slots=True)
class LayerChosenKV(LayerKV):
    """K and V of one layer, and the index keys or summaries by which blocks are chosen (block-sparse attention). A
    summary has one row of `head_dim` numbers for each `span` tokens, such as the mean of their keys.
    """

    index_keys: torch.Tensor | None  # [num_blocks, block_size, index_dim]; None = there are none
    summaries: Mapping[str, torch.Tensor]  # by name, [num_blocks, num_kv_heads, block_size, head_dim / span]
    span: int  # tokens

    def write_index_keys(self, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores `keys` [num_tokens, index_dim] at `slot_mapping`, as `LayerRows.write`."""
        assert self.index_keys is not None
        _write_rows(self.index_keys, keys, slot_mapping)

    def summary(self, name: str) -> torch.Tensor:
        """The summary `name`, with a row for each `span` tokens: [num_blocks, num_kv_heads, block_size / span,
        head_dim]. `span` divides the block size.
        """
        numbers = self.summaries[name]
        num_blocks, num_heads, block_size, part = numbers.shape
        return numbers.view(num_blocks, num_heads, block_size // self.span, part * self.span)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """State of one layer with one row per token (`RowsSpec` and `EntryInputsSpec`)."""

    rows: torch.Tensor  # [num_blocks, block_size, size]

    def write(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores `rows` [num_tokens, size] of the tokens at `slot_mapping`.

        NOTE: tokens without a slot go to the null block, whose content is never read; so no shape depends on data.
        """
        _write_rows(self.rows, rows, slot_mapping)

    def read(self, block_tables: torch.Tensor, requests: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """A copy of the rows at positions `tokens` [n, count] of `requests` [n]: [n, count, size]."""
        block_size = self.rows.shape[1]
        return self.rows[block_tables[requests[:, None], tokens // block_size].long(), tokens % block_size]

    @property
    def as_kv(self) -> LayerKV:
        """The rows as keys of one head, which are its values too."""
        rows = self.rows.unsqueeze(1)
        return LayerKV(rows, rows)


@dataclass(frozen=True, slots=True)
class LayerLatents(LayerRows):
    """Latents of one layer, a row per token. A row's first `rank` numbers are the latent, which serves as the value."""

    rank: int


@dataclass(frozen=True, slots=True)
class LayerEntries:
    """Entries of one layer, one for each `span` tokens, in the block of the span's last token."""

    entries: torch.Tensor  # [num_blocks, block_size / span, size], rounded up
    index_keys: torch.Tensor | None  # [num_blocks, block_size / span, index_dim]; None = there are none
    span: int
    block_size: int

    def places(
        self, block_tables: torch.Tensor, requests: torch.Tensor, entries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks, and offsets in them (in entries), both int64, of a request's entries with indices `entries`, int64.
        `requests`: their rows of `block_tables`.
        """
        last = (entries + 1) * self.span - 1
        return block_tables[requests, last // self.block_size].long(), last % self.block_size // self.span


@dataclass(frozen=True, slots=True)
class LayerIndexedLatents(LayerLatents):
    """Latents of one layer, and the index keys by which queries choose tokens."""

    index_keys: torch.Tensor | None  # [num_blocks, block_size, index_dim]; None = another layer has them

    def write_index_keys(self, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores `keys` [num_tokens, index_dim] at `slot_mapping`, as `write`."""
        assert self.index_keys is not None
        _write_rows(self.index_keys, keys, slot_mapping)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecurrent:
    """Recurrent state of one layer: a matrix for each head, and the last inputs of the convolution (`columns`). Each
    block stores the state as it was after the block's last token.

    A block has `num_pages` pages. The matrices of the heads of all layers of the KV group fill them one after another,
    `heads_per_page` in a page, and this layer's begin with number `first_head`. Its columns lie in one page.

    Args:
        head_pages, head_slots: for each head the index of its page in a block, and its position in the page, int64.
    """

    matrices: torch.Tensor | None  # [num_pool_pages, heads_per_page, rows, columns] float32; None = there are none
    columns: torch.Tensor  # [num_pool_pages, taps - 1, channels], oldest first
    block_size: int
    num_pages: int  # of a block
    columns_page: int  # index of the page in the block, as `head_pages`
    first_head: int  # number of this layer's first head among those of the KV group
    head_pages: torch.Tensor  # [num_heads]
    head_slots: torch.Tensor  # [num_heads]

    def read_matrices(self, pages: torch.Tensor) -> torch.Tensor:
        """A copy of the matrices in blocks whose page numbers are `pages` [num_blocks, num_pages]: [num_blocks,
        num_heads, rows, columns].
        """
        assert self.matrices is not None
        return self.matrices[pages[:, self.head_pages], self.head_slots]

    def write_matrices(self, pages: torch.Tensor, matrices: torch.Tensor) -> None:
        """Writes matrices in the shape that `read_matrices` returns."""
        assert self.matrices is not None
        self.matrices[pages[:, self.head_pages], self.head_slots] = matrices

    def read_columns(self, pages: torch.Tensor) -> torch.Tensor:
        """A copy of the columns in blocks whose page numbers are `pages` [num_blocks, num_pages]: [num_blocks, taps -
        1, channels].
        """
        return self.columns[pages[:, self.columns_page]]

    def write_columns(self, pages: torch.Tensor, columns: torch.Tensor) -> None:
        """Writes columns in the shape that `read_columns` returns."""
        self.columns[pages[:, self.columns_page]] = columns


def _write_rows(blocks: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots, block_size = slot_mapping.clamp_min(0), blocks.shape[1]
    blocks[slots // block_size, slots % block_size] = rows


LayerState = LayerKV | LayerRows | LayerEntries | LayerRecurrent
View = Callable[[KVLayout, torch.Tensor, int, Any], LayerState]


def layer_state(layout: KVLayout, pages: torch.Tensor, layer: int) -> LayerState:
    """The view of a layer's state in `pages` [num_blocks, page_bytes]; raises `KeyError` for a kind that has none."""
    spec = layout.groups[layout.group_of_layer(layer)[0]].spec
    return _VIEWS[type(spec)](layout, pages, layer, spec)


def _recurrent(layout: KVLayout, pages: torch.Tensor, layer: int, spec: RecurrentSpec) -> LayerRecurrent:
    group, index = layout.group_of_layer(layer)
    placement = layout.placement(group)
    *_, columns = spec.planes
    place = placement.place(len(spec.planes) - 1, index, 0)
    numbers = pages[:, place.start : place.start + columns.num_bytes].view(TORCH_DTYPES[columns.dtype])
    num_heads = spec.heads[0] if spec.heads else 0
    matrices, per_page = None, 1
    if spec.heads:
        per_page = placement.per_page(0) * num_heads // placement.pieces[0].count
        end = per_page * placement.pieces[0].count * placement.pieces[0].num_bytes // num_heads
        matrices = pages[:, :end].view(torch.float32).unflatten(1, (per_page, *spec.heads[1:]))  # type: ignore[no-untyped-call]
    heads = index * num_heads + torch.arange(num_heads, device=pages.device)
    return LayerRecurrent(
        matrices,
        numbers.unflatten(1, columns.shape),  # type: ignore[no-untyped-call]
        layout.block_size,
        layout.groups[group].pages_per_block,
        place.page,
        index * num_heads,
        heads // per_page,
        heads % per_page,
    )


def _planes(layout: KVLayout, pages: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
    """Views [num_blocks, ...] of a layer's planes in blocks of one page, by name."""
    group_index, index = layout.group_of_layer(layer)
    spec = layout.groups[group_index].spec
    start = index * spec.block_bytes(layout.block_size)
    views = {}
    for plane in spec.planes:
        end = start + plane.block_bytes(layout.block_size)
        numbers = pages[:, start:end].view(TORCH_DTYPES[plane.dtype])
        views[plane.name] = numbers.unflatten(1, plane.block_shape(layout.block_size))  # type: ignore[no-untyped-call]
        start = end
    return views


def _entries(layout: KVLayout, pages: torch.Tensor, layer: int, spec: EntriesSpec) -> LayerEntries:
    planes = _planes(layout, pages, layer)
    return LayerEntries(planes["entries"], planes.get("index"), spec.span, layout.block_size)


def _in_one_page(view: Callable[[Any, Mapping[str, torch.Tensor]], LayerState]) -> View:
    """View of a state whose blocks have one page. `view` gets the layer's planes, each [num_blocks, ...], by name."""
    return lambda layout, pages, layer, spec: view(spec, _planes(layout, pages, layer))


_VIEWS: Mapping[type[StateSpec], View] = {
    KVSpec: _in_one_page(lambda spec, planes: LayerKV(planes["k"], planes["v"])),
    ChosenKVSpec: _in_one_page(
        lambda spec, planes: LayerChosenKV(
            planes["k"], planes["v"], planes.get("index"), {name: planes[name] for name in spec.summaries}, spec.span
        )
    ),
    LatentSpec: _in_one_page(lambda spec, planes: LayerLatents(planes["latent"], spec.rank)),
    IndexedLatentSpec: _in_one_page(
        lambda spec, planes: LayerIndexedLatents(planes["latent"], spec.rank, planes.get("index"))
    ),
    RowsSpec: _in_one_page(lambda spec, planes: LayerRows(planes["rows"])),
    EntryInputsSpec: _in_one_page(lambda spec, planes: LayerRows(planes["parts"])),
    EntriesSpec: _entries,
    RecurrentSpec: _recurrent,
}
