"""Checkpoints in published formats against transformers: on the decoded numbers, and where it decodes them itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.coded import CodedWeight
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models.loader import load_model
from tests.helpers import checkpoints
from tests.helpers.engines import TINY, drain, token_ids
from tests.helpers.hybrid_checkpoints import save_tiny_falcon_h1
from tests.helpers.published_formats import FORMATS, rounds_rows, save_gpt_oss_blocks, save_published
from tests.helpers.rounded_oracle import generate_rounded
from tests.helpers.tokenizers import write_byte_tokenizer

NUM_TOKENS = 10
PROMPTS = ([5, 9, 13, 2], list(range(40, 75)))
DECODED = (
    "fp8 blocks",
    "compressed int4 with zero points",
    "gptq 2 in an order",
    "awq",
    "compressed nvfp4",
    "bitsandbytes nf4 nested",
    "compressed W8A8",
)
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
LATENT = {"moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 128, "v_head_dim": 64}
FAMILIES: dict[str, tuple[checkpoints.Builder, dict[str, Any]]] = {
    "llama": (checkpoints.save_tiny_llama, {}),
    "mixtral": (checkpoints.save_tiny_mixtral, {}),
    "deepseek_v3": (checkpoints.save_tiny_deepseek_v3, LATENT),
    "falcon_h1": (save_tiny_falcon_h1, {"mamba_d_ssm": 128, "mamba_n_heads": 8, "seed": 1}),
}
QUICK = {
    *((family, name) for family in ("llama", "mixtral") for name in DECODED),
    *((family, name) for family in ("deepseek_v3", "falcon_h1") for name in ("fp8 blocks", "awq", "compressed W8A8")),
}
WHOLE_BLOCKS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}


def coded_weights(path: Path) -> dict[str, CodedWeight]:
    model = load_model(str(path), dtype="float32", device=torch.device("cpu"), kernels=TorchKernels())
    weights = model.decoder.parameters.weights.items()
    return {name: weight for name, weight in weights if isinstance(weight, CodedWeight)}


def served(path: Path) -> list[list[int]]:
    engine = build_engine(replace(TINY, model=str(path)))
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ids = [engine.add_request(prompt, greedy) for prompt in PROMPTS]
    outputs = drain(engine)
    return [token_ids(outputs[request_id, 0]) for request_id in ids]


def generated(model: Any) -> list[list[int]]:
    """Greedily, by transformers."""
    found = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=-1,
        )
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[] if (family, name) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for name in FORMATS
    ],
)
def test_answers_are_those_of_transformers_on_the_decoded_numbers(family: str, name: str, tmp_path: Path) -> None:
    build, sizes = FAMILIES[family]
    path = write_byte_tokenizer(build(tmp_path / "plain", **SIZES | sizes))
    save_published(path, FORMATS[name], tmp_path / "coded", tmp_path / "decoded")
    reference = checkpoints.load_reference(tmp_path / "decoded")
    if rounds_rows(tmp_path / "coded"):
        expected = [generate_rounded(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]
        assert generated(reference) != expected
    else:
        expected = generated(reference)
    assert served(tmp_path / "coded") == expected


def test_numbers_of_fp8_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    """NOTE: it takes the size of blocks for rows / rows of scales, which is right for multiples of 128 alone."""
    path = checkpoints.save_tiny_llama(tmp_path / "plain", **WHOLE_BLOCKS)
    save_published(path, FORMATS["fp8 blocks"], tmp_path / "coded", tmp_path / "decoded")
    expected = checkpoints.load_reference(tmp_path / "coded", torch.float32).state_dict()
    weights = coded_weights(tmp_path / "coded")
    assert len(weights) == 14
    for name, weight in weights.items():
        torch.testing.assert_close(weight.coded.decode(), expected[name].float(), rtol=1e-6, atol=0)


def test_numbers_of_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    path = checkpoints.save_tiny_gpt_oss(tmp_path / "plain")
    save_gpt_oss_blocks(path, tmp_path / "coded", tmp_path / "decoded")
    expected = checkpoints.load_reference(tmp_path / "coded", torch.bfloat16).state_dict()
    weights = coded_weights(tmp_path / "coded")
    assert len(weights) == 3 * 5 * 3
    for name, weight in weights.items():
        prefix, expert, part, _ = name.rsplit(".", 3)
        fused = expected[f"{prefix}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(expert)]
        start, step = {"gate_proj": (0, 2), "up_proj": (1, 2), "down_proj": (0, 1)}[part]
        assert torch.equal(weight.coded.decode(torch.bfloat16), fused.T[start::step].bfloat16())
