"""Rotary embedding parameters of a checkpoint, resolved to inverse frequencies and an attention factor.

The formulas are those of `transformers.modeling_rope_utils`, in float32 and in the same order, so that angles are equal
bit for bit. A rope type that is not in the table is refused; "dynamic" and "longrope" depend on the sequence length and
would break the promise that a token's KV never changes.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tandem.core.errors import CorruptCheckpointError
from tandem.models.config import ModelConfig, RopeConfig
from tandem.models.fields import MAX_COUNT, Fields

DEFAULT_THETA = 10_000.0
_HARMLESS = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned")


def read_rope(config: Fields, parameters: Fields | None, model: ModelConfig, default_theta: float) -> RopeConfig:
    """The embedding that `parameters` (the object `rope_parameters` or `rope_scaling`; None = plain) describes.

    Raises:
        UnsupportedCheckpointError: a rope type or option that is not served.
        CorruptCheckpointError: a value that makes no sense.
    """
    config.only("partial_rotary_factor", (1, 1.0), "1.0 (rotation of whole heads)")
    if parameters is None:
        return _as_config(_plain(default_theta, model.head_dim))
    parameters.only("partial_rotary_factor", (1, 1.0), "1.0 (rotation of whole heads)")
    theta = parameters.number("rope_theta", default_theta)
    name = "rope_type" if parameters.get("rope_type") is not None else "type"
    rope_type = parameters.text(name, "default") or "default"
    if rope_type not in _BUILDERS:
        raise parameters.unsupported(name, ", ".join(sorted(_BUILDERS)))
    original = _original_length(config, parameters)
    rope = _build(rope_type, parameters, theta, model.head_dim, original or model.max_position_embeddings)
    if original is not None and rope_type in _STRETCHING:
        rope = replace(rope, stretched_to=int(min(original * _factor(parameters), MAX_COUNT)))
    parameters.finish(_HARMLESS)
    return rope


def _build(rope_type: str, parameters: Fields, theta: float, head_dim: int, original: int) -> RopeConfig:
    try:
        rope = _BUILDERS[rope_type](parameters, _plain(theta, head_dim), theta, original)
        if not all(map(math.isfinite, (*rope.inv_freq, rope.attention_factor))):
            raise ValueError("an angle or factor is not finite")
    except (ArithmeticError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{parameters.where}: no rotary embedding can be computed from these values ({error}); correct them"
        ) from error
    return rope


def flat_rope(config: Fields, model: ModelConfig) -> RopeConfig:
    """The rotary embedding of a family whose layers all share one: `rope_scaling` (older files) wins over
    `rope_parameters`, and `rope_theta` is looked up in it first, as transformers does.
    """
    scaling, parameters = config.section("rope_scaling"), config.section("rope_parameters")
    theta = config.number("rope_theta", DEFAULT_THETA)
    return read_rope(config, scaling or parameters, model, theta)


def _as_config(inv_freq: torch.Tensor, attention_factor: float = 1.0) -> RopeConfig:
    return RopeConfig(tuple(inv_freq.tolist()), attention_factor)


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)  # [head_dim / 2]


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


def _default(parameters: Fields, inv_freq: torch.Tensor, theta: float, original: int) -> RopeConfig:
    return _as_config(inv_freq)


def _linear(parameters: Fields, inv_freq: torch.Tensor, theta: float, original: int) -> RopeConfig:
    return _as_config(inv_freq / _factor(parameters))


def _llama3(parameters: Fields, inv_freq: torch.Tensor, theta: float, original: int) -> RopeConfig:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    factor = _factor(parameters)
    low, high = parameters.optional_number("low_freq_factor"), parameters.optional_number("high_freq_factor")
    if low is None or high is None or high <= low:
        raise parameters.wrong("high_freq_factor", "a number above low_freq_factor, both given")
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    is_medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return _as_config(torch.where(is_medium, blended, scaled))


def _yarn(parameters: Fields, inv_freq: torch.Tensor, theta: float, original: int) -> RopeConfig:
    """Interpolates low frequencies, keeps high ones, and scales attention (YaRN, arXiv:2309.00071)."""
    factor = _factor(parameters)
    dim = 2 * inv_freq.shape[0]
    frequencies = theta ** (torch.arange(0, dim, 2).float() / dim)
    kept, interpolated = 1.0 / frequencies, 1.0 / (factor * frequencies)
    low, high = _yarn_range(parameters, dim, theta, original)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return _as_config(interpolated * (1 - keep) + kept * keep, _yarn_attention_factor(parameters, factor))


def _yarn_range(parameters: Fields, dim: int, theta: float, original: int) -> tuple[float, float]:
    """The dimensions between which the ramp goes from kept to interpolated (`find_correction_range`)."""

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(parameters.number("beta_fast", 32.0, low=-1.0) or 32.0)
    high = dimension(parameters.number("beta_slow", 1.0, low=-1.0) or 1.0)
    if parameters.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    def scale_for(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = parameters.optional_number("attention_factor")
    mscale = parameters.optional_number("mscale", low=-1.0)
    mscale_all_dim = parameters.optional_number("mscale_all_dim", low=-1.0)
    if given is not None:
        return given
    return scale_for(mscale) / scale_for(mscale_all_dim) if mscale and mscale_all_dim else scale_for(1.0)


_Builder = Callable[[Fields, torch.Tensor, float, int], RopeConfig]
_BUILDERS: dict[str, _Builder] = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
_STRETCHING = ("linear", "yarn")  # NOTE: with llama3 the factor is no ratio of lengths
