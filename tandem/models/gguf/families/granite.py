"""Granite 3: as Llama, with four multipliers."""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import GATED, IN_TURN, PRE_NORMS, Architecture, Config, required
from tandem.models.gguf.file import GgufFile

_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """NOTE: this family's files say by `rope.scaling.finetuned` whether anything is rotated."""
    fields.only("rope.scaling.finetuned", (True,), "true (false = no rotary embedding)")
    return {ours: required(fields, theirs) for theirs, ours in _MULTIPLIERS.items()}


GRANITE = Architecture("granite", "GraniteForCausalLM", PRE_NORMS | IN_TURN | GATED, _read, has_bias_option=True)
