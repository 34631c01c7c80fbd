"""Descriptions of GGUF's architectures: places of its tensors in a Hugging Face checkpoint, readers of its keys."""

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

ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
EMBEDDING: Final = "token_embd.weight"
OUTER: Final = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

Floats = NDArray[np.float32]
IndexOrder = Callable[[int, Config], NDArray[np.intp]]
"""From the number of rows or columns, those of the file that a checkpoint has, in its order."""
Reader = Callable[[GgufFile, Fields, Config], dict[str, object]]


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor in a checkpoint, and the changes that undo those of a converter.

    Args:
        name: below its layer's; with `{}`, it is a stack whose entry i goes to the name that has i there.
        order: of rows.
        columns: their order. Blocks of codes move whole; those that it cuts are decoded.
        change: the checkpoint's numbers, from the file's. They are decoded.
        others: tensors of the same layer, in full below it, that `change` is given after this one.
    """

    name: str
    order: IndexOrder | None = None
    columns: IndexOrder | None = None
    change: Callable[..., Floats] | None = None
    others: tuple[str, ...] = ()

    @property
    def is_stack(self) -> bool:
        return "{}" in self.name


Places = Mapping[str, Place | tuple[Place, ...]]
"""By GGUF's name below its layer's: in full, as `ssm_a`, or without the `.weight` or `.bias` that both names have.
Several places share the rows of one tensor; one with none is among the `others` of a place.
"""


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """Properties of a SentencePiece vocabulary that its metadata leaves out.

    Args:
        by_position: pieces are merged in the order of their ids, not of their scores, and those of several spaces are
            pieces like others.
        strips_after_control: control tokens take the spaces behind them, but for `unstripping`.
        stripping: other tokens that do.
    """

    by_position: bool = False
    strips_after_control: bool = False
    stripping: frozenset[str] = frozenset()
    unstripping: frozenset[str] = frozenset()

    def strips_after(self, token: str, is_control: bool) -> bool:
        """Whether a token takes the spaces behind it."""
        if token in self.stripping:
            return True
        return self.strips_after_control and is_control and token not in self.unstripping


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table.

    Args:
        model_type, class_name: what transformers calls it.
        inner: places of a layer's tensors.
        read: its own keys of the configuration.
        outer: names of the tensors outside of layers, by GGUF's.
        layers: what the names of a layer's tensors begin with, before its number.
        factors: tensors of the rotary embedding, which become part of the configuration.
        activation: the key of the configuration, and its value.
        with_experts: the row where the file has experts.
        ends: tokens that end an answer by the published `generation_config.json`, though files name only one.
        norm_offset: what norms have more in the file than in a checkpoint.
        is_hybrid: there are layers without heads of k and v, and so without attention.
        is_latent: keys and values are a latent of all heads.
        further: the key for the number of layers behind the last that predict further tokens; None = they are left out.
        has_further: there may be such layers.
        has_partial_rope: `rope.dimension_count` may be a part of a head.
        has_bias_option: `attention_bias` says whether projections have biases; otherwise the family always knows.
    """

    model_type: str
    class_name: str
    inner: Places
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
    further: str | None = None
    has_further: bool = False
    has_partial_rope: bool = False
    has_bias_option: bool = False
    sentencepiece: SentencePiece = SentencePiece()


def in_halves(heads: str) -> IndexOrder:
    """The rows of each head's halves after each other, where the file has pairs that turn together in turn.

    Args:
        heads: the key of the configuration that has their number.
    """

    def order(num_rows: int, config: Config) -> NDArray[np.intp]:
        num_heads = config[heads]
        assert isinstance(num_heads, int)
        if num_rows % (2 * num_heads):
            raise CorruptCheckpointError(f"there are {num_rows} rows, which {num_heads} heads do not divide")
        return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)

    return order


def channelwise(kernel: Floats) -> Floats:
    """A convolution's kernel with the dimension of inputs that converters leave out. # [channels, 1, taps]"""
    return kernel.reshape(len(kernel), 1, -1)


def log_of_negated(values: Floats) -> Floats:
    """The logarithms of decays, of which converters write minus the exponentials. # [heads]"""
    return np.log(-values.reshape(-1).astype(np.float64)).astype(np.float32)


def flat(values: Floats) -> Floats:
    """One dimension, where converters made several."""
    return values.reshape(-1)


def have_attention(fields: Fields, config: Config) -> list[bool]:
    """For each layer of a hybrid."""
    counts, num_layers = fields.get("attention.head_count_kv"), config["num_hidden_layers"]
    assert isinstance(num_layers, int)
    return [count > 0 for count in counts] if isinstance(counts, list) else [True] * num_layers


def as_written(value: float) -> float:
    """The shortest decimal that float32 stores as it stores `value`: what the configuration had, as 1e-05."""
    return float(str(np.float32(value)))


def required(fields: Fields, name: str) -> float:
    """A number that must be there, as it was written."""
    value = fields.optional_number(name)
    if value is None:
        raise fields.wrong(name, "a number")
    return as_written(value)


PRE_NORMS: Final[dict[str, Place]] = {
    "attn_norm": Place("input_layernorm"),
    "ffn_norm": Place("post_attention_layernorm"),
}
ATTENTION: Final[dict[str, Place]] = {
    "attn_q": Place("self_attn.q_proj"),
    "attn_k": Place("self_attn.k_proj"),
    "attn_v": Place("self_attn.v_proj"),
    "attn_output": Place("self_attn.o_proj"),
}
IN_TURN: Final[dict[str, Place]] = ATTENTION | {
    "attn_q": Place("self_attn.q_proj", in_halves("num_attention_heads")),
    "attn_k": Place("self_attn.k_proj", in_halves("num_key_value_heads")),
}
HEAD_NORMS: Final[dict[str, Place]] = {
    "attn_q_norm": Place("self_attn.q_norm"),
    "attn_k_norm": Place("self_attn.k_norm"),
}
GATED: Final[dict[str, Place]] = {
    "ffn_gate": Place("mlp.gate_proj"),
    "ffn_up": Place("mlp.up_proj"),
    "ffn_down": Place("mlp.down_proj"),
}
EXPERTS: Final[dict[str, Place]] = {
    "ffn_gate_inp": Place("mlp.gate"),
    "ffn_gate_exps": Place("mlp.experts.{}.gate_proj"),
    "ffn_up_exps": Place("mlp.experts.{}.up_proj"),
    "ffn_down_exps": Place("mlp.experts.{}.down_proj"),
}
