"""Cost of running a model: parameters, bytes and operations, counted from its specs. Plain arithmetic, no tensors."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tandem.architecture.feed_forward import RoutedExperts
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import MixerCost
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.tensors import num_matrix_elements


@dataclass(frozen=True)
class ModelCost:
    """Counts are of parameters and elements. Norms and biases are left out: a ten-thousandth of the matrices.

    Args:
        name: for reports.
        weight_bits, kv_bits: size of one number at rest.
    """

    name: str
    model: ModelSpec
    weight_bits: float = 16
    kv_bits: float = 16

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def max_tokens(self) -> int:
        return self.model.max_position_embeddings

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one table."""
        return self.model.tie_word_embeddings

    @property
    def num_table_parameters(self) -> int:
        """Of the embedding; the head has as many."""
        return self.model.vocab_size * self.model.hidden_size

    @cached_property
    def num_parameters(self) -> int:
        """All that the model holds."""
        return num_matrix_elements(self.model.tensors())

    @cached_property
    def num_multiplied_parameters(self) -> int:
        """Those that one token of a prompt is multiplied by. The head is not: a prompt needs it once."""
        return sum(
            num_matrix_elements(layer.mixer.tensors()) + num_matrix_elements(layer.feed_forward.active_tensors())
            for layer in self.model.layers
        )

    @property
    def num_active_parameters(self) -> int:
        """Those that one generated token is multiplied by: the head too."""
        return self.num_multiplied_parameters + self.num_table_parameters

    @cached_property
    def num_expert_parameters(self) -> int:
        """Of all routed experts of all layers."""
        return sum(count * routed.num_experts * routed.expert_size for routed, count in self._routed.items())

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.weight_bits / 8

    @property
    def expert_bytes(self) -> float:
        """Of all routed experts."""
        return self.num_expert_parameters * self.weight_bits / 8

    def swept_weight_bytes(self, num_running: float) -> float:
        """Weights that one decode step of so many requests reads: all of them, but of the experts only those that some
        request chose (choices taken as independent and even).

        NOTE: the input table is counted though a step reads a few of its rows: published figures count all weights.
        """
        idle = sum(
            count * routed.num_experts * routed.expert_size * routed.idle_share(num_running)
            for routed, count in self._routed.items()
        )
        return self.weight_bytes - idle * self.weight_bits / 8

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """State of one token in every layer, as long as all windows reach it."""
        return sum(count * mixer.state_size for mixer, count in self._mixers.items()) * self.kv_bits / 8

    def kv_bytes(self, num_tokens: float) -> float:
        """State that a context of so many tokens keeps and a decode step reads: a windowed layer no more than its
        window.
        """
        kept = sum(count * mixer.state_size * mixer.num_visible(num_tokens) for mixer, count in self._mixers.items())
        return kept * self.kv_bits / 8

    def attention_flops(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Of computing a prompt whose first tokens are cached, causal: a query sees itself and what is before it,
        within the window.
        """
        return float(
            sum(
                count * mixer.pair_flops * mixer.num_pairs(num_tokens, num_cached_tokens)
                for mixer, count in self._mixers.items()
            )
        )

    def step_attention_flops(self, context_tokens: float) -> float:
        """Of one new token behind a context of so many tokens."""
        return float(
            sum(count * mixer.pair_flops * mixer.num_visible(context_tokens) for mixer, count in self._mixers.items())
        )

    @cached_property
    def full_pair_flops(self) -> float:
        """Operations for each query and key, of all layers in which a query sees everything."""
        return float(sum(count * mixer.pair_flops for mixer, count in self._mixers.items() if mixer.window is None))

    @cached_property
    def window_flops(self) -> float:
        """Operations of one query in the windowed layers, as if it saw a whole window."""
        windows = ((mixer.window or 0, mixer, count) for mixer, count in self._mixers.items())
        return float(sum(count * mixer.pair_flops * window for window, mixer, count in windows))

    @cached_property
    def full_bytes_per_token(self) -> float:
        """State of one token in the layers in which a query sees everything."""
        full = sum(count * mixer.state_size for mixer, count in self._mixers.items() if mixer.window is None)
        return full * self.kv_bits / 8

    @cached_property
    def window_bytes(self) -> float:
        """State of whole windows in the windowed layers."""
        windows = sum(count * mixer.state_size * (mixer.window or 0) for mixer, count in self._mixers.items())
        return windows * self.kv_bits / 8

    @cached_property
    def _mixers(self) -> Mapping[MixerCost, int]:
        """Each different kind of mixer, and how many layers have it."""
        return Counter(layer.mixer.cost for layer in self.model.layers)

    @cached_property
    def _routed(self) -> Mapping[RoutedExperts, int]:
        """Each different set of routed experts, and how many layers have it."""
        found = (layer.feed_forward.routed for layer in self.model.layers)
        return Counter(routed for routed in found if routed is not None)


def read_cost(config: Mapping[str, object], name: str, *, weight_bits: float = 16, kv_bits: float = 16) -> ModelCost:
    """The cost of the model that a `config.json` describes; `name` is for reports.

    Raises:
        CheckpointError: a size is missing or impossible, or the architecture is not served.
    """
    fields = Fields(config, "config.json")
    return ModelCost(name, find_family(fields).read_model(fields), weight_bits, kv_bits)
