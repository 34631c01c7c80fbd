"""Specs of token mixers with a recurrent state of fixed size: short convolutions (LFM2), linear recurrences after a
convolution (Mamba-2, gated DeltaNet, Kimi delta attention) and selective scans (Mamba).

A convolution is causal and computes each channel separately. Its state is its inputs at the last `taps - 1` tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from tandem.architecture.mixer_base import BareMixer
from tandem.architecture.mixer_cost import MixerCost
from tandem.architecture.state import DTYPE_BYTES, RecurrentSpec
from tandem.architecture.tensors import MAX_RANKS, LinearSpec, NormSpec, TensorSpec

_STATE_BYTES = DTYPE_BYTES["float32"]


class RecurrentMixer(BareMixer):
    """Base of the mixers with a recurrent state, which have no position encoding."""

    __slots__ = ()
    rope: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Causal convolution of each channel: `weight` [channels, 1, taps], whose last tap is that of the current token;
    `bias` [channels]; with `activation`, SiLU afterwards.

    Several `weights` belong to consecutive groups of channels; so do `biases`, which then replace `bias`.
    """

    weights: tuple[TensorSpec, ...]
    bias: TensorSpec | None
    activation: bool
    biases: tuple[TensorSpec, ...] = field(default=(), repr=False)  # NOTE: only shards have some, fingerprints none

    @property
    def channels(self) -> int:
        return sum(weight.shape[0] for weight in self.weights)

    @property
    def taps(self) -> int:
        """Number of tokens that one output depends on."""
        return self.weights[0].shape[2]

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.weights
        yield from self.all_biases

    @property
    def all_biases(self) -> tuple[TensorSpec, ...]:
        """The biases of consecutive groups of channels; () = none."""
        return self.biases if self.bias is None else (self.bias,)


def conv_spec(name: str, channels: int, taps: int, *, bias: bool, activation: bool = True) -> ConvSpec:
    """A convolution with the tensors `{name}.weight` and, with `bias`, `{name}.bias`."""
    return ConvSpec(
        (TensorSpec(f"{name}.weight", (channels, 1, taps)),),
        TensorSpec(f"{name}.bias", (channels,)) if bias else None,
        activation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(RecurrentMixer):
    """`out(c * conv(b * x))`, where `project` gives b, c and x, each as wide as the convolution (LFM2). A rank that has
    only some channels has three maps in `parts`, to its b, c and x, instead of `project`.
    """

    project: LinearSpec
    conv: ConvSpec
    out: LinearSpec
    parts: tuple[LinearSpec, ...] = field(default=(), repr=False)  # NOTE: only shards have some, fingerprints none

    def tensors(self) -> Iterator[TensorSpec]:
        for linear in self.parts or (self.project,):
            yield from linear.tensors()
        yield from self.conv.tensors()
        yield from self.out.tensors()

    def state(self, dtype: str) -> RecurrentSpec:
        """The convolution's inputs, stored as `dtype`."""
        share, rest = divmod(self.conv.channels, MAX_RANKS)
        parts = () if rest else ((MAX_RANKS, share),)
        return RecurrentSpec(self.conv.channels, self.conv.taps - 1, dtype, parts=parts)

    @property
    def cost(self) -> MixerCost:
        """Inputs of earlier tokens are read, and written back without the oldest; two operations for each tap."""
        columns = self.conv.channels * (self.conv.taps - 1)
        return MixerCost(0, 0, 1, 2 * columns * DTYPE_BYTES["bfloat16"], 2 * self.conv.channels * self.conv.taps)


class Gating(StrEnum):
    """Norm and gate between the output y of a recurrence and its output projection."""

    GATE_THEN_NORM = "gate then norm"  # the norm of y * silu(gate), in groups of channels
    NORM_THEN_GATE = "norm then gate"  # the norm of each head of y, times silu(gate)
    GROUPS_THEN_GATE = "norm of groups then gate"  # the norm of y in groups of channels, times silu(gate)
    NORM_THEN_SIGMOID = "norm then sigmoid"  # the norm of each head of y, times sigmoid(gate)
    GATE = "gate"  # y * silu(gate)

    @property
    def is_by_head(self) -> bool:
        """Whether each head of y is normed by itself."""
        return self in (Gating.NORM_THEN_GATE, Gating.NORM_THEN_SIGMOID)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRecurrenceSpec(RecurrentMixer):
    """Linear recurrence with a state S of each head, [value_dim, key_dim], which every token decays and adds to.

    For each head, with queries q, keys k and values v from a convolution:

        S <- S * decay;  S <- S + u k^T;  y = S q + skip * v

    with `u = beta * v` (Mamba-2, arXiv:2405.21060), or, where `is_delta`, `u = beta * (v - S k)`, so that the value
    stored for k before is replaced (gated DeltaNet, arXiv:2412.06464). `decay = exp(-exp(a_log) * step)` with `step =
    softplus(a + a_bias)`, of each head, or of each of its `key_dim` columns (Kimi delta attention, arXiv:2510.26692).
    Without delta, beta is the step; with it, sigmoid(b). Each group's q and k serve several consecutive heads.

    Args:
        qkv: maps to the input of the convolution: queries and keys of all groups and values of all heads, in the order
            of `conv_order`.
        gate, a, b: maps to the gate of `num_heads * value_dim` elements, to a and to b. With `gate_in` or `a_in`, the
            map is a product of two, of which that one is applied first.
        conv: causal convolution of the outputs of `qkv`; its outputs are q, k and v.
        conv_order: parts of the convolution's channels, in order: the letters q, k and v.
        a_log, a_bias: constants of the decay. `a_log` has one number of each head; so has `a_bias`, or one of each of a
            head's columns where `a` has columns.
        skip: [num_heads] (D of Mamba-2); None = zeros.
        are_normed: queries and keys are divided by their length, queries also by the square root of `key_dim`.
        gating: how the gate and `out_norm` change y before `out`, the map to the hidden size.
        out_norm: norm over the `value_dim` elements of a head, or over each of `num_norm_groups` groups of channels.
    """

    qkv: tuple[LinearSpec, ...]
    gate: LinearSpec
    gate_in: LinearSpec | None = None
    a: LinearSpec
    a_in: LinearSpec | None = None
    b: LinearSpec | None
    conv: ConvSpec
    conv_order: str
    a_log: TensorSpec
    a_bias: TensorSpec
    skip: TensorSpec | None
    out_norm: NormSpec | None
    out: LinearSpec
    num_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    is_delta: bool
    are_normed: bool
    gating: Gating
    num_norm_groups: int = 1

    def tensors(self) -> Iterator[TensorSpec]:
        for linear in filter(None, (*self.qkv, self.gate_in, self.gate, self.a_in, self.a, self.b, self.out)):
            yield from linear.tensors()
        yield from self.conv.tensors()
        yield from filter(None, (self.a_log, self.a_bias, self.skip))
        if self.out_norm is not None:
            yield from self.out_norm.tensors()

    def state(self, dtype: str) -> RecurrentSpec:
        """S in float32, and the convolution's inputs as `dtype`."""
        heads = self.num_heads, self.value_dim, self.key_dim
        return RecurrentSpec(self.conv.channels, self.conv.taps - 1, dtype, heads, self.conv_parts)

    @property
    def conv_parts(self) -> tuple[tuple[int, int], ...]:
        """For each part in `conv_order`: its number of heads, and the channels of each head."""
        values, keys = (self.num_heads, self.value_dim), (self.num_groups, self.key_dim)
        return tuple(values if part == "v" else keys for part in self.conv_order)

    @property
    def cost(self) -> MixerCost:
        """S is read and written; decay, product with q and sum take six operations an element, two more with delta."""
        size, columns = self.num_heads * self.value_dim * self.key_dim, self.conv.channels * (self.conv.taps - 1)
        num_bytes = 2 * (size * _STATE_BYTES + columns * DTYPE_BYTES["bfloat16"])
        return MixerCost(
            0, 0, 1, num_bytes, size * (8 if self.is_delta else 6) + 2 * self.conv.channels * self.conv.taps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScanSpec(RecurrentMixer):
    """Selective scan with a state h of `state_dim` numbers for each channel x of a convolution (Mamba,
    arXiv:2312.00752).

    For each channel:

        h <- h * exp(-exp(a_log) * step) + step * x * k;  y = h . q + skip * x

    and the output `out(y * silu(gate))`. `terms`, computed from all channels together, are the term of the steps, k and
    q, each with a norm if `norms` has one. `step = softplus(steps(term) + a_bias)` for each channel.

    Args:
        x: map to the input of the convolution.
        terms, norms: map to the term of the steps, k and q, and their norms; () = none.
        steps: map from the term of the steps to a step of each channel.
        a_log: [channels, state_dim].
        a_bias, skip: [channels].
    """

    x: LinearSpec
    gate: LinearSpec
    conv: ConvSpec
    terms: LinearSpec
    norms: tuple[NormSpec, ...]
    steps: LinearSpec
    a_log: TensorSpec
    a_bias: TensorSpec
    skip: TensorSpec
    out: LinearSpec

    @property
    def state_dim(self) -> int:
        return self.a_log.shape[1]

    def tensors(self) -> Iterator[TensorSpec]:
        for linear in (self.x, self.gate, self.terms, self.steps, self.out):
            yield from linear.tensors()
        yield from self.conv.tensors()
        for norm in self.norms:
            yield from norm.tensors()
        yield from (self.a_log, self.a_bias, self.skip)

    def state(self, dtype: str) -> RecurrentSpec:
        """h in float32, each channel stored as a head with one row; the convolution's inputs as `dtype`."""
        channels = self.conv.channels
        heads = channels, 1, self.state_dim
        return RecurrentSpec(channels, self.conv.taps - 1, dtype, heads, ((channels, 1),))

    @property
    def cost(self) -> MixerCost:
        """h is read and written; decay, product with q and sum take six operations per element."""
        size, columns = self.conv.channels * self.state_dim, self.conv.channels * (self.conv.taps - 1)
        num_bytes = 2 * (size * _STATE_BYTES + columns * DTYPE_BYTES["bfloat16"])
        return MixerCost(0, 0, 1, num_bytes, 6 * size + 2 * self.conv.channels * self.conv.taps)
