"""Table of the served architectures and the module that reads each; a module is imported only when it is needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from tandem.architecture.families.base import Family
from tandem.architecture.fields import Fields
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError


@dataclass(frozen=True, slots=True)
class Entry:
    """A served architecture: its module in `families` and its `model_type`. `others`: further accepted model types."""

    module: str
    model_type: str
    others: tuple[str, ...] = ()


ARCHITECTURES: Mapping[str, Entry] = {
    "LlamaForCausalLM": Entry("llama", "llama"),
    "MistralForCausalLM": Entry("mistral", "mistral"),
    "Qwen2ForCausalLM": Entry("qwen2", "qwen2"),
    "MixtralForCausalLM": Entry("mixtral", "mixtral"),
    "Qwen3ForCausalLM": Entry("qwen3", "qwen3"),
    "Qwen3MoeForCausalLM": Entry("qwen3_moe", "qwen3_moe"),
    "DeepseekV2ForCausalLM": Entry("deepseek_v2", "deepseek_v2"),
    "DeepseekV3ForCausalLM": Entry("deepseek_v3", "deepseek_v3", others=("kimi_k2",)),
    "DeepseekV32ForCausalLM": Entry("deepseek_v32", "deepseek_v32"),
    "DeepseekV4ForCausalLM": Entry("deepseek_v4", "deepseek_v4"),
    "FalconH1ForCausalLM": Entry("falcon_h1", "falcon_h1"),
    "Glm4MoeForCausalLM": Entry("glm4_moe", "glm4_moe"),
    "Glm4MoeLiteForCausalLM": Entry("glm4_moe_lite", "glm4_moe_lite"),
    "GlmMoeDsaForCausalLM": Entry("glm_moe_dsa", "glm_moe_dsa"),
    "GptOssForCausalLM": Entry("gpt_oss", "gpt_oss"),
    "GraniteForCausalLM": Entry("granite", "granite"),
    "GraniteMoeForCausalLM": Entry("granite_moe", "granitemoe"),
    "GraniteMoeHybridForCausalLM": Entry("granite_hybrid", "granitemoehybrid"),
    "JambaForCausalLM": Entry("jamba", "jamba"),
    "KimiLinearForCausalLM": Entry("kimi_linear", "kimi_linear"),
    "Lfm2ForCausalLM": Entry("lfm2", "lfm2"),
    "Lfm2MoeForCausalLM": Entry("lfm2_moe", "lfm2_moe"),
    "Mamba2ForCausalLM": Entry("mamba2", "mamba2"),
    "NemotronHForCausalLM": Entry("nemotron_h", "nemotron_h"),
    "MiniMaxM2ForCausalLM": Entry("minimax_m2", "minimax_m2"),
    "MiniMaxM3VLForCausalLM": Entry("minimax_m3", "minimax_m3_vl_text"),
    "Ministral3ForCausalLM": Entry("ministral3", "ministral3"),
    "Mistral4ForCausalLM": Entry("mistral4", "mistral4"),
    "Olmo2ForCausalLM": Entry("olmo2", "olmo2"),
    "Olmo3ForCausalLM": Entry("olmo3", "olmo3"),
    "Phi3ForCausalLM": Entry("phi3", "phi3"),
    "Qwen2MoeForCausalLM": Entry("qwen2_moe", "qwen2_moe"),
    "Qwen3NextForCausalLM": Entry("qwen3_next", "qwen3_next"),
    "Qwen3_5ForCausalLM": Entry("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": Entry("qwen3_5_moe", "qwen3_5_moe_text"),
    "SmolLM3ForCausalLM": Entry("smollm3", "smollm3"),
    "TandemMobaForCausalLM": Entry("moba", "tandem_moba"),
    "TandemNsaForCausalLM": Entry("nsa", "tandem_nsa"),
    "Gemma2ForCausalLM": Entry("gemma2", "gemma2"),
    "Gemma3ForCausalLM": Entry("gemma3", "gemma3_text"),
    "Gemma3ForConditionalGeneration": Entry("gemma3_conditional", "gemma3"),
    "Gemma4ForCausalLM": Entry("gemma4", "gemma4_text"),
    "Gemma4ForConditionalGeneration": Entry("gemma4_conditional", "gemma4"),
    "MiniMaxM3SparseForConditionalGeneration": Entry("minimax_m3_conditional", "minimax_m3_vl"),
    "Mistral3ForConditionalGeneration": Entry("mistral3_conditional", "mistral3"),
    "Qwen3_5ForConditionalGeneration": Entry("qwen3_5_conditional", "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": Entry("qwen3_5_conditional", "qwen3_5_moe"),
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
    entry = _find_entry(fields)
    model_type = fields.text("model_type", entry.model_type)
    if model_type not in (entry.model_type, *entry.others):
        raise fields.wrong("model_type", f"{entry.model_type!r} as architectures implies")
    family: Family = import_module(f"tandem.architecture.families.{entry.module}").FAMILY
    return family


def _find_entry(fields: Fields) -> Entry:
    names = fields.texts("architectures")
    supported = ", ".join(supported_architectures())
    if names:
        entry = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
        if entry is None:
            raise fields.unsupported("architectures", supported)
        return entry
    model_type = fields.text("model_type")
    if model_type is None:
        raise CorruptCheckpointError(f"{fields.where}: neither architectures nor model_type says what this model is")
    for entry in ARCHITECTURES.values():
        if model_type in (entry.model_type, *entry.others):
            return entry
    raise UnsupportedCheckpointError(
        f"{fields.where}: model_type={model_type!r} is not served; supported architectures: {supported}"
    )
