"""Coded weights beside recurrent states: answers are those of the numbers that codes stand for, decoded by
`tests.helpers.published_formats`; and fused projections that cannot be taken apart are refused by name.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.coded import CodedWeight
from tandem.core.errors import UnsupportedCheckpointError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models.loader import load_model
from tests.helpers.delta_checkpoints import save_tiny_qwen3_5_conditional, save_tiny_qwen3_next
from tests.helpers.engines import TINY, drain, token_ids
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS, save_tiny_nemotron_h
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.published_formats import FORMATS, Published, compressed, ct_packed, integers, save_published
from tests.helpers.tokenizers import write_byte_tokenizer

FP8, INT4 = "fp8 blocks", "compressed int4 groups"
BUILDERS = RECURRENT_BUILDERS | {"qwen3_5_conditional": save_tiny_qwen3_5_conditional}
CHANNELS = "fp8 channels"  # NOTE: one column of scales, as blocks have where inputs are fewer than 128
QUICK = [*((name, family) for name in (FP8, INT4) for family in ("falcon_h1", "qwen3_5")), (CHANNELS, "falcon_h1")]
OTHERS = ("awq", "gptq 2 in an order", "compressed int8 channels", "compressed mxfp4", "modelopt nvfp4")
WHOLE_BLOCKS: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 64}
SLOW = [
    *((name, family) for name in (FP8, INT4) for family in BUILDERS if family != "qwen3_next" or name != FP8),
    *((name, family) for name in (*OTHERS, CHANNELS, "fp8 blocks of powers of two") for family in ("lfm2", "mamba2")),
    *((name, family) for name in OTHERS[1:3] for family in ("falcon_h1", "kimi_linear")),
]
PROMPTS = ([5, 9, 13, 2], list(range(40, 75)), [7])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def served(path: Path, *, is_native: bool) -> list[list[int]]:
    """Token ids of the greedy answers to `PROMPTS`, all served at once."""
    backend = "auto" if is_native else "reference"
    config = replace(TINY, model=str(path), native_kernels=is_native, kv_cache_bytes=1 << 23)
    engine = build_engine(replace(config, attention_backend=backend))
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = drain(engine)
    return [token_ids(outputs[request_id, 0]) for request_id in ids]


def check(plain: Path, published: Published, path: Path, *, is_native: bool) -> None:
    """Also that all matrices of layers are coded but for a few."""
    save_published(write_byte_tokenizer(plain), published, path / "coded", path / "decoded")
    weights = load(path / "coded").values()
    assert sum(isinstance(weight, CodedWeight) for weight in weights) >= len(weights) - 7
    if is_native:
        load_or_skip()
    expected = served(path / "decoded", is_native=is_native)
    assert served(path / "coded", is_native=is_native) == expected
    assert len({tuple(answer) for answer in expected}) > 1


def load(path: Path) -> dict[str, object]:
    model = load_model(str(path), dtype="float32", device=torch.device("cpu"), kernels=TorchKernels())
    return dict(model.decoder.parameters.weights)


@pytest.mark.parametrize(("name", "family"), QUICK)
def test_answers_are_those_of_the_numbers_that_codes_stand_for(name: str, family: str, tmp_path: Path) -> None:
    check(BUILDERS[family](tmp_path / "plain"), FORMATS[name], tmp_path, is_native=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_native", [False, True], ids=["pytorch", "compiled"])
@pytest.mark.parametrize(("name", "family"), SLOW)
def test_answers_of_every_family_are_those_of_the_numbers(
    name: str, family: str, is_native: bool, tmp_path: Path
) -> None:
    check(BUILDERS[family](tmp_path / "plain"), FORMATS[name], tmp_path, is_native=is_native)


@pytest.mark.parametrize("name", [FP8, pytest.param("gptq 2 in an order", marks=pytest.mark.slow)])
def test_rows_that_take_turns_are_read_where_they_fill_blocks(name: str, tmp_path: Path) -> None:
    """As in published files of Qwen3-Next, which leave the maps to steps and decays uncoded."""
    plain = save_tiny_qwen3_next(tmp_path / "plain", **WHOLE_BLOCKS)
    check(plain, replace(FORMATS[name], others={"in_proj_ba": None}), tmp_path, is_native=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            FP8,
            r"in_proj_qkvz\.weight_scale_inv has one row for 128 outputs, and .*linear_attn\.q\.weight "
            r"\(outputs 0 to 15 of each 96\) begins or ends between two; serve a checkpoint that leaves this",
        ),
        (
            "bitsandbytes nf4",
            r"in_proj_qkvz\.weight has the rows of .*linear_attn\.q\.weight in turns .*; serve a checkpoint that",
        ),
    ],
)
def test_rows_that_take_turns_within_a_block_are_refused(name: str, message: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    plain = save_tiny_qwen3_next(tmp_path / "plain", **sizes, linear_value_head_dim=16)
    save_published(plain, FORMATS[name], tmp_path / "coded", tmp_path / "decoded")
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(tmp_path / "coded")


def test_modules_are_left_out_by_their_names_in_the_checkpoint(tmp_path: Path) -> None:
    """Regression: names in `ignore` were compared with those in the model only."""
    scheme = compressed("pack-quantized", integers(4, "group", 32))
    scheme |= {"ignore": ["lm_head", "backbone.layers.0.mixer.out_proj", r"re:backbone\..*\.[kv]_proj$"]}
    others = {"layers.0.mixer.out_proj": None, "k_proj": None, "v_proj": None}
    plain = save_tiny_nemotron_h(tmp_path / "plain")
    save_published(plain, Published(scheme, ct_packed(4, 32), others), tmp_path / "coded", tmp_path / "decoded")
    weights = load(tmp_path / "coded")
    floats = {name for name, weight in weights.items() if not isinstance(weight, CodedWeight)}
    assert {name for name in floats if name.endswith((".out_proj.weight", "k_proj.weight", "v_proj.weight"))} == {
        "model.layers.0.mixer.out_proj.weight",
        "model.layers.3.self_attn.k_proj.weight",
        "model.layers.3.self_attn.v_proj.weight",
    }
