"""`ModelSpec`: one decoder-only model as a list of layer specs, without differences between model families.

A family turns a Hugging Face `config.json` into a `ModelSpec` or refuses it. Loader, decoder, block manager and planner
all read this spec; nothing below the families knows a model's name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tandem.architecture.feed_forward import FeedForwardSpec, RoutedExperts
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.per_layer_embedding import PerLayerEmbeddingSpec
from tandem.architecture.residual import HyperConnectionSpec, StreamsSpec
from tandem.architecture.state import StateSpec
from tandem.architecture.tensors import NormSpec, Source, TensorSpec
from tandem.core.errors import ConfigurationError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A mixer and a feed-forward block, each between two norms; None = that norm or block does not exist.

    Each block's output, after its own norm and times `residual_scale`, is added to the residual stream; then the output
    of `per_layer_embedding` is added.

    Args:
        output_scale: [1], multiplies the stream at the end of the layer.
        parallel_mixers: further mixers with the same input as `mixer`, whose outputs are added to its output before
            `after_mixer`.
        connections: how mixers and feed-forward block read and write the residual streams of a model with several; such
            a layer has neither scales nor a per-layer embedding. None = plain addition to one stream.
    """

    mixer: MixerSpec
    feed_forward: FeedForwardSpec | None
    before_mixer: NormSpec | None
    after_mixer: NormSpec | None = None
    before_feed_forward: NormSpec | None
    after_feed_forward: NormSpec | None = None
    residual_scale: float = 1.0
    per_layer_embedding: PerLayerEmbeddingSpec | None = None
    output_scale: TensorSpec | None = None
    parallel_mixers: tuple[MixerSpec, ...] = field(
        default=(), repr=False
    )  # NOTE: fingerprints add both where there are any
    connections: tuple[HyperConnectionSpec, HyperConnectionSpec] | None = field(default=None, repr=False)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """`mixer` and those of `parallel_mixers`, in the order in which their outputs are added."""
        return (self.mixer, *self.parallel_mixers)

    def tensors(self) -> Iterator[TensorSpec]:
        for mixer in self.mixers:
            yield from mixer.tensors()
        if self.feed_forward is not None:
            yield from self.feed_forward.tensors()
        norms = (self.before_mixer, self.after_mixer, self.before_feed_forward, self.after_feed_forward)
        for norm in filter(None, norms):
            yield from norm.tensors()
        if self.per_layer_embedding is not None:
            yield from self.per_layer_embedding.tensors()
        if self.output_scale is not None:
            yield self.output_scale
        for connection in self.connections or ():
            yield from connection.tensors()

    def active_tensors(self) -> Iterator[TensorSpec]:
        """Tensors that one token is multiplied by."""
        for mixer in self.mixers:
            yield from mixer.tensors()
        if self.feed_forward is not None:
            yield from self.feed_forward.active_tensors()
        if self.per_layer_embedding is not None:
            yield from self.per_layer_embedding.active_tensors()
        for connection in self.connections or ():
            yield from connection.tensors()

    @property
    def routed(self) -> RoutedExperts | None:
        """The experts of its feed-forward block; None = it has none."""
        return None if self.feed_forward is None else self.feed_forward.routed


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the tensors that a multi-token prediction module has besides those of its layer, see `heads.MtpSpec`."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only transformer, or the part of one that a rank computes. Sizes in elements; `dtype` is the type of
    activations and KV.

    Args:
        family: name of the model family, which only messages and fingerprints contain.
        max_position_embeddings: longest sequence, tokens.
        final_norm: norm of the residual stream before the head.
        tie_word_embeddings: the head's weight is the embedding table.
        embedding_scale: multiplies the embeddings; where `rounds_embedding_scale`, rounded to the dtype, as in Gemma.
        logit_softcap: bound of the logits; 0 = none.
        logit_scale: multiplies the logits.
        streams: several parallel residual streams, to which all layers have `connections`; None = a single stream.
        unserved: prefixes of a checkpoint's tensors that are not part of the model, such as those of `mtp_layers`.
        fingerprint: identifies weights, specs and dtype: two workers with the same one compute the same KV.
        mtp_layers: layers among `unserved` that predict further tokens, see `heads.MtpSpec`; none where no such module
            is served.
        mtp_names: names of that module's other tensors.
        head_tokens: of a shard, the first token that its head gives a logit of, and the one after the last; None = all.
        has_embedding: whether it begins with tokens; a stage but the first begins with the stream of the one before.
        has_head: whether it ends with final norm and head; a stage but the last ends with the residual stream.
        prompt_layers: of a stage, its `num_prompt_layers`; None = computed from the layers.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    dtype: str
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = field(default=True, repr=False)  # NOTE: a family has one rule
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    unserved: tuple[str, ...] = ()
    mtp_layers: tuple[LayerSpec, ...] = field(default=(), repr=False)  # NOTE: no KV depends on them
    mtp_names: MtpNames | None = field(default=None, repr=False)
    fingerprint: str = ""
    head_tokens: tuple[int, int] | None = field(default=None, repr=False)
    has_embedding: bool = field(default=True, repr=False)
    has_head: bool = field(default=True, repr=False)
    prompt_layers: int | None = field(default=None, repr=False)
    streams: StreamsSpec | None = field(default=None, repr=False)  # NOTE: fingerprints add it where there are several

    @property
    def stream_size(self) -> int:
        """Numbers of one token that flow from layer to layer: the hidden size, times the number of residual streams."""
        return self.hidden_size * (1 if self.streams is None else self.streams.num_streams)

    @property
    def longest_length(self) -> int:
        """The most positions that can be configured; more than `max_position_embeddings` with a stretched embedding."""
        ropes = [mixer.rope for mixer in self.mixers]
        return max([self.max_position_embeddings, *(rope.stretched_to for rope in ropes if rope is not None)])

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """The mixers of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def kv_specs(self) -> tuple[StateSpec, ...]:
        """The states that the mixers keep, in order of the layers."""
        return tuple(state for mixer in self.mixers for state in mixer.states(self.dtype))

    @property
    def states_of_layer(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the indices in `kv_specs` of the states that its mixers read."""
        return tuple(tuple(state for states in layer for state in states) for layer in self.states_of_mixers)

    @property
    def states_of_mixers(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """As `states_of_layer`, separately for each mixer of a layer."""
        found: list[tuple[tuple[int, ...], ...]] = []
        num_states = 0
        for layer in self.layers:
            states: list[tuple[int, ...]] = []
            for mixer in layer.mixers:
                if mixer.reads_state_of is None:
                    end = num_states + len(mixer.states(self.dtype))
                    states.append(tuple(range(num_states, end)))
                    num_states = end
                else:
                    (shared,) = found[mixer.reads_state_of]
                    states.append(shared)
            found.append(tuple(states))
        return tuple(found)

    @property
    def num_prompt_layers(self) -> int:
        """Number of layers that all tokens of a prompt pass, up to the last that keeps state. Layers after it compute
        only the tokens whose logits are needed.

        Of a pipeline stage it is counted from the stage's first layer. 0 or less: the stage only gets tokens whose
        logits are needed. More than the stage's layers: all tokens pass on to the next stage.
        """
        if self.prompt_layers is not None:
            return self.prompt_layers
        keeping = [
            index
            for index, layer in enumerate(self.layers)
            if any(mixer.reads_state_of is None for mixer in layer.mixers)
        ]
        return 1 + max(keeping, default=-1)

    @property
    def wanted_states(self) -> tuple[int, ...]:
        """Indices in `kv_specs` of the states that are read only for those tokens of a prompt whose logits are needed:
        by the last layer that keeps state and the layers after it.
        """
        if not 1 <= self.num_prompt_layers <= self.num_layers:
            return ()
        wanted = self.states_of_layer[self.num_prompt_layers - 1 :]
        return tuple(sorted({state for states in wanted for state in states}))

    @property
    def attention_softcap(self) -> float:
        """The largest softcap of attention scores in any layer; 0 = none."""
        return max((mixer.softcap for mixer in self.mixers), default=0.0)

    @property
    def has_sinks(self) -> bool:
        """Whether attention has sinks in any layer."""
        return any(mixer.sinks is not None for mixer in self.mixers)

    def tensors(self) -> Iterator[TensorSpec]:
        """Every parameter once, even if layers share it; the head only if it is not tied to the embedding."""
        if self.embedding is not None:
            yield self.embedding
        yield from dict.fromkeys(tensor for layer in self.layers for tensor in layer.tensors())
        if self.head is not None:
            yield from self.final_norm.tensors()
            if self.streams is not None:
                yield from self.streams.tensors()
            if not self.tie_word_embeddings:
                yield self.head

    @property
    def embedding(self) -> TensorSpec | None:
        """The embedding table, a row per token; None = this stage has none."""
        if not self.has_embedding:
            return None
        return TensorSpec(EMBEDDING, (self.vocab_size, self.hidden_size))

    @property
    def head(self) -> TensorSpec | None:
        """Weight of the output head, taken from the embedding if tied; None = this stage has none."""
        if not self.has_head:
            return None
        if self.head_tokens is None:
            source = Source(EMBEDDING) if self.tie_word_embeddings else None
            return TensorSpec(HEAD, (self.vocab_size, self.hidden_size), source, is_weight=True)
        first, end = self.head_tokens
        part = Source(EMBEDDING if self.tie_word_embeddings else HEAD).rows(first, end)
        return TensorSpec(HEAD, (end - first, self.hidden_size), part, is_weight=True)

    def weights(self) -> Iterator[TensorSpec]:
        """Weights of all linear maps; the head, tied or not, is the last."""
        yield from (tensor for tensor in self.tensors() if tensor.is_weight and tensor.name != HEAD)
        if self.head is not None:
            yield self.head


def choose_rope_factors(model: ModelSpec, max_model_len: int | None) -> ModelSpec:
    """The model with the rotary embeddings for sequences of at most `max_model_len` tokens, see `RopeSpec.for_length`.
    None is `max_position_embeddings`.

    The KV of a token depends on this, and so must the fingerprint.
    """
    length = model.max_position_embeddings if max_model_len is None else max_model_len

    def chosen(layer: LayerSpec) -> LayerSpec:
        mixer, *parallel_mixers = (
            mixer if mixer.rope is None else mixer.with_rope(mixer.rope.for_length(length)) for mixer in layer.mixers
        )
        return replace(layer, mixer=mixer, parallel_mixers=tuple(parallel_mixers))

    return replace(model, layers=tuple(map(chosen, model.layers)), mtp_layers=tuple(map(chosen, model.mtp_layers)))


def limit_length(model: ModelSpec, max_model_len: int | None) -> ModelSpec:
    """The model for sequences of at most `max_model_len` tokens: windows that cover them all are dropped.

    None is `max_position_embeddings`; a stretched rotary embedding (YaRN) allows more if requested.

    Raises:
        ConfigurationError: the model was not made for sequences that long.
    """
    usual, limit = model.max_position_embeddings, model.longest_length
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        named = f"max_position_embeddings={limit}" if limit == usual else f"{limit}, what the rope is stretched to,"
        raise ConfigurationError(f"max_model_len={max_model_len} must be from 1 to {named} of the checkpoint")
    length = usual if max_model_len is None else max_model_len
    layers = tuple(
        replace(
            layer,
            mixer=layer.mixer.limited(length),
            parallel_mixers=tuple(mixer.limited(length) for mixer in layer.parallel_mixers),
        )
        for layer in model.layers
    )
    return replace(model, max_position_embeddings=length, layers=layers)
