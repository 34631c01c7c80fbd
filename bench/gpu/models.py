"""Random models of real shapes, made where they will be used: speed does not depend on what the weights say."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from bench.gpu.setting import Setting
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import EMBEDDING, ModelSpec, limit_length
from tandem.architecture.registry import find_family
from tandem.compute.layer_states import TORCH_DTYPES

SEED = 0
WEIGHT_SCALE = 0.02

_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3-8b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "eos_token_id": 151645,
        "bos_token_id": 151643,
    },
    "llama-3.1-8b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "eos_token_id": 128009,
        "bos_token_id": 128000,
    },
}
_DRY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@dataclass(frozen=True)
class RandomModel:
    """A model and parameters of its shapes."""

    name: str
    spec: ModelSpec
    parameters: dict[str, torch.Tensor]

    @cached_property
    def read_bytes(self) -> int:
        """Weights that a decode step reads: all but an embedding table of which it needs a few rows."""
        total = sum(tensor.nbytes for tensor in self.parameters.values())
        return total if self.spec.tie_word_embeddings else total - self.parameters[EMBEDDING].nbytes

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self.spec.kv_specs)

    def prefill_flops(self, num_tokens: int) -> float:
        """Matrix products of a prompt, causal attention, and one row of logits; of the last layer only K and V but for
        the last token.
        """
        spec, num_unasked = self.spec, num_tokens - 1
        mixer = spec.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        head = spec.vocab_size * spec.hidden_size
        weights = sum(tensor.numel() for tensor in self.parameters.values() if tensor.dim() == 2)
        linear = weights - head * (1 if spec.tie_word_embeddings else 2)
        layer = linear // spec.num_layers - 2 * spec.hidden_size * mixer.num_kv_heads * mixer.head_dim
        pairs = spec.num_layers * num_tokens**2 - num_unasked**2
        attention = 2 * mixer.num_heads * mixer.head_dim * pairs
        return float(2 * (linear * num_tokens - layer * num_unasked + head) + attention)


def fields_of(name: str, *, is_dry: bool) -> dict[str, Any]:
    """Its `config.json`."""
    return FIELDS[name] | (_DRY if is_dry else {})


def random_model(setting: Setting, name: str, max_model_len: int) -> RandomModel:
    """A model of one of `FIELDS`, in bfloat16; a second call, in any process on this device, makes the same."""
    fields = fields_of(name, is_dry=setting.is_dry)
    spec = spec_of(fields, max_model_len, "bfloat16", f"random {name}")
    return RandomModel(name, spec, random_parameters(spec, setting.device))


def spec_of(fields: dict[str, Any], max_model_len: int, dtype: str, fingerprint: str) -> ModelSpec:
    """Spec that the loader makes of such a `config.json`."""
    read = Fields(fields, "config.json")
    spec = find_family(read).read_model(read)
    return limit_length(replace(spec, dtype=dtype, fingerprint=fingerprint), max_model_len)


def random_parameters(spec: ModelSpec, device: torch.device, scale: float = WEIGHT_SCALE) -> dict[str, torch.Tensor]:
    """Normal numbers; norms are 1."""
    generator = torch.Generator(device).manual_seed(SEED)
    dtype = TORCH_DTYPES[spec.dtype]
    found = {}
    for name, shape in ((tensor.name, tensor.shape) for tensor in spec.tensors()):
        tensor = torch.empty(shape, dtype=dtype, device=device)
        found[name] = tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0.0, scale, generator=generator)
    return found
