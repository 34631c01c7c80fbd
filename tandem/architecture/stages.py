"""Pipeline stages: consecutive layers of a model that some ranks of a worker compute, as a `ModelSpec` of their own.

The first stage has the embedding, the last the final norm and the head. Stages have equal numbers of layers if the
model allows it. Only the residual stream is passed from stage to stage, so layers that read another layer's state stay
together with it. A model that cannot be divided is refused.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.sparse_mixers import SparseLatentAttentionSpec
from tandem.architecture.tensors import MAX_GROUP_RANKS
from tandem.core.errors import ConfigurationError

LEAST_TOKENS = 4  # fewest of a micro-batch: each one reads all weights, so fewer tokens cost as much
PIECE_TOKENS = 64  # fewest of a micro-batch if there are more of them than stages, so that reading weights costs little


def check_group(width: int, num_stages: int, num_contexts: int = 1) -> None:
    """Raises `ConfigurationError` if `width` (tensor-parallel) x stages x contexts exceed the ranks of a worker."""
    num_ranks = width * num_stages * num_contexts
    if num_ranks <= MAX_GROUP_RANKS:
        return
    sizes = {"pp": num_stages, "cp": num_contexts}
    name, number = max(sizes.items(), key=itemgetter(1))
    others = " with ".join(f"{other}={size}" for other, size in {"tp": width, **sizes}.items() if size > 1)
    raise ConfigurationError(
        f"{others} are {num_ranks} ranks, and a worker has at most {MAX_GROUP_RANKS}; "
        f"give {name}={max(1, MAX_GROUP_RANKS * number // num_ranks)} or less, or a smaller tp"
    )


def num_micro_batches(num_tokens: float, num_stages: int, piece_tokens: int = PIECE_TOKENS) -> int:
    """Number of micro-batches into which a step of `num_tokens` tokens is divided: as many as stages, more if each
    still has `piece_tokens`, fewer if there are too few tokens. Requests that cannot be divided may make it fewer.
    """
    if num_stages == 1:
        return 1
    return int(max(1, min(num_stages, num_tokens // LEAST_TOKENS), num_tokens // piece_tokens))


def idle_share(num_tokens: float, num_stages: int) -> float:
    """Share of a step's time in which a stage waits for the others (the pipeline bubble)."""
    return (num_stages - 1) / (num_micro_batches(num_tokens, num_stages) + num_stages - 1)


def num_elements(stage: ModelSpec) -> int:
    """Number of elements of a stage's weights. NOTE: a head tied to the embedding of another stage is a copy."""
    own = sum(tensor.size for tensor in stage.tensors())
    head = stage.head if stage.tie_word_embeddings and stage.embedding is None else None
    return own if head is None else own + head.size


def stage_bounds(model: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Boundaries of the stages: stage i has layers `bounds[i]` to `bounds[i + 1] - 1`, as equal in number as the model
    allows.

    Raises:
        ConfigurationError: the model cannot be cut into so many stages; the message says why, and how many are
            possible.
    """
    if num_stages == 1:
        return 0, model.num_layers
    if any(layer.per_layer_embedding is not None for layer in model.layers):
        raise _refused(model, num_stages, "its layers read an embedding of their own of every token", 1)
    if num_stages > model.num_layers:
        raise _refused(model, num_stages, f"it has {model.num_layers} layers", model.num_layers)
    cuts = sorted(set(range(1, model.num_layers)) - set(_forbidden_cuts(model)))
    if len(cuts) < num_stages - 1:
        raise _refused(model, num_stages, "layers read what earlier ones keep, or choose", len(cuts) + 1)
    bounds = [0]
    for stage in range(1, num_stages):
        wanted = -(-stage * model.num_layers // num_stages)
        num_left = num_stages - 1 - stage  # cuts that must remain
        possible = [cut for cut in cuts if cut > bounds[-1]]
        bounds.append(min(possible[: len(possible) - num_left], key=lambda cut: (abs(cut - wanted), cut)))
    return *bounds, model.num_layers


def states_of_stages(model: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Number of states in each stage, in order; together they are the model's `kv_specs`."""
    bounds = stage_bounds(model, num_stages)
    return tuple(
        sum(len(mixer.states(model.dtype)) for layer in model.layers[first:end] for mixer in layer.mixers)
        for first, end in pairwise(bounds)
    )


def stage_of(model: ModelSpec, stage: int, num_stages: int) -> ModelSpec:
    """Stage `stage` of the model, or of a shard of it. Fingerprint and sizes are the whole model's. The head is a
    separate tensor, even if it is tied to the embedding.

    Raises:
        ConfigurationError: as `stage_bounds`.
    """
    if num_stages == 1:
        return model
    bounds = stage_bounds(model, num_stages)
    first, end = bounds[stage], bounds[stage + 1]
    return replace(
        model,
        layers=tuple(_moved(layer, first) for layer in model.layers[first:end]),
        head_tokens=model.head_tokens or (0, model.vocab_size),
        has_embedding=stage == 0,
        has_head=stage == num_stages - 1,
        prompt_layers=model.num_prompt_layers - first,
    )


def _forbidden_cuts(model: ModelSpec) -> Iterator[int]:
    """Cuts that would separate a layer from an earlier one whose state, or choice of tokens, it reads."""
    choosers: dict[str, int] = {}
    for index, layer in enumerate(model.layers):
        for mixer in layer.mixers:
            if mixer.reads_state_of is not None:
                yield from range(mixer.reads_state_of + 1, index + 1)
            if isinstance(mixer, SparseLatentAttentionSpec):
                yield from range(choosers.setdefault(mixer.chosen_by, index) + 1, index + 1)


def _moved(layer: LayerSpec, first: int) -> LayerSpec:
    """The layer with its indices of other layers counted from layer `first`."""
    mixer, *parallel_mixers = (_mixer_moved(mixer, first) for mixer in layer.mixers)
    return replace(layer, mixer=mixer, parallel_mixers=tuple(parallel_mixers))


def _mixer_moved(mixer: MixerSpec, first: int) -> MixerSpec:
    if isinstance(mixer, AttentionSpec) and mixer.reads_state_of is not None:
        return replace(mixer, reads_state_of=mixer.reads_state_of - first)
    return mixer


def _refused(model: ModelSpec, num_stages: int, why: str, most: int) -> ConfigurationError:
    return ConfigurationError(
        f"pp={num_stages} cannot serve this {model.family} model: {why}; what can be had: pp=1"
        + (f" to {most}" if most > 1 else "")
    )
