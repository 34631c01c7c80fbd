"""From a checkpoint's tensors to the parameters a configuration calls for: each there, of the right shape, no other.

A tensor that already has the wanted dtype and device stays a view of the mapped file. Any other is copied in pieces,
so that loading never holds much more than the parameters themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from tandem.architecture.model import EMBEDDING, HEAD, ModelSpec
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.kernels.huge_pages import advise_huge_pages
from tandem.models.checkpoint import Checkpoint

_PIECE_BYTES = 4 << 20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)

Sources = Mapping[str, str]
"""Parameter name -> the name of the tensor in the checkpoint."""


def match_parameters(
    checkpoint: Checkpoint, spec: ModelSpec, parameter_name: Callable[[str], str | None]
) -> tuple[ModelSpec, Sources]:
    """Which tensor becomes which parameter; the configuration comes back with `tie_word_embeddings` as it really is.

    Raises:
        CorruptCheckpointError: a tensor is missing or has the wrong shape.
        UnsupportedCheckpointError: a tensor that the configuration has no place for, or a dtype that is not served.
    """
    sources = _by_parameter(checkpoint, parameter_name)
    if spec.tie_word_embeddings:
        spec, sources = _resolve_tie(checkpoint, spec, sources)
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
    _check_names(checkpoint, sources, shapes)
    for name, shape in shapes.items():
        _check_tensor(sources[name], checkpoint.tensor(sources[name]), shape)
    return spec, sources


def load_parameters(
    checkpoint: Checkpoint, sources: Sources, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The parameters, of `dtype` on `device`."""
    parameters = {name: load_parameter(checkpoint, source, dtype, device) for name, source in sources.items()}
    checkpoint.release()
    return parameters


def _by_parameter(checkpoint: Checkpoint, parameter_name: Callable[[str], str | None]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for name in checkpoint.names:
        ours = None if name.endswith(_HARMLESS_SUFFIXES) else parameter_name(name)
        if ours is not None and sources.setdefault(ours, name) != name:
            raise CorruptCheckpointError(f"{checkpoint.directory} has {ours} twice, as {sources[ours]} and as {name}")
    return sources


def _resolve_tie(checkpoint: Checkpoint, spec: ModelSpec, sources: dict[str, str]) -> tuple[ModelSpec, dict[str, str]]:
    """As transformers has it: with both tensors present they are tied only if equal; with one, it serves as both."""
    if HEAD not in sources:
        return spec, sources
    if EMBEDDING in sources and not _are_equal(checkpoint, sources[EMBEDDING], sources[HEAD]):
        return replace(spec, tie_word_embeddings=False), sources
    embedding = sources.get(EMBEDDING, sources[HEAD])
    return spec, {name: sources[name] for name in sources if name != HEAD} | {EMBEDDING: embedding}


def _are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    a, b = checkpoint.tensor(first), checkpoint.tensor(second)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.data_ptr() == b.data_ptr():
        return True
    rows, row_bytes, step = _pieces(a)
    del a, b
    for start in range(0, rows, step):
        part = slice(start, start + step)
        if not torch.equal(checkpoint.tensor(first)[part], checkpoint.tensor(second)[part]):
            return False
        checkpoint.touched(2 * step * row_bytes)
    return True


def _check_names(checkpoint: Checkpoint, sources: Sources, shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in shapes if name not in sources]
    if missing:
        raise CorruptCheckpointError(
            f"{checkpoint.directory} lacks {_some(missing)}, which config.json calls for; download the weights again"
        )
    extra = [source for name, source in sources.items() if name not in shapes]
    if extra:
        raise UnsupportedCheckpointError(
            f"{checkpoint.directory} has {_some(extra)}, which this architecture and config.json have no place for"
        )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])} and {len(names) - 3} more tensors" if len(names) > 3 else ", ".join(names)


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CorruptCheckpointError(
            f"{name} has shape {list(tensor.shape)}, config.json calls for {list(shape)}; "
            "the weights belong to another configuration"
        )
    if tensor.dtype not in _FLOATS:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        raise UnsupportedCheckpointError(f"{name} is stored as {tensor.dtype}; supported: {supported}")


def load_parameter(checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of the checkpoint, of `dtype` on `device`."""
    stored = checkpoint.tensor(name)
    if stored.dtype == dtype and device.type == "cpu" and stored.is_contiguous():
        advise_huge_pages(stored)
        return stored
    out = torch.empty(stored.shape, dtype=dtype, device=device)
    advise_huge_pages(out)
    rows, row_bytes, step = _pieces(stored)
    del stored
    for start in range(0, rows, step):
        part = slice(start, start + step)
        out[part].copy_(checkpoint.tensor(name)[part])
        checkpoint.touched(step * row_bytes)
    return out


def _pieces(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(rows, bytes of a row, rows to read at a time)."""
    rows = tensor.shape[0]
    row_bytes = max(1, tensor.nbytes // max(1, rows))
    return rows, row_bytes, max(1, _PIECE_BYTES // row_bytes)
