"""NemotronHForCausalLM: Nemotron-H, Nemotron Nano 2 and Nemotron 3. A mixer or a feed-forward block in each layer.

A block is taken together with the mixer before it: both in one `LayerSpec` are what they are one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.architecture.families import backbone, base
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.grouped_experts import RoutingDefaults, sigmoid_router
from tandem.architecture.families.state_space import StateSpaceSizes
from tandem.architecture.feed_forward import FeedForwardSpec, MixtureOfExpertsSpec, RouterSpec, SquaredReluSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.tensors import LinearSpec, ShardAxis

_DEFAULTS = base.Defaults(
    max_positions=4096,
    kv_heads=8,
    head_dim=128,
    eos_token_id=2,
    bos_token_id=1,
    activation_key="mamba_hidden_act",
    hidden=4096,
    intermediate=21_504,
    layers=4,
    heads=32,
    vocab=131_072,
)
_ROUTING = RoutingDefaults(num_experts=8, width=7688, top_k=2, num_dense=0)
_KINDS = {"M": "linear_attention", "E": "moe", "*": base.FULL, "-": "mlp"}  # by their letters in a pattern
_OLD_NAMES = {"mamba": "linear_attention", "attention": base.FULL}
_MIXERS = ("linear_attention", base.FULL)
_UNUSED_KEYS = (
    *("mamba_proj_bias", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    *("partial_rotary_factor", "rope_theta", "attention_head_dim", "num_nextn_predict_layers"),
)


@dataclass(frozen=True, slots=True)
class _Reader:
    sizes: base.Sizes
    state_space: StateSpaceSizes
    router: RouterSpec
    width: int
    shared_width: int
    bias: bool

    def mixer(self, index: int, kind: str) -> MixerSpec:
        if kind == base.FULL:
            return base.attention(self.sizes, index, None)
        return self.state_space.mixer(f"{backbone.layer_prefix(index)}.mixer")

    def block(self, index: int, kind: str) -> FeedForwardSpec:
        prefix = f"{backbone.layer_prefix(index)}.mixer"
        if kind == "mlp":
            return self._squared(prefix, self.sizes.intermediate, bias=self.bias)
        experts = (f"{prefix}.experts.{expert}" for expert in range(self.router.num_experts))
        return MixtureOfExpertsSpec(
            router=self.router.under(prefix),
            experts=tuple(self._squared(name, self.width, bias=False) for name in experts),
            shared=self._squared(f"{prefix}.shared_experts", self.shared_width, bias=self.bias),
        )

    def _squared(self, prefix: str, width: int, *, bias: bool) -> SquaredReluSpec:
        up = LinearSpec(f"{prefix}.up_proj", width, self.sizes.hidden, bias)
        return SquaredReluSpec(up, LinearSpec(f"{prefix}.down_proj", self.sizes.hidden, width, bias, ShardAxis.ROW))


def _read_model(fields: Fields) -> ModelSpec:
    fields.only("mamba_hidden_act", ("silu", "swish"), "silu")
    fields.only("mlp_hidden_act", ("relu2",), "relu2")
    fields.only("n_shared_experts", (1,), "1")
    fields.only("moe_latent_size", (), "absent")
    kinds = _read_kinds(fields)
    read = base.read_sizes(fields, replace(_DEFAULTS, layers=len(kinds)))
    sizes = replace(read, num_layers=len(kinds), eps=fields.number("layer_norm_epsilon", 1e-5, high=1.0))
    names = ("mamba_num_heads", 128), ("mamba_head_dim", 64), ("ssm_state_size", 128)
    reader = _Reader(
        sizes,
        backbone.read_state_space(fields, sizes.hidden, sizes.eps, *names),
        sigmoid_router(fields, sizes, _ROUTING),
        fields.count("moe_intermediate_size", _ROUTING.width, high=1 << 20),
        fields.count("moe_shared_expert_intermediate_size", _ROUTING.width, high=1 << 20),
        fields.flag("mlp_bias", False),
    )
    model = base.build_model("nemotron_h", fields, sizes, _layers(reader, kinds), unserved=("mtp.",))
    base.check_unread(fields, (*backbone.UNUSED_KEYS, *_UNUSED_KEYS, *TRAINING_KEYS))
    return model


def _layers(reader: _Reader, kinds: Sequence[str]) -> list[LayerSpec]:
    """One for each mixer, with the block of the next layer of the checkpoint if that is one."""
    hidden, eps = reader.sizes.hidden, reader.sizes.eps
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in _MIXERS:
            continue
        after = kinds[index + 1] if kinds[index + 1 : index + 2] else base.FULL
        has_block = after not in _MIXERS
        layers.append(
            LayerSpec(
                mixer=reader.mixer(index, kind),
                feed_forward=reader.block(index + 1, after) if has_block else None,
                before_mixer=backbone.layer_norm(index, hidden, eps),
                before_feed_forward=backbone.layer_norm(index + 1, hidden, eps) if has_block else None,
            )
        )
    return layers


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    """What each layer of the checkpoint is: a name of `_KINDS`."""
    name = "layers_block_type" if fields.texts("layers_block_type") else "layer_types"
    kinds = fields.texts(name)
    if kinds is None and (pattern := fields.text("hybrid_override_pattern")) is not None:
        name, kinds = "hybrid_override_pattern", tuple(_KINDS.get(letter, letter) for letter in pattern)
    kinds = tuple(_OLD_NAMES.get(kind, kind) for kind in kinds or _KINDS.values())
    if not {*kinds} <= {*_KINDS.values()}:
        raise fields.unsupported(name, ", ".join(f"{kind} ({letter})" for letter, kind in _KINDS.items()))
    if fields.optional_count("num_hidden_layers", high=1 << 10) not in (None, len(kinds)):
        raise fields.wrong("num_hidden_layers", f"{len(kinds)}, as many as {name} has")
    follows = zip(("mlp", *kinds), kinds, strict=False)
    if any(before not in _MIXERS and kind not in _MIXERS for before, kind in follows):
        raise fields.unsupported(name, "layers in which each mlp or moe follows one that mixes tokens")
    return kinds


FAMILY = base.Family(_read_model, backbone.parameter_name)
