"""GGUF files served as codes: the tokens of the numbers that they stand for, embedding and head among them."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.model import EMBEDDING, HEAD
from tandem.compute.ops import Kernels
from tandem.compute.order import Order
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.coded import CodedWeight
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models import packed
from tandem.models.gguf.convert import converted
from tandem.models.gguf.file import GgufFile
from tandem.models.loader import LoadedModel, load_model
from tests.helpers.checkpoints import (
    Builder,
    edit_config,
    save_tiny_deepseek_v3,
    save_tiny_gemma3,
    save_tiny_gpt_oss,
    save_tiny_granite_moe,
    save_tiny_llama,
    save_tiny_mixtral,
    save_tiny_phi3,
    save_tiny_qwen2_moe,
    save_tiny_qwen3,
    save_tiny_qwen3_moe,
)
from tests.helpers.delta_checkpoints import (
    save_tiny_kimi_linear,
    save_tiny_qwen3_5,
    save_tiny_qwen3_5_moe,
    save_tiny_qwen3_next,
)
from tests.helpers.engines import TINY, drain, token_ids
from tests.helpers.gguf_files import write_gguf
from tests.helpers.hybrid_checkpoints import (
    save_tiny_falcon_h1,
    save_tiny_granite_hybrid,
    save_tiny_lfm2,
    save_tiny_lfm2_moe,
    save_tiny_nemotron_h,
    save_tiny_nemotron_latent,
)
from tests.helpers.native_kernels import load_or_skip

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
PROMPTS = ([5, 9, 13, 2], list(range(40, 75)), [7])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CASES = [(save_tiny_llama, "Q4_1", True), (save_tiny_llama, "Q4_K", True), (save_tiny_llama, "Q6_K", False)]
EXPERTS = [
    (save_tiny_gpt_oss, "MXFP4", False),
    (partial(save_tiny_qwen3_moe, mlp_only_layers=[], moe_intermediate_size=256, head_dim=64), "Q4_K", False),
]
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
WITHOUT_BLOCKS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"]
}
WITHOUT_MIXTURES: dict[str, Any] = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
MOVED_BLOCKS = (partial(save_tiny_qwen3_5, linear_value_head_dim=32, **HYBRID), "Q8_0", True)
CUT_BLOCKS = (partial(save_tiny_qwen3_5, head_dim=64, linear_value_head_dim=64, **HYBRID), "Q4_K", False)
LATENTS: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
OTHERS = [
    CUT_BLOCKS,
    (partial(save_tiny_deepseek_v3, **LATENTS), "Q8_0", False),
    (partial(save_tiny_gemma3, head_dim=64, query_pre_attn_scalar=64, layer_types=None), "Q4_K", True),
    (save_tiny_phi3, "Q4_K", False),
    (save_tiny_phi3, "Q4_0", False),
    (partial(save_tiny_lfm2, layer_types=["conv", "full_attention"]), "Q4_K", True),
    (
        partial(
            save_tiny_granite_hybrid,
            mamba_d_head=64,
            shared_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"],
        ),
        "Q4_0",
        False,
    ),
    (
        partial(
            save_tiny_qwen3_next,
            mlp_only_layers=[],
            linear_value_head_dim=16,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"],
        ),
        "Q8_0",
        False,
    ),
    (partial(save_tiny_qwen2_moe, moe_intermediate_size=64, shared_expert_intermediate_size=32), "Q4_0", False),
    (save_tiny_mixtral, "Q8_0", True),
    *((save_tiny_qwen3, name, True) for name in ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")),
    *((save_tiny_llama, name, True) for name in ("Q2_K", "Q3_K", "Q5_K")),
]


def served(path: Path, dtype: str, *, is_native: bool) -> list[list[int]]:
    """Token ids of the greedy answers to `PROMPTS`, all served at once."""
    config = replace(TINY, model=str(path), dtype=dtype, native_kernels=is_native)
    engine = build_engine(replace(config, attention_backend="auto" if is_native else "reference"))
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = drain(engine)
    return [token_ids(outputs[request_id, 0]) for request_id in ids]


def loaded(path: Path, kernels: Kernels, **options: Any) -> LoadedModel:
    return load_model(str(path), dtype="float32", device=torch.device("cpu"), kernels=kernels, **options)


@pytest.mark.parametrize("is_native", [False, True], ids=["pytorch", "compiled"])
@pytest.mark.parametrize(
    ("save", "type_name", "tied"),
    [*CASES, *EXPERTS, MOVED_BLOCKS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_answers_are_those_of_the_decoded_file(
    tmp_path: Path, save: Any, type_name: str, tied: bool, is_native: bool
) -> None:
    if is_native:
        load_or_skip()
    plain = save(tmp_path / "plain", tie_word_embeddings=tied, **SIZES)
    file = write_gguf(plain, tmp_path / "a.gguf", type_name=type_name)
    coded, decoded = (converted(file, tmp_path / "cache", decoded_to=dtype) for dtype in (None, "float32"))
    expected = served(decoded, "float32", is_native=is_native)
    assert served(coded, "float32", is_native=is_native) == expected
    assert len({tuple(answer) for answer in expected}) > 1
    assert all(len(answer) == GREEDY.max_tokens for answer in served(coded, "bfloat16", is_native=is_native))


YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
WITHOUT_EXPERTS: dict[str, Any] = {"num_local_experts": 0, "num_experts_per_tok": 0}


@pytest.mark.parametrize(
    "save",
    [
        partial(save_tiny_gpt_oss, swiglu_limit=7.0, rope_parameters=YARN),
        save_tiny_granite_hybrid,
        partial(save_tiny_granite_hybrid, **WITHOUT_EXPERTS),
        save_tiny_granite_moe,
        partial(save_tiny_lfm2_moe, tie_word_embeddings=True),
        partial(save_tiny_qwen3_next, norm_topk_prob=True, mlp_only_layers=[]),
        save_tiny_qwen3_5,
        save_tiny_qwen3_5_moe,
        partial(save_tiny_kimi_linear, num_expert_group=1, topk_group=1),
        partial(save_tiny_falcon_h1, tie_word_embeddings=False),
        partial(save_tiny_falcon_h1, tie_word_embeddings=False, mamba_rms_norm=True),
        partial(save_tiny_nemotron_h, **WITHOUT_MIXTURES),
        partial(save_tiny_nemotron_h, **WITHOUT_BLOCKS),
        partial(save_tiny_nemotron_latent, **WITHOUT_BLOCKS),
    ],
    ids=[
        *("gpt-oss", "granitehybrid", "granitehybrid without experts", "granitemoe", "lfm2moe"),
        *("qwen3next", "qwen35", "qwen35moe"),
        *("kimi-linear", "falcon-h1", "falcon-h1 with a norm", "nemotron_h", "nemotron_h_moe"),
        "nemotron_h_moe with latents",
    ],
)
def test_models_whose_checkpoints_have_other_tensors_answer_as_these(tmp_path: Path, save: Builder) -> None:
    """Stacks and fused maps are apart in the file, decays are stored as what they are the logarithms of, multipliers
    are in the weights, and gpt-oss' YaRN is not cut to whole dimensions.
    """
    plain = save(tmp_path / "plain")
    made = converted(write_gguf(plain, tmp_path / "a.gguf"), tmp_path / "cache")
    shutil.copy(made / "tokenizer.json", plain)
    ropes = [[layer.mixer.rope for layer in loaded(path, TorchKernels()).spec.layers] for path in (made, plain)]
    assert ropes[0] == ropes[1]
    expected = served(plain, "float32", is_native=False)
    assert served(made, "float32", is_native=False) == expected
    assert len({tuple(answer) for answer in expected}) > 1


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """A Llama whose head is its embedding."""
    plain = save_tiny_llama(tmp_path / "plain", tie_word_embeddings=True, **SIZES)
    return converted(write_gguf(plain, tmp_path / "a.gguf", type_name="Q4_K"), tmp_path / "cache")


def test_a_tied_head_and_the_embedding_are_one_weight_also_in_the_packed_file(
    coded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    rows = torch.tensor([3, 0, 3])
    for kernels in (TorchKernels(), load_or_skip()):
        plain = loaded(coded, kernels).decoder.parameters
        for _ in range(2):
            found = loaded(coded, kernels, packed_dir=tmp_path / "packed").decoder.parameters
            assert found.weights[HEAD] is found.weights[EMBEDDING]
            assert EMBEDDING not in found.tensors
            for name, weight in plain.weights.items():
                other = found.weights[name]
                assert isinstance(weight, CodedWeight)
                assert isinstance(other, CodedWeight)
                assert (other.coded.order is Order.STRIPS) == (not isinstance(kernels, TorchKernels))
                expected = kernels.coded_rows(weight.coded, rows, torch.float32)
                assert torch.equal(kernels.coded_rows(other.coded, rows, torch.float32), expected)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) == 2, "the kernels' own layouts"


def test_bad_blocks_and_contradictions_are_refused_by_name(coded: Path, tmp_path: Path) -> None:
    content = bytearray((tmp_path / "a.gguf").read_bytes())
    with GgufFile(tmp_path / "a.gguf") as file:
        entry = file.tensors["blk.1.ffn_up.weight"]
    content[entry.offset : entry.offset + 2] = b"\x00\x7c"  # infinite
    (tmp_path / "b.gguf").write_bytes(content)
    with pytest.raises(
        CorruptCheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: row 0 has values that are infinite"
    ):
        loaded(converted(tmp_path / "b.gguf", tmp_path / "cache"), TorchKernels())
    edit_config(coded, quantization_config={"quant_method": "gguf", "tensors": {"Q4_0": [EMBEDDING]}})
    with pytest.raises(CorruptCheckpointError, match=r"q_proj\.weight has shape \[256, 144\]"):
        loaded(coded, TorchKernels())
    edit_config(coded, quantization_config={"quant_method": "gguf", "tensors": {"IQ1_S": [EMBEDDING]}})
    with pytest.raises(UnsupportedCheckpointError, match=r"IQ1_S.*is not served; supported: Q4_0, Q4_1"):
        loaded(coded, TorchKernels())
