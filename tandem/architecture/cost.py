"""Cost of running a model: parameters, bytes and operations, counted from its specs. Plain arithmetic, no tensors."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from tandem.architecture.feed_forward import RoutedExperts
from tandem.architecture.fields import Fields
from tandem.architecture.mixer_cost import MixerCost
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.state import DTYPE_BYTES, StateSpec
from tandem.architecture.tensors import num_matrix_elements

_STATE_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of state (KV cache or recurrent state) that layers of one kind store for a request, and bytes of them that
    its next token reads.

    `state`: description of what one such layer keeps, several states separated by semicolons. `scanned_bytes`: the part
    of `read_bytes` that is only scored to choose the tokens to attend to.
    """

    state: str
    num_layers: int
    held_bytes: float
    read_bytes: float
    scanned_bytes: float


class Products(StrEnum):
    """Arithmetic of the products with a weight, by the codes that it has in memory."""

    FLOATS = "16-bit floats"
    FOUR_BITS = "4-bit codes decoded in registers"
    INT8 = "int8 codes decoded in registers"
    FP8 = "fp8 codes decoded in registers"
    INT8_BY_INT8 = "int8 codes by rows rounded to int8"


@dataclass(frozen=True, slots=True)
class WeightShare:
    """Share of the weights of all linear maps that are multiplied in one way."""

    products: Products
    share: float


@dataclass(frozen=True)
class ModelCost:
    """Sizes and costs of a model at given numbers of bits. Counts are of parameters; norms and biases are left out,
    since they are a ten-thousandth of the matrices.

    Args:
        name: for reports.
        weight_bits, kv_bits: stored bits of one weight, and of one number of the KV cache.
        expert_bits, lookup_bits: of one weight of routed experts, and of tables of per-layer embeddings; None = as
            `weight_bits`, which is the mean of all.
        shares: how the weights of a quantised checkpoint are multiplied; empty = unknown.
    """

    name: str
    model: ModelSpec
    weight_bits: float = 16
    kv_bits: float = 16
    expert_bits: float | None = None
    lookup_bits: float | None = None
    shares: tuple[WeightShare, ...] = ()

    @property
    def multiplies_int8(self) -> bool:
        """Whether the products of all quantised weights are those of 8-bit integers with 8-bit integers."""
        coded = {each.products for each in self.shares} - {Products.FLOATS}
        return coded == {Products.INT8_BY_INT8}

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def stream_size(self) -> int:
        """Numbers of one token that flow from layer to layer: the hidden size times the number of residual streams."""
        return self.model.stream_size

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def max_tokens(self) -> int:
        """Longest sequence, in tokens."""
        return self.model.max_position_embeddings

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one table."""
        return self.model.tie_word_embeddings

    @property
    def num_table_parameters(self) -> int:
        """Number of elements of the embedding; the head has as many."""
        return self.model.vocab_size * self.model.hidden_size

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return num_matrix_elements(self.model.tensors())

    @cached_property
    def num_multiplied_parameters(self) -> int:
        """Number of parameters that one token is multiplied by in all layers, without the output head."""
        return sum(num_matrix_elements(layer.active_tensors()) for layer in self.model.layers)

    @cached_property
    def num_prompt_parameters(self) -> int:
        """Number of parameters that every token of a prompt is multiplied by. The head and the layers after the last
        one that keeps state are left out: a prompt needs them for its last token only.
        """
        return sum(num_matrix_elements(layer.active_tensors()) for layer in self._prompt_layers)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one generated token is multiplied by, the head included."""
        return self.num_multiplied_parameters + self.num_table_parameters

    @cached_property
    def num_expert_parameters(self) -> int:
        """Number of parameters of all routed experts of all layers."""
        return sum(count * routed.num_experts * routed.expert_size for routed, count in self._routed.items())

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.weight_bits / 8

    @cached_property
    def max_step_weight_bytes(self) -> float:
        """Weight bytes that a decode step reads at most: all except tables of per-layer embeddings, of which it reads
        single rows.

        NOTE: the input table is counted though a step reads a few of its rows: published figures count all weights.
        """
        num_looked_up = sum(tensor.size for tensor in self.model.tensors() if tensor.is_lookup)
        return self.weight_bytes - num_looked_up * (self.lookup_bits or self.weight_bits) / 8

    @property
    def expert_bytes(self) -> float:
        """Bytes of the weights of all routed experts."""
        return self.num_expert_parameters * (self.expert_bits or self.weight_bits) / 8

    def expected_step_weight_bytes(self, num_running: float) -> float:
        """Weight bytes that one step of `num_running` tokens reads, one of each request that decodes: of the experts
        only those that some token chose, if choices are independent and even.
        """
        idle = sum(
            count * routed.num_experts * routed.expert_size * routed.idle_share(num_running)
            for routed, count in self._routed.items()
        )
        return self.max_step_weight_bytes - idle * (self.expert_bits or self.weight_bits) / 8

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Bytes that each token adds to the state of all layers, while no token has left a window."""
        return self._kv_scale * sum(count * state.bytes_per_token for state, count in self._states.items())

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of state that a request with `num_tokens` tokens keeps; a fraction of a token counts as a whole one."""
        length = math.ceil(num_tokens)
        return float(sum(count * self._held_bytes(state, length) for state, count in self._states.items()))

    @cached_property
    def kv_bytes_per_request(self) -> float:
        """Bytes of state that do not depend on a request's length: recurrent states, which have dtypes of their own."""
        return float(sum(count * state.bytes_per_request for state, count in self._states.items()))

    def read_bytes(self, num_tokens: float) -> float:
        """Bytes of state that a decode step reads for a request with `num_tokens` tokens. State shared by several
        layers is counted once for each of them.
        """
        read = sum(count * mixer.num_read(num_tokens) for mixer, count in self._mixers.items())
        return read * self.kv_bits / 8 + self.token_state_bytes

    def context_memory(self, num_tokens: int) -> tuple[LayerMemory, ...]:
        """`kv_bytes` and `read_bytes` of a request with `num_tokens` tokens by kind of layer, in order of layers."""
        kinds = Counter((mixer.states(_STATE_DTYPE), mixer.cost) for mixer in self.model.mixers)
        names = {mixer.states(_STATE_DTYPE): self._state_name(mixer) for mixer in self.model.mixers}
        bits = self.kv_bits / 8
        return tuple(
            LayerMemory(
                names[states],
                count,
                float(count * sum(self._held_bytes(state, num_tokens) for state in states)),
                count * sum(each.num_read(num_tokens) * bits + each.token_bytes for each in mixer.passes),
                count * sum(each.scanned_size * each.num_scanned(num_tokens) * bits for each in mixer.passes),
            )
            for (states, mixer), count in kinds.items()
        )

    @cached_property
    def token_state_bytes(self) -> float:
        """Bytes of recurrent state that a decode step reads and writes for a request, whatever its length."""
        return float(sum(count * mixer.token_bytes for mixer, count in self._mixers.items()))

    @cached_property
    def token_state_flops(self) -> float:
        """Operations of each token that depend neither on weights nor on the context: updates of recurrent states."""
        return float(sum(count * mixer.token_flops for mixer, count in self._mixers.items()))

    def attention_flops(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Operations of attention over a prompt whose first `num_cached_tokens` are cached. A query attends to itself
        and the tokens before it, within the layer's window.
        """
        num_new = num_tokens - num_cached_tokens
        return float(
            sum(
                count * (mixer.prompt_flops(num_tokens, num_cached_tokens) + mixer.token_flops * num_new)
                for mixer, count in self._prompt_mixers.items()
            )
        )

    def step_attention_flops(self, context_tokens: float) -> float:
        """Operations of attention for one new token after `context_tokens` tokens."""
        return float(
            sum(count * mixer.query_flops(context_tokens) for mixer, count in self._mixers.items())
            + self.token_state_flops
        )

    @cached_property
    def full_pair_flops(self) -> float:
        """Operations for each query and key of a prompt, in layers whose queries attend to all tokens or score all."""
        mixers = self._prompt_mixers
        full = sum(count * mixer.pair_flops for mixer, count in mixers.items() if mixer.window is None)
        return float(full + sum(count * mixer.scan_flops for mixer, count in mixers.items()))

    @cached_property
    def window_flops(self) -> float:
        """Operations of one query of a prompt in layers that limit the tokens it attends to, when at the limit."""
        windows = ((mixer.window or 0, mixer, count) for mixer, count in self._prompt_mixers.items())
        return float(sum(count * mixer.pair_flops * window for window, mixer, count in windows))

    @cached_property
    def full_bytes_per_token(self) -> float:
        """State bytes that a decode step reads per token of context, in layers that attend to all or score all."""
        full = sum(count * mixer.read_size for mixer, count in self._mixers.items() if mixer.window is None)
        full += sum(count * mixer.scanned_size for mixer, count in self._mixers.items())
        return full * self.kv_bits / 8

    @cached_property
    def window_bytes(self) -> float:
        """State bytes that a decode step reads in layers that limit the tokens attended to, if the limit is reached."""
        windows = sum(count * mixer.read_size * (mixer.window or 0) for mixer, count in self._mixers.items())
        return windows * self.kv_bits / 8

    def _held_bytes(self, state: StateSpec, num_tokens: int) -> float:
        growing = state.bytes(num_tokens) - state.bytes_per_request
        return self._kv_scale * growing + state.bytes_per_request if num_tokens else 0.0

    def _state_name(self, mixer: MixerSpec) -> str:
        states = Counter(map(str, mixer.states(f"{self.kv_bits:g}-bit")))
        named = (name if count == 1 else f"{count} x {name}" for name, count in states.items())
        return "; ".join(named) or "what another layer keeps"

    @cached_property
    def _states(self) -> Mapping[StateSpec, int]:
        """Each different state, and how many layers keep it; as `_STATE_DTYPE`, since a dtype may still be "auto"."""
        return Counter(replace(self.model, dtype=_STATE_DTYPE).kv_specs)

    @property
    def _kv_scale(self) -> float:
        """Ratio of `kv_bits` to the bits of a number in `_states`."""
        return self.kv_bits / (8 * DTYPE_BYTES[_STATE_DTYPE])

    @cached_property
    def _mixers(self) -> Mapping[MixerCost, int]:
        """Each different pass of attention over a state, with the number of layers that have it."""
        return Counter(each for mixer in self.model.mixers for each in mixer.cost.passes)

    @cached_property
    def _prompt_mixers(self) -> Mapping[MixerCost, int]:
        """As `_mixers`, of the layers that compute all tokens of a prompt."""
        return Counter(each for layer in self._prompt_layers for mixer in layer.mixers for each in mixer.cost.passes)

    @property
    def _prompt_layers(self) -> tuple[LayerSpec, ...]:
        return self.model.layers[: self.model.num_prompt_layers]

    @cached_property
    def _routed(self) -> Mapping[RoutedExperts, int]:
        """Each different set of routed experts, and how many layers have it."""
        found = (layer.routed for layer in self.model.layers)
        return Counter(routed for routed in found if routed is not None)


def read_cost(config: Mapping[str, object], name: str, *, weight_bits: float = 16, kv_bits: float = 16) -> ModelCost:
    """The cost of the model that a `config.json` describes; `name` is for reports.

    Raises:
        CheckpointError: a size is missing or impossible, or the architecture is not served.
    """
    fields = Fields(config, "config.json")
    return ModelCost(name, find_family(fields).read_model(fields), weight_bits, kv_bits)
