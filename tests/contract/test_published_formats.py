"""Checkpoints in published formats: the numbers of each weight, answers as of these numbers, and the packed file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.compute.ops import Kernels
from tandem.compute.order import Order
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.base import Weight
from tandem.compute.weights.coded import CodedWeight
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models import packed
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.engines import TINY, drain, token_ids
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.published_formats import FORMATS, save_gpt_oss_blocks, save_published
from tests.helpers.tokenizers import write_byte_tokenizer

# NOTE: no size is a multiple of 128, so that blocks of fp8 have edges; all are of 64, for bitsandbytes
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
BUILDERS = {
    "llama": lambda path: checkpoints.save_tiny_llama(path, **SIZES),
    "qwen3_moe": lambda path: checkpoints.save_tiny_qwen3_moe(path, **SIZES | {"moe_intermediate_size": 64}),
}
PROMPTS = ([5, 9, 13, 2], list(range(40, 75)), [7])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
GPT_OSS = "gpt-oss"


@pytest.fixture(
    params=[*((name, family) for name in FORMATS for family in BUILDERS), (GPT_OSS, GPT_OSS)],
    ids="-".join,
    scope="module",
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `coded` and `decoded` are."""
    (name, family), place = request.param, tmp_path_factory.mktemp("published")
    is_gpt_oss = name == GPT_OSS
    path = checkpoints.save_tiny_gpt_oss(place / "plain") if is_gpt_oss else BUILDERS[family](place / "plain")
    write_byte_tokenizer(path)
    if is_gpt_oss:
        save_gpt_oss_blocks(path, place / "coded", place / "decoded")
    else:
        save_published(path, FORMATS[name], place / "coded", place / "decoded")
    return place


def loaded(path: Path, kernels: Kernels | None = None, packed_dir: Path | None = None) -> LoadedModel:
    return load_model(
        str(path), dtype="float32", device=torch.device("cpu"), kernels=kernels or TorchKernels(), packed_dir=packed_dir
    )


def weights_of(model: LoadedModel) -> Mapping[str, Weight]:
    return model.decoder.parameters.weights


def served(path: Path, *, is_native: bool) -> list[list[int]]:
    """What several requests at once are answered."""
    backend = "auto" if is_native else "reference"
    engine = build_engine(replace(TINY, model=str(path), native_kernels=is_native, attention_backend=backend))
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = drain(engine)
    return [token_ids(outputs[request_id, 0]) for request_id in ids]


def test_numbers_are_those_of_the_definition(checkpoint: Path) -> None:
    coded, decoded = weights_of(loaded(checkpoint / "coded")), weights_of(loaded(checkpoint / "decoded"))
    num_coded = 0
    for name, weight in coded.items():
        expected = decoded[name].matrix
        assert expected is not None
        if isinstance(weight, CodedWeight):
            torch.testing.assert_close(weight.coded.decode(), expected.tensor, rtol=1e-6, atol=1e-6)
            assert weight.num_bytes < expected.tensor.nbytes * 0.45
            num_coded += 1
        else:
            assert weight.matrix is not None
            assert torch.equal(weight.matrix.tensor, expected.tensor)
    assert num_coded > 9


@pytest.mark.parametrize("is_native", [False, True], ids=["pytorch", "compiled"])
def test_answers_are_those_of_the_numbers_that_codes_stand_for(checkpoint: Path, is_native: bool) -> None:
    if is_native:
        load_or_skip()
    expected = served(checkpoint / "decoded", is_native=is_native)
    assert served(checkpoint / "coded", is_native=is_native) == expected
    assert len({tuple(answer) for answer in expected}) > 1


def test_a_packed_file_holds_the_same_codes(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    for kernels in (TorchKernels(), load_or_skip()):
        plain = weights_of(loaded(checkpoint / "coded", kernels))
        for _ in range(2):
            found = weights_of(loaded(checkpoint / "coded", kernels, tmp_path / "packed"))
            for name, weight in plain.items():
                if isinstance(weight, CodedWeight):
                    other = found[name]
                    assert isinstance(other, CodedWeight)
                    assert other.coded.order is weight.coded.order
                    assert torch.equal(other.coded.codes.view(torch.uint8), weight.coded.codes.view(torch.uint8))
                    x = torch.randn(3, weight.shape[1])
                    assert torch.equal(other(x), weight(x))
            if isinstance(kernels, TorchKernels):
                assert not any(w.coded.order is Order.STRIPS for w in plain.values() if isinstance(w, CodedWeight))
