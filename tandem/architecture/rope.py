"""Parameters of rotary position embeddings, read from checkpoints. Angles are computed in
`tandem.models.layers.rotary`.

A rope type that is not in the table is refused: "dynamic" depends on the sequence length, so a token's KV would change.
"longrope" depends on the length too, so one of its two lists is chosen for a whole model (`RopeSpec.for_length`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tandem.architecture.fields import MAX_COUNT, Fields

DEFAULT_THETA = 10_000.0  # if the file has none
_READ_ELSEWHERE = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned")


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The inverse frequencies `theta ** (-2 i / rotary_dim)` as they are."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Low frequencies interpolated, high ones kept (YaRN, arXiv:2309.00071). `truncate`: the bounds of the transition
    between them are rounded to whole dimensions.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Rotates only the first `share` of the pairs, with the frequencies of a full rotation, divided by `factor`; the
    angles of the others are 0 (Gemma 4).
    """

    share: float
    factor: float


@dataclass(frozen=True, slots=True)
class DividedScaling:
    """Frequency of each pair of elements divided by its own factor; [rotary_dim / 2] factors."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Two lists of factors as in `DividedScaling`: `short` if all sequences have at most `original_length` tokens, else
    `long` (LongRoPE, arXiv:2402.13753). `RopeSpec.for_length` chooses one, before which there are no angles.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int

    def is_long(self, length: int) -> bool:
        """Whether sequences of up to `length` tokens need the long factors."""
        return length > self.original_length


RopeScaling = (
    Unscaled | LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling | DividedScaling | LongRopeScaling
)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` elements of each head, half-split: elements `i` and `i + rotary_dim /
    2` are one rotated pair.

    Args:
        attention_factor: multiplies cosines and sines.
        stretched_to: number of positions for which the checkpoint's scaling was made; 0 = not stated. Changes no angle.
    """

    rotary_dim: int
    theta: float
    scaling: RopeScaling = Unscaled()
    attention_factor: float = 1.0
    stretched_to: int = field(default=0, compare=False, repr=False)

    def for_length(self, length: int) -> "RopeSpec":
        """This spec for sequences of at most `length` tokens, with one list of LongRoPE chosen."""
        if not isinstance(self.scaling, LongRopeScaling):
            return self
        chosen = self.scaling.long if self.scaling.is_long(length) else self.scaling.short
        return replace(self, scaling=DividedScaling(chosen))


def read_rope(
    config: Fields,
    parameters: Fields | None,
    *,
    head_dim: int,
    max_positions: int,
    default_theta: float,
    default_share: float = 1.0,
    served_shares: tuple[float, ...] | None = (1.0,),
    harmless: tuple[str, ...] = (),
    is_one_of_several: bool = False,
) -> RopeSpec:
    """The embedding that `parameters` (the object `rope_parameters` or `rope_scaling`; None = plain) describes.

    Args:
        default_share: part of each head that is rotated where the checkpoint does not say.
        served_shares: values of `partial_rotary_factor` that the family serves; None = all.
        harmless: keys of `parameters` that change nothing for text.
        is_one_of_several: other layers of the model have another one. NOTE: transformers then reads `truncate` nowhere,
            and the original length in `parameters` alone.

    Raises:
        UnsupportedCheckpointError: a rope type or option that is not served.
        CorruptCheckpointError: a value that makes no sense.
    """
    rotary_dim = _rotary_dim(config, parameters, head_dim, default_share, served_shares)
    if parameters is None:
        if not is_one_of_several:
            config.get("original_max_position_embeddings")  # NOTE: Phi 3 names it without any scaling
        return RopeSpec(rotary_dim, default_theta)
    if is_one_of_several:
        parameters.only("truncate", (True,), "true (transformers does not read it for this family)")
    theta = parameters.number("rope_theta", default_theta)
    name = "rope_type" if parameters.get("rope_type") is not None else "type"
    rope_type = parameters.text(name, "default") or "default"
    if rope_type not in _READERS:
        raise parameters.unsupported(name, ", ".join(sorted(_READERS)))
    original = _original_length(parameters if is_one_of_several else config, parameters)
    sizes = _Sizes(original, max_positions, rotary_dim // 2)
    scaling, attention_factor = _READERS[rope_type](parameters, sizes)
    if isinstance(scaling, ProportionalScaling):
        rotary_dim = head_dim
    stretched_to = 0
    if original is not None and rope_type in _STRETCHING:
        stretched_to = int(min(original * _factor(parameters), MAX_COUNT))
    parameters.refuse_unread((*_READ_ELSEWHERE, *harmless))
    return RopeSpec(rotary_dim, theta, scaling, attention_factor, stretched_to)


def flat_rope(
    config: Fields,
    *,
    head_dim: int,
    max_positions: int,
    theta: float = DEFAULT_THETA,
    default_share: float = 1.0,
    served_shares: tuple[float, ...] | None = (1.0,),
    harmless: tuple[str, ...] = (),
    default: Mapping[str, object] | None = None,
) -> RopeSpec:
    """The rotary embedding of a family whose layers all share one. `rope_scaling` (older files) wins over
    `rope_parameters`; `rope_theta` is looked up in that object first, as transformers does. `default`: used if both are
    absent.
    """
    scaling, parameters = config.section("rope_scaling"), config.section("rope_parameters")
    absent = None if default is None else Fields(default, config.where)
    return read_rope(
        config,
        scaling or parameters or absent,
        head_dim=head_dim,
        max_positions=max_positions,
        default_theta=config.number("rope_theta", theta),
        default_share=default_share,
        served_shares=served_shares,
        harmless=harmless,
    )


def scaling_of_full_layers(config: Fields) -> Fields | None:
    """`rope_scaling` in older files of a family whose sliding layers are not scaled. NOTE: transformers ignores the
    older name `type` there, other engines follow it.
    """
    scaling = config.section("rope_scaling")
    if scaling is not None and scaling.get("rope_type") is None:
        scaling.only("type", ("default",), "the same value under the name rope_type, which all engines read")
    return scaling


def _rotary_dim(
    config: Fields,
    parameters: Fields | None,
    head_dim: int,
    default_share: float,
    served_shares: tuple[float, ...] | None,
) -> int:
    share = default_share
    for fields in filter(None, (config, parameters)):
        share = fields.number("partial_rotary_factor", share, high=1.0)
        if served_shares is not None and share not in served_shares:
            served = ", ".join(f"{served:g}" for served in served_shares)
            raise fields.unsupported("partial_rotary_factor", f"{served} (the share of each head that is rotated)")
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise config.wrong("partial_rotary_factor", f"an even number of rotated elements (it gives {rotary_dim})")
    return rotary_dim


def _original_length(config: Fields, parameters: Fields) -> int | None:
    """Length before stretching; None: the file does not say. Older files have it at the top level, which wins."""
    outer = config.optional_count("original_max_position_embeddings")
    if outer is not None:
        parameters.get("original_max_position_embeddings")
        return outer
    if not parameters.has("original_max_position_embeddings"):
        return None
    return parameters.count("original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes that scalings need. `given_length`: tokens that the model was trained for before it was stretched; None =
    the file does not say, and `max_positions` is used. `num_pairs`: pairs of elements that are rotated.
    """

    given_length: int | None
    max_positions: int
    num_pairs: int

    @property
    def original_length(self) -> int:
        return self.given_length or self.max_positions


def _factor(parameters: Fields) -> float:
    value = parameters.optional_number("factor")
    if value is None:
        raise parameters.wrong("factor", "a positive number")
    return value


def _read_default(parameters: Fields, sizes: _Sizes) -> tuple[RopeScaling, float]:
    return Unscaled(), 1.0


def _read_linear(parameters: Fields, sizes: _Sizes) -> tuple[RopeScaling, float]:
    return LinearScaling(_factor(parameters)), 1.0


def _read_proportional(parameters: Fields, sizes: _Sizes) -> tuple[RopeScaling, float]:
    share, factor = parameters.number("partial_rotary_factor", 1.0, high=1.0), parameters.number("factor", 1.0)
    return ProportionalScaling(share, factor), 1.0


def _read_llama3(parameters: Fields, sizes: _Sizes) -> tuple[RopeScaling, float]:
    factor = _factor(parameters)
    low, high = parameters.optional_number("low_freq_factor"), parameters.optional_number("high_freq_factor")
    if low is None or high is None or high <= low:
        raise parameters.wrong("high_freq_factor", "a number above low_freq_factor, both given")
    return Llama3Scaling(factor, low, high, sizes.original_length), 1.0


def _read_yarn(parameters: Fields, sizes: _Sizes) -> tuple[RopeScaling, float]:
    factor = _factor(parameters)
    scaling = YarnScaling(
        factor=factor,
        original_length=sizes.original_length,
        beta_fast=parameters.number("beta_fast", 32.0, low=-1.0) or 32.0,
        beta_slow=parameters.number("beta_slow", 1.0, low=-1.0) or 1.0,
        truncate=parameters.flag("truncate", True),
    )
    return scaling, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    def scale_for(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = parameters.optional_number("attention_factor")
    others = parameters.number("attn_factor", 1.0)
    mscale = parameters.optional_number("mscale", low=-1.0)
    mscale_all_dim = parameters.optional_number("mscale_all_dim", low=-1.0)
    if given is None:
        given = scale_for(mscale) / scale_for(mscale_all_dim) if mscale and mscale_all_dim else scale_for(1.0)
    if others != 1.0:
        raise parameters.unsupported(
            "attn_factor",
            f"no value but 1: transformers ignores it and multiplies by {given:.6g}, other engines multiply by "
            f"{given * others:.6g}; remove it and give attention_factor, which all read, the value that is meant",
        )
    return given


def _read_longrope(parameters: Fields, sizes: _Sizes) -> tuple[RopeScaling, float]:
    original = sizes.given_length
    if original is None or original < 2:
        raise parameters.wrong("original_max_position_embeddings", "the length up to which short_factor applies")
    short, long = (parameters.listed_numbers(name, sizes.num_pairs) for name in ("short_factor", "long_factor"))
    factor, attention_factor = parameters.optional_number("factor"), parameters.optional_number("attention_factor")
    stretch = sizes.max_positions / original if factor is None else factor
    if attention_factor is None:
        attention_factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return LongRopeScaling(short, long, original), attention_factor


_Reader = Callable[[Fields, _Sizes], tuple[RopeScaling, float]]
_READERS: dict[str, _Reader] = {
    "default": _read_default,
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "proportional": _read_proportional,
    "longrope": _read_longrope,
    "su": _read_longrope,  # its name in older files of Phi 3
}
_STRETCHING = ("linear", "yarn")  # NOTE: with llama3 the factor is no ratio of lengths
