"""Cost of a drafter, the network that guesses tokens for speculative decoding: its memory and the bytes it reads for
one guess, counted from its specs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tandem.architecture.cost import ModelCost
from tandem.architecture.families.eagle3 import read_eagle3
from tandem.architecture.fields import Fields
from tandem.architecture.heads import Eagle3Spec, mtp_of
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.tensors import num_matrix_elements
from tandem.core.errors import ConfigurationError


@dataclass(frozen=True)
class DrafterCost:
    """Sizes and costs of a drafter: a draft model, or a head of one layer that reads the served model's hidden states.

    Args:
        network: the drafter's layers and output head as a model; its `weight_bits` and `kv_bits` hold for the whole
            drafter.
        num_further_parameters: parameters before the layers that each guess is multiplied by.
        num_unread_parameters: further parameters in memory of which a guess reads at most a row, such as an embedding.
        num_shared_parameters: parameters of `network` that belong to the served model: read, but not stored again.
        is_head: whether it reads hidden states of the served model, and so computes KV for each token of a prompt.
    """

    network: ModelCost
    num_further_parameters: int = 0
    num_unread_parameters: int = 0
    num_shared_parameters: int = 0
    is_head: bool = False

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights that the drafter stores itself."""
        own = self.num_further_parameters + self.num_unread_parameters - self.num_shared_parameters
        return self.network.weight_bytes + own * self.network.weight_bits / 8

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one guess is multiplied by."""
        return self.network.num_active_parameters + self.num_further_parameters

    def expected_step_weight_bytes(self, num_running: float) -> float:
        """Weight bytes read for one guess for each of `num_running` requests."""
        further = self.num_further_parameters * self.network.weight_bits / 8
        return self.network.expected_step_weight_bytes(num_running) + further

    def prompt_flops(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Operations of the drafter's KV of a prompt whose first `num_cached_tokens` are cached, without any guess."""
        per_token = 2.0 * (self.network.num_prompt_parameters + self.num_further_parameters)
        attention = self.network.attention_flops(num_tokens, num_cached_tokens)
        return per_token * (num_tokens - num_cached_tokens) + attention

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of the drafter's KV for a context of `num_tokens` tokens."""
        return self.network.kv_bytes(num_tokens)


def mtp_cost(model: ModelCost) -> DrafterCost:
    """Cost of the multi-token prediction module that the configuration of `model` declares, with the model's bits.

    Raises:
        ConfigurationError: it declares none, or several, which are not served.
    """
    spec = mtp_of(model.model)
    if spec is None or len(model.model.mtp_layers) > 1:
        found = f"{len(model.model.mtp_layers)} modules, and one is served" if spec else "no module that is served"
        raise ConfigurationError(f"the configuration of {model.name} has {found}; use another drafter")
    network = _one_layer(model.model, spec.layer, model.model.hidden_size, model.model.vocab_size)
    return DrafterCost(
        replace(model, name=f"{model.name}, MTP", model=network),
        num_further_parameters=num_matrix_elements(spec.projection.tensors()),
        num_shared_parameters=model.num_table_parameters,
        is_head=True,
    )


def eagle3_cost(
    config: Mapping[str, object], names: Collection[str], name: str, model: ModelCost, *, weight_bits: float = 16
) -> DrafterCost:
    """Cost of the EAGLE-3 head that a `config.json` describes, for `model`.

    Args:
        names: names of the head's tensors, as in `read_eagle3`.
        name: for reports.

    Raises:
        CheckpointError: it is no such head, or that of another model.
    """
    spec = read_eagle3(Fields(config, "config.json"), model.model, names)
    layer = _layer(spec)
    network = _one_layer(model.model, layer, spec.hidden_size, spec.head.outputs)
    return DrafterCost(
        replace(model, name=name, model=network, weight_bits=weight_bits, expert_bits=None, lookup_bits=None),
        num_further_parameters=num_matrix_elements(spec.fusion.tensors()),
        num_unread_parameters=0 if spec.embedding is None else spec.embedding.size,
        is_head=True,
    )


def _layer(spec: Eagle3Spec) -> LayerSpec:
    return LayerSpec(
        mixer=spec.attention,
        feed_forward=spec.feed_forward,
        before_mixer=spec.hidden_norm,
        before_feed_forward=spec.feed_forward_norm,
    )


def _one_layer(model: ModelSpec, layer: LayerSpec, hidden_size: int, num_tokens: int) -> ModelSpec:
    """A model of that layer and one table, which is its output head."""
    return replace(
        model,
        layers=(layer,),
        mtp_layers=(),
        hidden_size=hidden_size,
        vocab_size=num_tokens,
        tie_word_embeddings=True,
    )
