"""Table of the served architectures and the module in `families` that reads each, whose `FAMILY` is returned. A module
is imported only when it is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from tandem.architecture.families.base import Family
from tandem.architecture.fields import Fields
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError


@dataclass(frozen=True, slots=True)
class ServedArchitecture:
    """A served architecture: its module in `families` and its `model_type`. `others`: further accepted model types."""

    module: str
    model_type: str
    others: tuple[str, ...] = ()


ARCHITECTURES: Mapping[str, ServedArchitecture] = {
    "LlamaForCausalLM": ServedArchitecture("llama", "llama"),
    "MistralForCausalLM": ServedArchitecture("mistral", "mistral"),
    "Qwen2ForCausalLM": ServedArchitecture("qwen2", "qwen2"),
    "MixtralForCausalLM": ServedArchitecture("mixtral", "mixtral"),
    "Qwen3ForCausalLM": ServedArchitecture("qwen3", "qwen3"),
    "Qwen3MoeForCausalLM": ServedArchitecture("qwen3_moe", "qwen3_moe"),
    "DeepseekV2ForCausalLM": ServedArchitecture("deepseek_v2", "deepseek_v2"),
    "DeepseekV3ForCausalLM": ServedArchitecture("deepseek_v3", "deepseek_v3", others=("kimi_k2",)),
    "DeepseekV32ForCausalLM": ServedArchitecture("deepseek_v32", "deepseek_v32"),
    "DeepseekV4ForCausalLM": ServedArchitecture("deepseek_v4", "deepseek_v4"),
    "FalconH1ForCausalLM": ServedArchitecture("falcon_h1", "falcon_h1"),
    "Glm4MoeForCausalLM": ServedArchitecture("glm4_moe", "glm4_moe"),
    "Glm4MoeLiteForCausalLM": ServedArchitecture("glm4_moe_lite", "glm4_moe_lite"),
    "GlmMoeDsaForCausalLM": ServedArchitecture("glm_moe_dsa", "glm_moe_dsa"),
    "GptOssForCausalLM": ServedArchitecture("gpt_oss", "gpt_oss"),
    "GraniteForCausalLM": ServedArchitecture("granite", "granite"),
    "GraniteMoeForCausalLM": ServedArchitecture("granite_moe", "granitemoe"),
    "GraniteMoeHybridForCausalLM": ServedArchitecture("granite_hybrid", "granitemoehybrid"),
    "JambaForCausalLM": ServedArchitecture("jamba", "jamba"),
    "KimiLinearForCausalLM": ServedArchitecture("kimi_linear", "kimi_linear"),
    "Lfm2ForCausalLM": ServedArchitecture("lfm2", "lfm2"),
    "Lfm2MoeForCausalLM": ServedArchitecture("lfm2_moe", "lfm2_moe"),
    "Mamba2ForCausalLM": ServedArchitecture("mamba2", "mamba2"),
    "NemotronHForCausalLM": ServedArchitecture("nemotron_h", "nemotron_h"),
    "MiniMaxM2ForCausalLM": ServedArchitecture("minimax_m2", "minimax_m2"),
    "MiniMaxM3VLForCausalLM": ServedArchitecture("minimax_m3", "minimax_m3_vl_text"),
    "Ministral3ForCausalLM": ServedArchitecture("ministral3", "ministral3"),
    "Mistral4ForCausalLM": ServedArchitecture("mistral4", "mistral4"),
    "Olmo2ForCausalLM": ServedArchitecture("olmo2", "olmo2"),
    "Olmo3ForCausalLM": ServedArchitecture("olmo3", "olmo3"),
    "Phi3ForCausalLM": ServedArchitecture("phi3", "phi3"),
    "Qwen2MoeForCausalLM": ServedArchitecture("qwen2_moe", "qwen2_moe"),
    "Qwen3NextForCausalLM": ServedArchitecture("qwen3_next", "qwen3_next"),
    "Qwen3_5ForCausalLM": ServedArchitecture("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": ServedArchitecture("qwen3_5_moe", "qwen3_5_moe_text"),
    "SmolLM3ForCausalLM": ServedArchitecture("smollm3", "smollm3"),
    "TandemMobaForCausalLM": ServedArchitecture("moba", "tandem_moba"),
    "TandemNsaForCausalLM": ServedArchitecture("nsa", "tandem_nsa"),
    "Gemma2ForCausalLM": ServedArchitecture("gemma2", "gemma2"),
    "Gemma3ForCausalLM": ServedArchitecture("gemma3", "gemma3_text"),
    "Gemma3ForConditionalGeneration": ServedArchitecture("gemma3_conditional", "gemma3"),
    "Gemma4ForCausalLM": ServedArchitecture("gemma4", "gemma4_text"),
    "Gemma4ForConditionalGeneration": ServedArchitecture("gemma4_conditional", "gemma4"),
    "MiniMaxM3SparseForConditionalGeneration": ServedArchitecture("minimax_m3_conditional", "minimax_m3_vl"),
    "Mistral3ForConditionalGeneration": ServedArchitecture("mistral3_conditional", "mistral3"),
    "Qwen3_5ForConditionalGeneration": ServedArchitecture("qwen3_5_conditional", "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": ServedArchitecture("qwen3_5_conditional", "qwen3_5_moe"),
}


def supported_architectures() -> tuple[str, ...]:
    """Names of the served architectures in alphabetical order."""
    return tuple(sorted(ARCHITECTURES))


def find_family(fields: Fields) -> Family:
    """The family that reads a `config.json`, found by its `architectures`, or by `model_type` if it names none.

    Raises:
        UnsupportedCheckpointError: none of them is served.
        CorruptCheckpointError: architecture and model type contradict each other.
    """
    served = _find_architecture(fields)
    model_type = fields.text("model_type", served.model_type)
    if model_type not in (served.model_type, *served.others):
        raise fields.wrong("model_type", f"{served.model_type!r} as architectures implies")
    family: Family = import_module(f"tandem.architecture.families.{served.module}").FAMILY
    return family


def _find_architecture(fields: Fields) -> ServedArchitecture:
    names = fields.texts("architectures")
    supported = ", ".join(supported_architectures())
    if names:
        served = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
        if served is None:
            raise fields.unsupported("architectures", supported)
        return served
    model_type = fields.text("model_type")
    if model_type is None:
        raise CorruptCheckpointError(f"{fields.where}: neither architectures nor model_type says what this model is")
    for served in ARCHITECTURES.values():
        if model_type in (served.model_type, *served.others):
            return served
    raise UnsupportedCheckpointError(
        f"{fields.where}: model_type={model_type!r} is not served; supported architectures: {supported}"
    )
