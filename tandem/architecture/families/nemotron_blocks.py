"""Reads the feed-forward blocks of Nemotron-H: a squared ReLU without a gate, alone or as experts."""

from dataclasses import dataclass, replace

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import RoutingDefaults, sigmoid_router
from tandem.architecture.feed_forward import FeedForwardSpec, MixtureOfExpertsSpec, RouterSpec, SquaredReluSpec
from tandem.architecture.fields import Fields
from tandem.architecture.tensors import LinearSpec, ShardAxis

_ROUTING = RoutingDefaults(num_experts=8, width=7688, top_k=2, num_dense=0)
_MAX_SIZE = 1 << 20  # largest accepted in a file


@dataclass(frozen=True, slots=True)
class SquaredReluBlocks:
    """Sizes of the feed-forward blocks, in elements. `width`: inner size of an expert; `latent`: size of an expert's
    input, None = the hidden size; `shared_width`: inner size of the shared block.
    """

    sizes: base.Sizes
    router: RouterSpec
    width: int
    latent: int | None
    shared_width: int
    bias: bool

    def block(self, prefix: str, kind: str) -> FeedForwardSpec:
        """The block of the given kind ("mlp" or "moe") whose tensors are under `prefix`."""
        hidden = self.sizes.hidden
        if kind == "mlp":
            return _squared(prefix, hidden, self.sizes.intermediate, bias=self.bias)
        inner = self.latent or hidden
        experts = (f"{prefix}.experts.{expert}" for expert in range(self.router.num_experts))
        plain = MixtureOfExpertsSpec(
            router=self.router.under(prefix),
            experts=tuple(_squared(name, inner, self.width, bias=False) for name in experts),
            shared=_squared(f"{prefix}.shared_experts", hidden, self.shared_width, bias=self.bias),
        )
        if self.latent is None:
            return plain
        into = LinearSpec(f"{prefix}.fc1_latent_proj", inner, hidden, self.bias)
        return replace(
            plain, experts_in=into, experts_out=LinearSpec(f"{prefix}.fc2_latent_proj", hidden, inner, self.bias)
        )


def read_blocks(fields: Fields, sizes: base.Sizes) -> SquaredReluBlocks:
    """Reads the sizes of blocks; those of experts are read even if no layer has experts."""
    fields.only("mlp_hidden_act", ("relu2",), "relu2")
    fields.only("n_shared_experts", (1,), "1")
    return SquaredReluBlocks(
        sizes,
        sigmoid_router(fields, sizes, _ROUTING),
        fields.count("moe_intermediate_size", _ROUTING.width, high=_MAX_SIZE),
        fields.optional_count("moe_latent_size", high=_MAX_SIZE),
        fields.count("moe_shared_expert_intermediate_size", _ROUTING.width, high=_MAX_SIZE),
        fields.flag("mlp_bias", False),
    )


def _squared(prefix: str, inputs: int, width: int, *, bias: bool) -> SquaredReluSpec:
    up = LinearSpec(f"{prefix}.up_proj", width, inputs, bias)
    return SquaredReluSpec(up, LinearSpec(f"{prefix}.down_proj", inputs, width, bias, ShardAxis.ROW))
