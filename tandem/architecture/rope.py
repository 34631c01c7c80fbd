"""Rotary position embeddings as checkpoints describe them: parameters only, no angles.

A rope type that is not in the table is refused; "dynamic" and "longrope" depend on the sequence length and would break
the promise that a token's KV never changes. Angles are computed in `tandem.models.layers.rotary`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.architecture.fields import MAX_COUNT, Fields

DEFAULT_THETA = 10_000.0
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
    """Low frequencies interpolated, high ones kept (YaRN, arXiv:2309.00071). `truncate`: the range is in whole
    dimensions.
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


RopeScaling = Unscaled | LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` elements of each head, half-split: element `i` turns with element
    `i + rotary_dim / 2`.

    Args:
        attention_factor: multiplies cosines and sines.
        stretched_to: positions that it was stretched to serve; 0 where the checkpoint does not say. Changes no angle.
    """

    rotary_dim: int
    theta: float
    scaling: RopeScaling = Unscaled()
    attention_factor: float = 1.0
    stretched_to: int = field(default=0, compare=False, repr=False)


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
) -> RopeSpec:
    """The embedding that `parameters` (the object `rope_parameters` or `rope_scaling`; None = plain) describes.

    Args:
        default_share: part of each head that is rotated where the checkpoint does not say.
        served_shares: values of `partial_rotary_factor` that the family serves; None = all.
        harmless: keys of `parameters` that change nothing for text.

    Raises:
        UnsupportedCheckpointError: a rope type or option that is not served.
        CorruptCheckpointError: a value that makes no sense.
    """
    rotary_dim = _rotary_dim(config, parameters, head_dim, default_share, served_shares)
    if parameters is None:
        config.get("original_max_position_embeddings")  # NOTE: Phi 3 names it without any scaling
        return RopeSpec(rotary_dim, default_theta)
    theta = parameters.number("rope_theta", default_theta)
    name = "rope_type" if parameters.get("rope_type") is not None else "type"
    rope_type = parameters.text(name, "default") or "default"
    if rope_type not in _READERS:
        raise parameters.unsupported(name, ", ".join(sorted(_READERS)))
    original = _original_length(config, parameters)
    scaling, attention_factor = _READERS[rope_type](parameters, original or max_positions)
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
    """The rotary embedding of a family whose layers all share one: `rope_scaling` (older files) wins over
    `rope_parameters`, and `rope_theta` is looked up in it first, as transformers does. `default`: in place of both.
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
    """None: the file does not say. Older files keep it at the top level, where it wins."""
    outer = config.optional_count("original_max_position_embeddings")
    if outer is not None:
        parameters.get("original_max_position_embeddings")
        return outer
    if not parameters.has("original_max_position_embeddings"):
        return None
    return parameters.count("original_max_position_embeddings")


def _factor(parameters: Fields) -> float:
    value = parameters.optional_number("factor")
    if value is None:
        raise parameters.wrong("factor", "a positive number")
    return value


def _read_default(parameters: Fields, original: int) -> tuple[RopeScaling, float]:
    return Unscaled(), 1.0


def _read_linear(parameters: Fields, original: int) -> tuple[RopeScaling, float]:
    return LinearScaling(_factor(parameters)), 1.0


def _read_proportional(parameters: Fields, original: int) -> tuple[RopeScaling, float]:
    share, factor = parameters.number("partial_rotary_factor", 1.0, high=1.0), parameters.number("factor", 1.0)
    return ProportionalScaling(share, factor), 1.0


def _read_llama3(parameters: Fields, original: int) -> tuple[RopeScaling, float]:
    factor = _factor(parameters)
    low, high = parameters.optional_number("low_freq_factor"), parameters.optional_number("high_freq_factor")
    if low is None or high is None or high <= low:
        raise parameters.wrong("high_freq_factor", "a number above low_freq_factor, both given")
    return Llama3Scaling(factor, low, high, original), 1.0


def _read_yarn(parameters: Fields, original: int) -> tuple[RopeScaling, float]:
    factor = _factor(parameters)
    scaling = YarnScaling(
        factor=factor,
        original_length=original,
        beta_fast=parameters.number("beta_fast", 32.0, low=-1.0) or 32.0,
        beta_slow=parameters.number("beta_slow", 1.0, low=-1.0) or 1.0,
        truncate=parameters.flag("truncate", True),
    )
    return scaling, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    def scale_for(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = parameters.optional_number("attention_factor")
    mscale = parameters.optional_number("mscale", low=-1.0)
    mscale_all_dim = parameters.optional_number("mscale_all_dim", low=-1.0)
    if given is not None:
        return given
    return scale_for(mscale) / scale_for(mscale_all_dim) if mscale and mscale_all_dim else scale_for(1.0)


_Reader = Callable[[Fields, int], tuple[RopeScaling, float]]
_READERS: dict[str, _Reader] = {
    "default": _read_default,
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "proportional": _read_proportional,
}
_STRETCHING = ("linear", "yarn")  # NOTE: with llama3 the factor is no ratio of lengths
