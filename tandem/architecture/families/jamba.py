"""JambaForCausalLM: reads Jamba's `config.json` into a `ModelSpec`: Mamba layers (`selective_scan`), attention without
positions in one layer of eight, experts in every other layer.
"""

from collections.abc import Callable

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS, mixture_of_experts, read_num_experts
from tandem.architecture.families.selective_scan import read_scan
from tandem.architecture.feed_forward import FeedForwardSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.tensors import LinearSpec

_DEFAULTS = base.Defaults(
    max_positions=262_144,
    kv_heads=8,
    eos_token_id=2,
    bos_token_id=1,
    hidden=4096,
    intermediate=14_336,
    layers=32,
    heads=32,
    vocab=65_536,
)
KERNEL_KEYS = ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")  # change no result


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    scan = read_scan(fields, sizes)
    attends, block = _read_places(fields, "attn_layer", 8, 4), _read_blocks(fields, sizes)

    def layer(index: int) -> LayerSpec:
        prefix = base.layer_prefix(index)
        mixer = base.attention(sizes, index, None) if attends(index) else scan.mixer(f"{prefix}.mamba")
        return LayerSpec(
            mixer=mixer,
            feed_forward=block(index),
            before_mixer=sizes.norm(f"{prefix}.input_layernorm"),
            before_feed_forward=sizes.norm(f"{prefix}.pre_ff_layernorm"),
        )

    layers = [layer(index) for index in range(sizes.num_layers)]
    model = base.build_model("jamba", fields, sizes, layers)
    base.check_unread(fields, (*KERNEL_KEYS, *TRAINING_KEYS))
    return model


def _read_places(fields: Fields, kind: str, period: int, offset: int) -> Callable[[int], bool]:
    """Tells by index whether a layer is at `{kind}_offset` in its `{kind}_period`. `period`, `offset`: defaults."""
    period = fields.count(f"{kind}_period", period, high=1 << 10)
    offset = fields.count(f"{kind}_offset", offset, low=0, high=period - 1)
    return lambda index: index % period == offset


def _read_blocks(fields: Fields, sizes: base.Sizes) -> Callable[[int], FeedForwardSpec]:
    """Returns a function from a layer's index to its block: gated, or experts with the same inner size."""
    num_experts, has_experts = read_num_experts(fields, 16), _read_places(fields, "expert_layer", 2, 1)
    router = RouterSpec(
        linear=LinearSpec("router", num_experts, sizes.hidden),
        top_k=fields.count("num_experts_per_tok", 2),
        score=Score.SOFTMAX,
        rounded=True,
    )
    if num_experts > 1 and router.top_k > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most num_experts={num_experts}")

    def block(index: int) -> FeedForwardSpec:
        prefix = f"{base.layer_prefix(index)}.feed_forward"
        if num_experts == 1 or not has_experts(index):
            return base.gated(sizes, prefix)
        return mixture_of_experts(sizes, prefix, router, sizes.intermediate)

    return block


# Found by `registry`.
FAMILY = base.Family(_read_model, lambda name: name.replace("model.final_layernorm.", "model.norm."))
