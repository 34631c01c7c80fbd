"""Sampling options that a checkpoint recommends in its optional `generation_config.json`, used if a request sets none.

Only options that a request could set itself are read. Others that would change answers are named in a warning.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.architecture.fields import Fields, read_json_object, shown_items
from tandem.core.sampling_params import MIN_REPETITION_PENALTY

FILE_NAME = "generation_config.json"  # in a model's directory
# Options that change no answer of a model without encoder, or only beside one that is named in the warning.
_WITHOUT_EFFECT = frozenset(
    {
        "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
        "assistant_lookbehind", "bos_token_id", "cache_config", "cache_implementation", "compile_config",
        "continuous_batching_config", "decoder_start_token_id", "disable_compile", "diversity_penalty",
        "early_stopping", "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions", "output_hidden_states",
        "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens",
        "remove_invalid_values", "renormalize_logits", "return_dict_in_generate", "return_legacy_cache",
        "speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp",
    }
)  # fmt: skip
# Values without effect; of other options these are null, false, 0 and whatever is empty.
_NEUTRAL: Mapping[str, object] = {
    "do_sample": True,
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "num_beams"), 1),
    **dict.fromkeys(("num_return_sequences", "typical_p"), 1),
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Options in a file; all empty if there is none. `defaults`: those it sets of temperature, top_k, top_p, min_p and
    repetition_penalty. `eos_token_ids`: tokens that end an answer.
    """

    defaults: Mapping[str, object]
    eos_token_ids: tuple[int, ...]


def read_generation_config(directory: Path) -> GenerationConfig:
    """Reads the file, and warns of options in it that are not applied.

    Raises:
        CorruptCheckpointError: it is not JSON, or has values of the wrong kind.
    """
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
    ends = fields.token_ids("eos_token_id")
    others = {name: value for name, value in fields.unread(_WITHOUT_EFFECT).items() if not _is_neutral(name, value)}
    if others:
        _log.warning(
            "%s: %s: not applied to answers; give such options with each request, as temperature=0 for do_sample=false",
            *(path, shown_items(others)),
        )
    return GenerationConfig(defaults, ends)


def _is_neutral(name: str, value: object) -> bool:
    return value == _NEUTRAL[name] if name in _NEUTRAL else not value
