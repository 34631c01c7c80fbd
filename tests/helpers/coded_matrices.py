"""Random matrices of codes: every kind, group, dtype of scales, offsets and permutation."""

import torch

from tandem.compute.codes import CodedMatrix, CodeKind

INT4 = torch.arange(-8.0, 8.0)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
IQ4_NL = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def random_coded(
    kind: CodeKind,
    shape: tuple[int, int],
    group_size: int,
    *,
    seed: int = 0,
    scales: torch.dtype = torch.float32,
    offsets: torch.dtype | None = None,
    table: torch.Tensor = INT4,
    is_permuted: bool = False,
    factor: float = 1.0,
    super_size: int = 0,
) -> CodedMatrix:
    """Numbers of about the size of 1, edge values of the codes among them; no code is of NaN.

    `super_size`: inputs, whose scales and offsets are integers times a number that they share.
    """
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group_size)
    width = -(-inputs // 2) if kind is CodeKind.TABLE4 else inputs
    codes = torch.randint(0, 256, (outputs, width), generator=generator).to(torch.uint8)
    size = {CodeKind.TABLE4: table.abs().max().item(), CodeKind.INT8: 128.0, CodeKind.E4M3: 448.0}[kind]
    if kind is CodeKind.E4M3:
        codes[codes & 0x7F == 0x7F] = 0x7E
        codes[:, 0] = 1  # subnormal
    if kind is CodeKind.INT8:
        codes[:, 0] = 128
    wide = (torch.rand(outputs, groups, generator=generator) + 0.5) / size
    if scales is torch.float8_e4m3fn:  # NOTE: it has 4 bits of exponent
        wide *= size
        factor /= size
    values = None if offsets is None else torch.randn(outputs, groups, generator=generator).to(offsets)
    supers: dict[str, torch.Tensor | int] = {}
    if super_size:
        shape_of = outputs, -(-inputs // super_size)
        supers = {
            "super_size": super_size,
            "super_scales": (torch.rand(shape_of, generator=generator) / (64 * size)).half(),
            "super_offsets": (torch.randn(shape_of, generator=generator) / 64).half(),
        }
        wide, scales = torch.randint(-128, 128, (outputs, groups), generator=generator), torch.int8
        values = torch.randint(-128, 128, (outputs, groups), generator=generator).to(torch.int8)
    return CodedMatrix(
        kind=kind,
        shape=shape,
        codes=codes.view({CodeKind.INT8: torch.int8, CodeKind.E4M3: torch.float8_e4m3fn}.get(kind, torch.uint8)),
        scales=wide.to(scales),
        group_size=group_size,
        table=table if kind is CodeKind.TABLE4 else None,
        offsets=values,
        factor=factor,
        permutation=torch.randperm(inputs, generator=generator) if is_permuted else None,
        **supers,  # type: ignore[arg-type]
    )
