"""Checkpoints of `tandem quantize` are served as codes, with the numbers that the report measured."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.compute.ops import Matrix
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.base import Weight
from tandem.compute.weights.coded import CodedWeight
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models.loader import load_model
from tandem.quantize.recipe import FormatName, Recipe
from tests.helpers import checkpoints
from tests.helpers.delta_checkpoints import save_tiny_qwen3_next
from tests.helpers.engines import TINY, drain, token_ids
from tests.helpers.hybrid_checkpoints import save_tiny_falcon_h1
from tests.helpers.quantizing import quantize_tiny
from tests.helpers.tokenizers import write_byte_tokenizer

BUILDERS: dict[str, checkpoints.Builder] = {
    "llama": checkpoints.save_tiny_llama,
    "mixtral": checkpoints.save_tiny_mixtral,
    "deepseek_v3": lambda path: checkpoints.save_tiny_deepseek_v3(
        path, q_lora_rank=64, v_head_dim=32, moe_intermediate_size=32
    ),
    "qwen3_next": lambda path: save_tiny_qwen3_next(
        path, linear_value_head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "gpt_oss": checkpoints.save_tiny_gpt_oss,
    "falcon_h1": save_tiny_falcon_h1,
}
FORMATS: tuple[FormatName, ...] = ("int8", "int4", "fp8", "mxfp4", "nvfp4")
QUICK = ("llama", "mixtral", "deepseek_v3")
CASES = [
    pytest.param(name, family, marks=() if family in QUICK or name == "int4" else pytest.mark.slow)
    for family in BUILDERS
    for name in FORMATS
]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_numbers_are_those_that_the_report_measured(name: FormatName, family: str, tmp_path: Path) -> None:
    source = write_byte_tokenizer(BUILDERS[family](tmp_path / "plain"))
    report = quantize_tiny(source, tmp_path / "coded", Recipe(name, "rtn", group_size=32 if name == "int4" else None))
    weights = _weights(tmp_path / "coded")
    originals = _weights(source)
    errors = {}
    for weight_name, weight in weights.items():
        if isinstance(weight, CodedWeight):
            original = originals[weight_name].matrix
            assert isinstance(original, Matrix)
            difference = weight.coded.decode() - original.tensor
            errors[weight_name] = float(difference.norm() / original.tensor.norm())
    reported = {weight.name: weight.of_numbers for layer in report.layers for weight in layer.weights}
    assert errors == pytest.approx(reported, rel=1e-3)
    engine = build_engine(replace(TINY, model=str(tmp_path / "coded")))
    request_id = engine.add_request([5, 9, 13], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(token_ids(drain(engine)[request_id, 0])) == 4


def _weights(path: Path) -> Mapping[str, Weight]:
    model = load_model(str(path), dtype="float32", device=torch.device("cpu"), kernels=TorchKernels())
    return model.decoder.parameters.weights
