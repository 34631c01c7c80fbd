"""Sampling options that a checkpoint recommends in its optional `generation_config.json`, used if a request sets none.

Only options that a request could set itself are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.architecture.fields import Fields, read_json_object
from tandem.core.sampling_params import MIN_REPETITION_PENALTY

FILE_NAME = "generation_config.json"  # in a model's directory


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Options in a file; all empty if there is none. `defaults`: those it sets of temperature, top_k, top_p, min_p and
    repetition_penalty. `eos_token_ids`: tokens that end an answer.
    """

    defaults: Mapping[str, object]
    eos_token_ids: tuple[int, ...]


def read_generation_config(directory: Path) -> GenerationConfig:
    """Raises CorruptCheckpointError for a file that is not JSON or has values of the wrong kind."""
    path = directory / FILE_NAME
    if not path.exists():
        return GenerationConfig({}, ())
    fields = Fields(read_json_object(path), FILE_NAME)
    values: dict[str, float | int | None] = {
        "temperature": fields.optional_number("temperature", low=-1e-9, high=100.0),
        "top_k": fields.optional_count("top_k", low=0),
        "top_p": fields.optional_number("top_p", high=1.0),
        "min_p": fields.optional_number("min_p", low=-1e-9, high=1.0),
        "repetition_penalty": fields.optional_number("repetition_penalty", low=MIN_REPETITION_PENALTY, high=100.0),
    }
    defaults = {name: value for name, value in values.items() if value is not None}
    return GenerationConfig(defaults, fields.token_ids("eos_token_id"))
