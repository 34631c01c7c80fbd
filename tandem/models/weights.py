"""Matching of a checkpoint's tensors to those that a model needs, and their loading.

A `Source` is a tensor of the checkpoint or a part of one: some rows, one expert of a stack. A weight, the matrix of one
linear map, is made of one tensor or, if it is quantised, of several (codes, scales); its `WeightFormat` decides of
which, and this module knows no format. A tensor that is missing, has another shape, or belongs to the model's modules
but has no use is refused; those of other modules, such as an image encoder, are passed over.

A tensor that already has the wanted dtype and device stays a view of the mapped file. Any other is copied in parts of a
few MB, so that loading never holds much more than the parameters themselves.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from tandem.architecture.expert_stacks import with_stored_blocks
from tandem.architecture.model import EMBEDDING, HEAD, ModelSpec
from tandem.architecture.tensors import Source, TensorSpec
from tandem.compute.huge_pages import advise_huge_pages
from tandem.compute.weights.base import StoredTensor, StoredTensors, Weight, WeightFormat
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.checkpoint import Checkpoint
from tandem.models.load_plan import LoadingPlan, dtype_of
from tandem.models.parameters import Parameters

_PIECE_BYTES = 4 << 20
_FLOATS = ("float32", "bfloat16", "float16")
_REMEDY = "weights and config.json are of different models; download both again from one place"
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)

Sources = Mapping[str, Source]  # by name in a plan
"""Name of a `LoadingPlan`'s tensor -> the part of a tensor of the checkpoint, by the checkpoint's name."""

TensorLoader = Callable[[TensorSpec, Source], torch.Tensor]


def match_parameters(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    formats: Sequence[WeightFormat],
    stored: Mapping[str, str],
) -> tuple[ModelSpec, LoadingPlan, Sources]:
    """Finds the sources of all parameters. Returns the spec with the actual `tie_word_embeddings` and the stored form
    of experts, the plan of loading, and the sources. `stored`: names as returned by `stored_names`.

    Raises:
        CorruptCheckpointError: a tensor is missing or has the wrong shape.
        UnsupportedCheckpointError: a tensor that the spec does not have, a dtype that is not served, a weight that all
            formats refuse, or rotations of modules that do not exist.
    """
    stored = {name: source for name, source in stored.items() if not name.startswith(spec.unserved)}
    if spec.tie_word_embeddings:
        spec, stored = _resolve_tie(checkpoint, spec, stored)
    spec = with_stored_blocks(spec, stored)
    plan, weights, others = LoadingPlan.of(spec, formats), tuple(spec.weights()), _other_modules(checkpoint, stored)
    for each in formats:
        each.check_model(weights, others)
    return spec, plan, match_plan(checkpoint, plan, formats, stored)


def _other_modules(checkpoint: Checkpoint, stored: Mapping[str, str]) -> set[str]:
    """Modules that do not belong to the model, such as an image encoder or layers that predict further tokens."""
    own = set(stored.values())
    return {name.rpartition(".")[0] for name in checkpoint.names if name not in own}


def match_plan(
    checkpoint: Checkpoint, plan: LoadingPlan, formats: Sequence[WeightFormat], stored: Mapping[str, str]
) -> Sources:
    """Finds the sources of all tensors of a plan, as `match_parameters` does of the plan that it makes.

    Raises:
        CorruptCheckpointError: a tensor is missing or has the wrong shape.
        UnsupportedCheckpointError: a tensor that the plan does not have, or a dtype that is not served.
    """
    tensors = tuple(plan.stored())
    wanted = {tensor.name: tensor.source or Source(tensor.name) for tensor in tensors}
    _check_names(checkpoint, stored, {source.tensor for source in wanted.values()}, formats)
    sources = {name: replace(source, tensor=stored[source.tensor]) for name, source in wanted.items()}
    for tensor in tensors:
        _check_tensor(checkpoint, sources[tensor.name], tensor)
    _check_nothing_is_left(checkpoint, sources, tensors)
    return sources


def stored_names(checkpoint: Checkpoint, parameter_name: Callable[[str], str | None]) -> dict[str, str]:
    """Maps the names of tensors in specs to those in the checkpoint. `parameter_name`: turns the checkpoint's into the
    specs'; None = a tensor of no use.

    Raises:
        CorruptCheckpointError: two tensors of the checkpoint map to one name.
    """
    sources: dict[str, str] = {}
    for name in checkpoint.names:
        ours = None if name.endswith(_HARMLESS_SUFFIXES) else parameter_name(name)
        if ours is not None and sources.setdefault(ours, name) != name:
            raise CorruptCheckpointError(f"{checkpoint.directory} has {ours} twice, as {sources[ours]} and as {name}")
    return sources


def _resolve_tie(checkpoint: Checkpoint, spec: ModelSpec, sources: dict[str, str]) -> tuple[ModelSpec, dict[str, str]]:
    """Decides like transformers whether head and embedding are tied: if both exist, only if they are equal; if one
    exists, it serves as both.
    """
    if HEAD not in sources:
        return spec, sources
    if EMBEDDING in sources and not _are_equal(checkpoint, sources[EMBEDDING], sources[HEAD]):
        return replace(spec, tie_word_embeddings=False), sources
    embedding = sources.get(EMBEDDING, sources[HEAD])
    return spec, {name: sources[name] for name in sources if name != HEAD} | {EMBEDDING: embedding}


def _are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    outlines = checkpoint.outline(first), checkpoint.outline(second)
    if outlines[0].shape != outlines[1].shape or outlines[0].dtype != outlines[1].dtype:
        return False
    rows, row_bytes, step = _pieces(outlines[0])
    for start in range(0, rows, step):
        part = slice(start, start + step)
        a, b = checkpoint.read(first, outlines[0][part]), checkpoint.read(second, outlines[1][part])
        if a.data_ptr() != b.data_ptr() and not torch.equal(a, b):
            return False
        del a, b
        checkpoint.touched(2 * step * row_bytes)
    return True


def stored_tensors(checkpoint: Checkpoint, names: Mapping[str, str]) -> StoredTensors:
    """Shapes and dtypes of the tensors in `stored_names`."""
    found = {}
    for ours, name in names.items():
        outline = checkpoint.outline(name)
        found[ours] = StoredTensor(outline.dtype, tuple(outline.shape), name)
    return found


def _check_names(
    checkpoint: Checkpoint, stored: Mapping[str, str], wanted: Collection[str], formats: Sequence[WeightFormat]
) -> None:
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise CorruptCheckpointError(
            f"{checkpoint.directory} lacks {_some(sorted(missing))}, which config.json calls for; "
            "download the weights again"
        )
    extra = [
        source
        for name, source in stored.items()
        if name not in wanted and not any(each.ignores(name, checkpoint.tensor(source)) for each in formats)
    ]
    if extra:
        raise UnsupportedCheckpointError(
            f"{checkpoint.directory} has {_some(extra)}, which this architecture and config.json have no place for; "
            f"{_REMEDY}"
        )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])} and {len(names) - 3} more tensors" if len(names) > 3 else ", ".join(names)


def _check_tensor(checkpoint: Checkpoint, source: Source, tensor: TensorSpec) -> None:
    name, stored = source.tensor, checkpoint.outline(source.tensor)
    try:
        found = _shape(_part(stored, source), source)
    except (IndexError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"{name} has shape {list(stored.shape)}, config.json calls for {_shown(source)} of it; {_REMEDY}"
        ) from error
    if found != tensor.shape:
        part = "" if source.is_whole else ", where a parameter has its part of it,"
        raise CorruptCheckpointError(
            f"{name} has shape {list(found)}{part} config.json calls for {list(tensor.shape)}; {_REMEDY}"
        )
    supported = _FLOATS if tensor.code_dtype is None else (tensor.code_dtype,)
    if str(stored.dtype).removeprefix("torch.") not in supported:
        raise UnsupportedCheckpointError(f"{name} is stored as {stored.dtype}; supported: {', '.join(supported)}")


def _shown(source: Source) -> str:
    """Description of the part that `source` takes."""
    entry = "" if source.index is None else f"entry {source.index}, "
    rows = f"{entry}rows {source.start}:{'' if source.stop is None else source.stop}:{source.step}"
    return rows if source.period is None else f"{rows} of each {source.period}"


def _check_nothing_is_left(checkpoint: Checkpoint, sources: Sources, tensors: Iterable[TensorSpec]) -> None:
    """Checks that a tensor used in parts is used completely: otherwise it is larger than the configuration says."""
    parts: dict[str, list[tuple[Source, int]]] = {}
    for tensor in tensors:
        source = sources[tensor.name]
        parts.setdefault(source.tensor, []).append((source, tensor.size))
    for name in {source.tensor for source in sources.values() if not source.is_whole}:
        stored, taken = checkpoint.outline(name), _num_elements(parts[name])
        if stored.numel() != taken:
            raise CorruptCheckpointError(
                f"{name} has shape {list(stored.shape)}, config.json calls for {taken} of its {stored.numel()} "
                f"elements; {_REMEDY}"
            )


def _num_elements(parts: Iterable[tuple[Source, int]]) -> int:
    """Number of elements in these parts of a tensor. Rows that several parts share, such as scales of a block that
    belongs to two weights, count once.
    """
    total, ends = 0, Counter[int | None]()
    for source, size in sorted(parts, key=lambda part: part[0].start):
        if source.step == 1 and source.period is None and source.stop is not None:
            num_rows, end = source.stop - source.start, ends[source.index]
            size = size // num_rows * max(0, source.stop - max(source.start, end))
            ends[source.index] = max(end, source.stop)
        total += size
    return total


def _part(stored: torch.Tensor, source: Source) -> torch.Tensor:
    """The view that `source` describes. With a period its rows have two dimensions: period, and row in the period."""
    view = stored if source.index is None else stored[source.index]
    view = view.transpose(-2, -1) if source.transposed else view
    if source.period is not None:
        view = view.view(-1, source.period, *view.shape[1:])[slice(*(source.periods or (None,)))]
        view = view[:, source.start : source.stop]
    elif not source.is_whole:
        view = view[source.start : source.stop : source.step]
    return view if source.within is None else view[..., slice(*source.within)]


def _shape(part: torch.Tensor, source: Source) -> tuple[int, ...]:
    """Shape of the parameter made of `part`, the view of `source`."""
    return tuple(part.shape if source.period is None else (part.shape[0] * part.shape[1], *part.shape[2:]))


def sources_of_shard(shard: LoadingPlan, whole: LoadingPlan, sources: Sources) -> Sources:
    """Sources of a shard's tensors, which are parts of the tensors of the `whole` model."""
    stored = {(tensor.source or Source(tensor.name)).tensor: sources[tensor.name].tensor for tensor in whole.stored()}
    parts = {tensor.name: tensor.source or Source(tensor.name) for tensor in shard.stored()}
    return {name: replace(source, tensor=stored[source.tensor]) for name, source in parts.items()}


def load_tensor(checkpoint: Checkpoint, source: Source, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Loads the part that `source` describes, as `dtype` on `device`."""
    outline = _part(checkpoint.outline(source.tensor), source)
    shape = _shape(outline, source)
    if outline.dtype == dtype and device.type == "cpu" and outline.is_contiguous():
        stored = checkpoint.read(source.tensor, outline)
        advise_huge_pages(stored)
        return stored.view(shape)
    out = torch.empty(outline.shape, dtype=dtype, device=device)
    advise_huge_pages(out)
    rows, row_bytes, step = _pieces(outline)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        out[part].copy_(checkpoint.read(source.tensor, outline[part]))
        checkpoint.touched(step * row_bytes)
    return out.view(shape)


def load_pieces(
    checkpoint: Checkpoint, weight: TensorSpec, weight_format: WeightFormat, sources: Sources, load: TensorLoader
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Tensors of one weight, by name, for one piece of its rows after another (`WeightFormat.pieces`); each piece
    should be dropped before the next is taken.

    `load`: loads one tensor, given its spec and source.
    """
    for piece in weight_format.pieces(weight):
        parts = {}
        for tensor in weight_format.checkpoint_tensors(piece):
            source = replace(tensor.source or Source(tensor.name), tensor=sources[tensor.name].tensor)
            parts[tensor.name] = load(tensor, sources[tensor.name] if piece is weight else source)
        num_bytes = sum(part.nbytes for part in parts.values())
        try:
            yield parts
        finally:
            del parts
            checkpoint.touched(num_bytes if piece is weight else 2 * num_bytes)  # NOTE: the kernel maps pages around it


def load_parameters(
    checkpoint: Checkpoint,
    plan: LoadingPlan,
    sources: Sources,
    dtype: str,
    device: torch.device,
    packed: Mapping[str, Weight] | None = None,
) -> Parameters:
    """Loads everything in a plan, for a model of `dtype`. `packed`: weights that were loaded from a packed file before;
    they are used as they are.
    """
    kept: dict[tuple[Source, torch.dtype], torch.Tensor] = {}

    def load(tensor: TensorSpec, source: Source) -> torch.Tensor:
        key = source, dtype_of(tensor, dtype)
        return kept[key] if key in kept else load_tensor(checkpoint, *key, device)

    tensors: dict[str, torch.Tensor] = {}
    for tensor in plan.tensors:  # NOTE: kept, since a tied head shares the memory of the embedding
        source = sources[tensor.name]
        tensors[tensor.name] = kept[source, dtype_of(tensor, dtype)] = load(tensor, source)
    weights: dict[str, Weight] = {}
    for weight, weight_format in plan.weights:
        found = None if packed is None else packed.get(weight.name)
        if found is None:  # NOTE: what it is made of is not kept, so that codes never lie in memory twice
            found = weight_format.load(weight, load_pieces(checkpoint, weight, weight_format, sources, load))
        weights[weight.name] = found
    checkpoint.release()
    return Parameters(tensors, weights)


def _pieces(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(rows, bytes of a row, rows to read at a time)."""
    rows = tensor.shape[0]
    row_bytes = max(1, tensor.nbytes // max(1, rows))
    return rows, row_bytes, max(1, _PIECE_BYTES // row_bytes)
