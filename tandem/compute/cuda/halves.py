"""Packing of quantised matrices into the order in which the Triton kernels read them, and the constants that describe a
matrix to them.

4-bit codes are packed in halves: for each span of inputs, a byte has a code of the first half and, in its upper bits,
the code at the same place in the second half. So a program multiplies each half by contiguous inputs. 8-bit codes stay
as they are.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch.nn import functional

from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.order import Order

SPAN: Final = 128  # inputs; less where a scale belongs to fewer
SPLIT: Final = 1024  # inputs whose sum begins at zero; the splits' sums are added in order
_LEAST_GROUP = 16  # fewest inputs of one matrix product
_FORMS = {CodeKind.INT8: 0, CodeKind.E4M3: 1}  # as in `triton_numbers`
_UINT4, _E2M1, _TABLE4 = 3, 4, 5
FLOATS: Final = 2  # form of matrices that are not quantised
_VALUE_FORMS = {torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 2, torch.int8: 3}  # of scales and offsets; else 0
_E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def refusal(matrix: CodedMatrix) -> str | None:
    """Reason why the Triton kernels cannot multiply by the matrix; None = they can."""
    group, (outputs, inputs) = matrix.group_size, matrix.shape
    if min(outputs, inputs) < 1:
        return f"a matrix of shape {matrix.shape} is empty"
    if group >= inputs or group % SPAN == 0 or (group >= _LEAST_GROUP and SPAN % group == 0):
        return None
    return f"groups of {group} inputs are neither {_LEAST_GROUP}, 32 or 64 nor a multiple of {SPAN}"


def span_of(matrix: CodedMatrix) -> int:
    """Number of inputs in a span, all of which one program reads at a time."""
    group = SPAN if matrix.group_size >= matrix.shape[1] else min(SPAN, matrix.group_size)
    return max(group, 2 * _LEAST_GROUP) if matrix.kind is CodeKind.TABLE4 else group


def sum_span_of(matrix: CodedMatrix) -> int:
    """Number of inputs, a power of two, whose sum is multiplied by an offset: a span, or its part that has its own."""
    span = span_of(matrix)
    return span if matrix.group_size >= matrix.shape[1] else min(span, matrix.group_size)


def halved(matrix: CodedMatrix) -> CodedMatrix:
    """A matrix of `Order.ROWS`, packed for the kernels; on the meta device only the shapes are computed."""
    if matrix.kind is not CodeKind.TABLE4:
        return replace(matrix, order=Order.STRIPS)
    span = span_of(matrix)
    num_spans = -(-matrix.shape[1] // span)
    if matrix.codes.is_meta:
        codes = matrix.codes.new_empty(matrix.shape[0], num_spans * span // 2)
        return replace(matrix, codes=codes, order=Order.STRIPS)
    plain = torch.stack((matrix.codes & 0x0F, matrix.codes >> 4), dim=-1).flatten(1)
    plain = functional.pad(plain, (0, num_spans * span - plain.shape[1]))
    lower, upper = plain.view(-1, num_spans, 2, span // 2).unbind(2)
    return replace(matrix, codes=(lower | upper << 4).flatten(1), order=Order.STRIPS)


def unpacked_rows(matrix: CodedMatrix, rows: torch.Tensor | None = None) -> CodedMatrix:
    """A packed matrix in `Order.ROWS` again, all rows or those with the indices `rows`, int64."""
    assert matrix.order is Order.STRIPS
    found = {name: value if rows is None else value[rows] for name, value in matrix.tensors() if name in _BY_OUTPUT}
    if matrix.kind is CodeKind.TABLE4:
        span, inputs = span_of(matrix), matrix.shape[1]
        codes = found["codes"].view(len(found["codes"]), -1, span // 2)
        plain = torch.cat((codes & 0x0F, codes >> 4), dim=2).flatten(1)
        plain = functional.pad(plain[:, :inputs], (0, inputs % 2))
        found["codes"] = plain[:, ::2] | plain[:, 1::2] << 4
    shape = (len(found["codes"]), matrix.shape[1])
    return replace(matrix, shape=shape, order=Order.ROWS, **found)  # type: ignore[arg-type]


_BY_OUTPUT = ("codes", "scales", "offsets", "super_scales", "super_offsets")


@dataclass(frozen=True, slots=True)
class TableForm:
    """Way of decoding codes; `form` as numbered in `triton_numbers`. `added`: number added to a code, if the table's
    numbers are consecutive integers.
    """

    form: int
    added: int = 0


class Tables:
    """Tables of 16 numbers on the device, one tensor for all matrices with equal tables, so that the form of each is
    known without reading from the device.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[float, ...], torch.Tensor] = {}
        self._forms: dict[int, TableForm] = {}

    def shared(self, table: torch.Tensor) -> torch.Tensor:
        """The tensor shared by all tables with these numbers. Waits for the device."""
        if table.is_meta or id(table) in self._forms:
            return table
        numbers = tuple(table.tolist())
        found = self._tables.setdefault((*numbers, float(table.get_device())), table)
        self._forms[id(found)] = _form_of(numbers)
        return found

    def form(self, matrix: CodedMatrix) -> TableForm:
        """Form of a matrix that has 8-bit codes, or a table returned by `shared`."""
        return TableForm(_FORMS[matrix.kind]) if matrix.table is None else self._forms[id(matrix.table)]


def _form_of(numbers: tuple[float, ...]) -> TableForm:
    first = numbers[0]
    if first == int(first) and abs(first) <= SPAN and all(each == first + i for i, each in enumerate(numbers)):
        return TableForm(_UINT4, int(first))
    if tuple(map(abs, numbers)) == _E2M1_NUMBERS * 2 and min(numbers[:8]) >= 0 >= max(numbers[8:]):
        return TableForm(_E2M1)
    return TableForm(_TABLE4)


def value_form(values: torch.Tensor | None) -> int:
    """Form in which scales or offsets are stored, as numbered in `triton_numbers`."""
    return 0 if values is None else _VALUE_FORMS.get(values.dtype, 0)
