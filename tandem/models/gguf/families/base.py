"""Description of a GGUF architecture: a table from its tensors to those of a Hugging Face checkpoint, and a reader of
the keys that only it has. The constants at the end are parts of such tables that several families share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tandem.architecture.fields import Fields
from tandem.core.errors import CorruptCheckpointError
from tandem.models.gguf.file import GgufFile

Config = Mapping[str, object]
"""A `config.json`, as far as it was read."""

ROPE_FACTORS: Final = "rope_freqs.weight"  # this and the next: tensors that become part of the configuration
LONG_FACTORS: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
EMBEDDING: Final = "token_embd.weight"
OUTER: Final = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # names in a checkpoint of the tensors outside of layers

Floats = NDArray[np.float32]
IndexOrder = Callable[[int, Config], NDArray[np.intp]]
"""From the number of rows or columns, those of the file that a checkpoint has, in its order."""
Reader = Callable[[GgufFile, Fields, Config], dict[str, object]]


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """Tensor of a Hugging Face checkpoint that a GGUF tensor becomes, and changes that undo those of GGUF's converter.

    Args:
        name: name within its layer; with `{}`, a stack of the file, whose item i gets the name with i there.
        order: order of rows.
        columns: order of columns. Whole quantised blocks are moved; if the order divides blocks, they are decoded.
        change: computes the checkpoint's numbers from the file's, which are decoded for it.
        others: other tensors of the layer, by full names within it, which `change` gets as further arguments.
    """

    name: str
    order: IndexOrder | None = None
    columns: IndexOrder | None = None
    change: Callable[..., Floats] | None = None
    others: tuple[str, ...] = ()

    @property
    def is_stack(self) -> bool:
        return "{}" in self.name


TargetTensors = Mapping[str, TargetTensor | tuple[TargetTensor, ...]]
"""By GGUF's name below its layer's: in full, as `ssm_a`, or without the `.weight` or `.bias` that both names have.
Several targets share the rows of one tensor; one with none is among the `others` of a target.
"""


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """Properties of a SentencePiece vocabulary that GGUF metadata leaves out.

    Args:
        by_position: pieces are merged in the order of their ids, not of their scores, and pieces of several spaces are
            treated like others.
        strips_after_control: control tokens remove the spaces after them, except those in `unstripping`.
        stripping: other tokens that remove the spaces after them.
    """

    by_position: bool = False
    strips_after_control: bool = False
    stripping: frozenset[str] = frozenset()
    unstripping: frozenset[str] = frozenset()

    def strips_after(self, token: str, is_control: bool) -> bool:
        """Whether a token removes the spaces after it."""
        if token in self.stripping:
            return True
        return self.strips_after_control and is_control and token not in self.unstripping


@dataclass(frozen=True, slots=True)
class Architecture:
    """Description of one GGUF architecture, a row of the table in `architectures`.

    Args:
        model_type, class_name: its names in transformers.
        inner: targets of a layer's tensors, by their names in GGUF.
        read: reads the metadata keys that only this architecture has into the configuration.
        outer: names of the tensors outside of layers in a checkpoint, by GGUF's names.
        layers: prefix of a layer's tensors, before its number.
        factors: tensors of the rotary embedding, which become part of the configuration.
        activation: key of the configuration for the activation, and its value.
        with_experts: the description to use instead if the file has experts; None = this one.
        ends: tokens that end an answer by the published `generation_config.json`, though files name only one.
        norm_offset: value added to the weights of norms in the file, compared with a checkpoint.
        is_hybrid: there are layers without KV heads, and so without attention.
        is_latent: keys and values are a latent shared by all heads.
        mtp_key: key for the number of additional layers that predict further tokens; None = these are left out.
        has_mtp: there may be such layers.
        has_partial_rope: `rope.dimension_count` may be only a part of a head.
        has_bias_option: `attention_bias` says whether projections have biases; otherwise the family decides.
    """

    model_type: str
    class_name: str
    inner: TargetTensors
    read: Reader = lambda file, fields, config: {}
    outer: Mapping[str, str] = field(default_factory=OUTER.copy)
    layers: str = "model.layers"
    factors: tuple[str, ...] = (ROPE_FACTORS,)
    activation: tuple[str, str] = ("hidden_act", "silu")
    with_experts: "Architecture | None" = None
    ends: tuple[str, ...] = ()
    norm_offset: float = 0.0
    is_hybrid: bool = False
    is_latent: bool = False
    mtp_key: str | None = None
    has_mtp: bool = False
    has_partial_rope: bool = False
    has_bias_option: bool = False
    sentencepiece: SentencePiece = SentencePiece()


def in_halves(heads: str) -> IndexOrder:
    """Row order that moves each head's rotated pairs from neighbouring rows, as in the file, into two halves.

    Args:
        heads: key of the configuration for the number of heads.
    """

    def order(num_rows: int, config: Config) -> NDArray[np.intp]:
        num_heads = config[heads]
        assert isinstance(num_heads, int)
        if num_rows % (2 * num_heads):
            raise CorruptCheckpointError(f"there are {num_rows} rows, which {num_heads} heads do not divide")
        return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)

    return order


def channelwise(kernel: Floats) -> Floats:
    """A convolution's kernel with the dimension of inputs, which converters remove. # [channels, 1, taps]"""
    return kernel.reshape(len(kernel), 1, -1)


def log_of_negated(values: Floats) -> Floats:
    """Logarithms of decays; converters store minus their exponentials. # [heads]"""
    return np.log(-values.reshape(-1).astype(np.float64)).astype(np.float32)


def flat(values: Floats) -> Floats:
    """The values in one dimension, if converters made several."""
    return values.reshape(-1)


def have_attention(fields: Fields, config: Config) -> list[bool]:
    """For each layer of a hybrid, whether it has attention."""
    counts, num_layers = fields.get("attention.head_count_kv"), config["num_hidden_layers"]
    assert isinstance(num_layers, int)
    return [count > 0 for count in counts] if isinstance(counts, list) else [True] * num_layers


def as_written(value: float) -> float:
    """The shortest decimal with the same float32 value, as the configuration had it: 1e-05, for example."""
    return float(str(np.float32(value)))


def required(fields: Fields, name: str) -> float:
    """A number that must be present, as the configuration had it."""
    value = fields.optional_number(name)
    if value is None:
        raise fields.wrong(name, "a number")
    return as_written(value)


PRE_NORMS: Final[dict[str, TargetTensor]] = {
    "attn_norm": TargetTensor("input_layernorm"),
    "ffn_norm": TargetTensor("post_attention_layernorm"),
}
ATTENTION: Final[dict[str, TargetTensor]] = {
    "attn_q": TargetTensor("self_attn.q_proj"),
    "attn_k": TargetTensor("self_attn.k_proj"),
    "attn_v": TargetTensor("self_attn.v_proj"),
    "attn_output": TargetTensor("self_attn.o_proj"),
}
# Attention in files where rotated pairs are neighbouring rows of q and k
ATTENTION_WITH_PAIRED_ROWS: Final[dict[str, TargetTensor]] = ATTENTION | {
    "attn_q": TargetTensor("self_attn.q_proj", in_halves("num_attention_heads")),
    "attn_k": TargetTensor("self_attn.k_proj", in_halves("num_key_value_heads")),
}
HEAD_NORMS: Final[dict[str, TargetTensor]] = {
    "attn_q_norm": TargetTensor("self_attn.q_norm"),
    "attn_k_norm": TargetTensor("self_attn.k_norm"),
}
GATED: Final[dict[str, TargetTensor]] = {
    "ffn_gate": TargetTensor("mlp.gate_proj"),
    "ffn_up": TargetTensor("mlp.up_proj"),
    "ffn_down": TargetTensor("mlp.down_proj"),
}
EXPERTS: Final[dict[str, TargetTensor]] = {
    "ffn_gate_inp": TargetTensor("mlp.gate"),
    "ffn_gate_exps": TargetTensor("mlp.experts.{}.gate_proj"),
    "ffn_up_exps": TargetTensor("mlp.experts.{}.up_proj"),
    "ffn_down_exps": TargetTensor("mlp.experts.{}.down_proj"),
}
