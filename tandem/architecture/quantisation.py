"""Table of the quantised checkpoint formats that are served, by the `quant_method` of a `quantization_config`."""

from collections.abc import Mapping
from pathlib import Path

from tandem.architecture.families.base import FORMAT_KEYS
from tandem.architecture.fields import Fields, read_json_object
from tandem.core.errors import CorruptCheckpointError

_EXPERT_DTYPE = "expert_dtype"
_CONFIG, _MODELOPT_CONFIG = "config.json", "hf_quant_config.json"


def read_config(directory: Path) -> Fields:
    """The `config.json` of a directory. For older ModelOpt checkpoints, the quantisation in their separate file is
    added.

    Raises:
        CorruptCheckpointError: one of the files cannot be read.
    """
    config, modelopt_config = read_json_object(directory / _CONFIG), directory / _MODELOPT_CONFIG
    if modelopt_config.is_file() and not any(config.get(key) for key in FORMAT_KEYS):
        found = Fields(read_json_object(modelopt_config), str(modelopt_config)).get("quantization")
        if not isinstance(found, dict):
            raise CorruptCheckpointError(f"{modelopt_config} has no object `quantization`; download it again")
        config[FORMAT_KEYS[0]] = {"quant_method": "modelopt", **found}
    return Fields(config, str(directory / _CONFIG))


def find_quantisation(fields: Fields) -> Fields | None:
    """The `quantization_config` of a `config.json`, of the whole model or of its text part; None = it has none.

    Raises:
        UnsupportedCheckpointError: the format is not served.
    """
    for section in filter(None, (fields, fields.section("text_config"))):
        for key in FORMAT_KEYS:
            found = section.section(key)
            if found is not None:
                found = _with_experts(found, section)
                if (found.text("quant_method") or "") not in QUANTISED:
                    raise found.unsupported("quant_method", ", ".join(sorted(QUANTISED)))
                return found
    return None


def _with_experts(quantisation: Fields, config: Fields) -> Fields:
    """`quantisation` with the dtype of experts, which DeepSeek-V4 has outside the `quantization_config`."""
    experts = config.text(_EXPERT_DTYPE)
    return quantisation if experts is None else quantisation.completed({_EXPERT_DTYPE: experts})


def reader_of(quantisation: Fields) -> str:
    """Module, of the table, that reads a configuration returned by `find_quantisation`."""
    return QUANTISED[quantisation.text("quant_method") or ""]


QUANTISED: Mapping[str, str] = {
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "gguf": "gguf",
    "gptq": "gptq",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
}
"""Module in `tandem.compute.weights` that reads each `quant_method`: its `read` returns the formats of the weights."""
