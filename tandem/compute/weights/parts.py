"""Specs of the tensors that describe a quantised weight in a checkpoint (codes, scales, zero points): names, rows and
dtypes; and checks of scales.

Such a tensor may be fused: it then describes several weights of the model, as those of q, k and v, one after another
along the outputs, and a spec selects the rows of one weight.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tandem.architecture.tensors import Source, TensorSpec
from tandem.compute.weights.base import StoredTensors
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError

_WEIGHT = ".weight"
FLOATS = ("float32", "bfloat16", "float16")  # dtypes of scales that are plain floats


def source_of(weight: TensorSpec) -> Source:
    """Name and rows that the weight would have in a checkpoint that is not quantised; the tensor need not exist."""
    return weight.source or Source(weight.name)


def module_of(weight: TensorSpec) -> str:
    """Name of the weight's module in the checkpoint."""
    return source_of(weight).tensor.removesuffix(_WEIGHT)


def part_name(weight: TensorSpec, suffix: str) -> str:
    """Name, in the model, of the weight's tensor with that suffix."""
    return f"{weight.name.removesuffix(_WEIGHT)}.{suffix}"


def tensor_name(weight: TensorSpec, suffix: str) -> str:
    """Name, in the checkpoint, of the weight's tensor with that suffix. Stacked experts have no module:
    `gate_up_proj_blocks`.
    """
    source = source_of(weight)
    return f"{module_of(weight)}{'.' if source.tensor.endswith(_WEIGHT) else '_'}{suffix}"


def part_spec(
    weight: TensorSpec,
    suffix: str,
    shape: tuple[int, ...],
    dtypes: Sequence[str],
    stored: StoredTensors | None,
    *,
    rows: int = 1,
    can_share: bool = False,
    words: int = 1,
    transposed: bool = False,
    is_shared: bool = False,
) -> TensorSpec:
    """Spec of the weight's tensor with that suffix, restricted to the weight's outputs.

    Args:
        shape: of the weight's rows of it, not of the whole fused tensor.
        dtypes: supported dtypes; the tensor keeps the one in which it is stored.
        stored: the checkpoint's tensors; None = it is not opened yet.
        rows: number of outputs that `words` rows of the tensor describe together.
        words: number of rows of the tensor for `rows` outputs.
        can_share: the first and the last row may also describe outputs of other weights, see `shared_row_span`.
        transposed: outputs are the tensor's last dimension.
        is_shared: the tensor has no dimension of outputs: it describes all weights of a fused tensor alike.

    Raises:
        UnsupportedCheckpointError: the tensor is fused, and the weight begins or ends within a row that cannot be
            shared.
    """
    source, name = source_of(weight), tensor_name(weight, suffix)
    if is_shared:
        part = Source(name)
    elif rows == 1 or stored is None or (source.start == 0 and source.stop is None and source.step == 1):
        part = replace(source, tensor=name, transposed=transposed)
    else:
        part = _rows_of_tensor(weight, name, rows, words, stored, can_share=can_share, transposed=transposed)
    return TensorSpec(part_name(weight, suffix), shape, part, code_dtype=_dtype(name, dtypes, stored))


def shared_row_span(weight: TensorSpec, rows: int) -> tuple[int, int]:
    """If each row of a tensor belongs to `rows` outputs of a fused weight: the number of rows with outputs of this
    weight, and the number of another weight's outputs in the first of them.
    """
    source = source_of(weight)
    is_evenly_cut = source.step != 1 or source.period is not None
    others = 0 if is_evenly_cut else source.start % rows
    return -(-(others + weight.shape[0]) // rows), others


def _rows_of_tensor(
    weight: TensorSpec, name: str, rows: int, words: int, stored: StoredTensors, *, can_share: bool, transposed: bool
) -> Source:
    """The part of tensor `name` that belongs to a weight that is a part of a fused one.

    Its last row may have fewer outputs, since a weight that begins within a row that cannot be shared is refused.
    """
    source, found = source_of(weight), stored.get(name)
    stop = source.start + weight.shape[0] if source.period is None else source.stop
    assert stop is not None
    first, end = source.start // rows * words, -(-stop * words // rows)
    is_last = found is not None and found.shape[-1 if transposed else -2 :][:1] == (end,)
    is_cut = source.start % rows > 0 or (stop % rows > 0 and not is_last)
    has_turns = source.step != 1 or source.period is not None
    is_turn_cut = source.step != 1 or any(bound % rows for bound in (source.start, stop, source.period or 0))
    if is_turn_cut if has_turns else is_cut and not can_share:
        turns = "" if source.period is None else f" of each {source.period}"
        raise UnsupportedCheckpointError(
            f"{name} has one row for {rows} outputs, and {weight.name} (outputs {source.start} to {stop - 1}{turns}) "
            "begins or ends between two; serve a checkpoint that leaves this module uncoded, or one in another format"
        )
    period = None if source.period is None else source.period // rows * words
    return Source(name, source.index, transposed, first, end, period=period, periods=source.periods)


def scalar(weight: TensorSpec, suffix: str, stored: StoredTensors | None) -> TensorSpec:
    """Spec of the weight's tensor with that suffix, one float for the whole module."""
    name = tensor_name(weight, suffix)
    found = None if stored is None else stored.get(name)
    shape = found.shape if found is not None and torch.Size(found.shape).numel() == 1 else (1,)
    return TensorSpec(part_name(weight, suffix), shape, Source(name), code_dtype=_dtype(name, FLOATS, stored))


def _dtype(name: str, dtypes: Sequence[str], stored: StoredTensors | None) -> str:
    """Dtype of the stored tensor if it is in `dtypes`, else the first of these: the loader compares both. Before a
    checkpoint is opened, the smallest, so that no model that fits in memory is refused.
    """
    if stored is None:
        return min(dtypes, key=lambda dtype: int(getattr(torch, dtype).itemsize))
    found = stored.get(name)
    dtype = "" if found is None else str(found.dtype).removeprefix("torch.")
    return dtype if dtype in dtypes else dtypes[0]


def check_scales(name: str, scales: torch.Tensor, *, can_be_zero: bool = False) -> None:
    """Raises `CorruptCheckpointError` if a scale is not a positive number, or 0 if that is allowed. `name`: for the
    message.
    """
    wide = scales.float()
    low, high = wide.aminmax()  # NOTE: NaN is an answer of both
    if not (low >= 0 if can_be_zero else low > 0) or not high < torch.inf:
        raise CorruptCheckpointError(
            f"{name} has scales from {float(low):g} to {float(high):g}, positive numbers are expected; "
            "download the weights again"
        )
