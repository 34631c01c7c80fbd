"""Inputs of a layer's linear maps: groups of maps that read the same input and are quantised together.

Routers and other small maps are not quantised, nor maps of per-layer embeddings. Of a recurrence the maps to steps and
decays are only quantised if they are rows of a tensor that is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.architecture.feed_forward import (
    FeedForwardSpec,
    GatedSpec,
    MixtureOfExpertsSpec,
    ParallelSpec,
    SquaredReluSpec,
)
from tandem.architecture.mixers import AttentionSpec, BlockMixer, LatentAttentionSpec, MixerSpec
from tandem.architecture.model import LayerSpec
from tandem.architecture.recurrent_mixers import LinearRecurrenceSpec, SelectiveScanSpec, ShortConvSpec
from tandem.architecture.sparse_mixers import SparseLatentAttentionSpec
from tandem.architecture.tensors import LinearSpec, NormSpec
from tandem.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class SharedInput:
    """One input of a layer. `linears` all multiply its rows, and readers of the checkpoint fuse them into one map.

    Args:
        norm: for AWQ, the norm whose weight multiplies the rows, if only `linears` read its output.
        producer: for AWQ, a linear map whose outputs are the rows, or factors of them, so that scaling an output scales
            an input of `linears`.
    """

    linears: tuple[LinearSpec, ...]
    norm: NormSpec | None = None
    producer: LinearSpec | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights of `linears`. Calibration observes the input of the first one for all."""
        return tuple(f"{linear.name}.weight" for linear in self.linears)


def shared_inputs(layer: LayerSpec) -> tuple[SharedInput, ...]:
    """Inputs of the layer whose weights are quantised. The input of a block's output map comes before the block's own
    input, so that AWQ scales a map's outputs before its inputs.
    """
    norm = layer.before_mixer if not layer.parallel_mixers else None  # NOTE: others read what it gives, too
    mixers = [shared for mixer in layer.mixers for shared in _of_mixer(mixer, norm)]
    return (*mixers, *_of_block(layer.feed_forward, layer.before_feed_forward))


def _of_mixer(mixer: MixerSpec, norm: NormSpec | None) -> Iterator[SharedInput]:
    """NOTE: the map from latents to keys and values is not quantised: it is not applied to rows as it is stored."""
    match mixer:
        case AttentionSpec():
            has_plain_values = mixer.v is not None and mixer.v_norm is None and mixer.num_heads == mixer.num_kv_heads
            yield SharedInput((mixer.o,), producer=mixer.v if has_plain_values else None)
            yield SharedInput(tuple(filter(None, (mixer.q, mixer.k, mixer.v))), norm)
        case SparseLatentAttentionSpec():  # NOTE: its indexer reads what the norms give and is not coded, too
            yield SharedInput((mixer.o,))
            yield SharedInput((mixer.q,))
            yield SharedInput(tuple(filter(None, (mixer.q_a, mixer.kv_a))))
        case LatentAttentionSpec():
            yield SharedInput((mixer.o,))
            if mixer.q_a is not None:
                yield SharedInput((mixer.q,), mixer.q_norm)
            yield SharedInput((mixer.q_a or mixer.q, mixer.kv_a), norm)
        case BlockMixer():
            raise ConfigurationError(
                f"{next(mixer.tensors()).name} is of a layer whose queries choose blocks of tokens, whose weights are "
                "not quantised; serve the checkpoint as it is"
            )
        case ShortConvSpec():
            yield SharedInput((mixer.out,))
            yield SharedInput((mixer.project,), norm)
        case SelectiveScanSpec():
            yield SharedInput((mixer.out,))
            yield SharedInput((mixer.x, mixer.gate), norm)
        case LinearRecurrenceSpec():
            yield from _of_recurrence(mixer, norm)


def _of_recurrence(mixer: LinearRecurrenceSpec, norm: NormSpec | None) -> Iterator[SharedInput]:
    yield SharedInput((mixer.out,))
    if mixer.gate_in is not None:
        yield SharedInput((mixer.gate,))
    linears = (*mixer.qkv, mixer.gate_in or mixer.gate)
    fused = {linear.weight_source.tensor for linear in linears if linear.weight_source is not None}
    small = tuple(filter(None, (mixer.a_in or mixer.a, mixer.b)))
    small_fused = tuple(linear for linear in small if linear.weight_source and linear.weight_source.tensor in fused)
    yield SharedInput((*linears, *small_fused), norm if len(small_fused) == len(small) else None)


def _of_block(block: FeedForwardSpec | None, norm: NormSpec | None) -> Iterator[SharedInput]:
    match block:
        case GatedSpec():
            yield SharedInput((block.down,), producer=block.up if block.clamp is None else None)
            yield SharedInput((block.gate, block.up), norm)
        case SquaredReluSpec():
            yield SharedInput((block.down,))
            yield SharedInput((block.up,), norm)
        case MixtureOfExpertsSpec():
            shared = () if block.shared is None else (block.shared,)
            for expert in (*block.experts, *shared):
                yield from _of_block(expert, None)  # NOTE: the router reads what the norm gives, too
            for linear in filter(None, (block.experts_out, block.experts_in)):
                yield SharedInput((linear,))
        case ParallelSpec():
            for branch in block.branches:
                yield from _of_block(branch.block, branch.before)
