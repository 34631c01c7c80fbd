"""A format of weights that no checkpoint here has, through loader, layers and engine as they are: the seam that coded
checkpoints will use.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tandem.architecture.fields import Fields
from tandem.architecture.model import HEAD
from tandem.compute.ops import Kernels
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.base import StoredTensors, WeightFormat
from tandem.compute.weights.dense import DenseFormat, MatrixWeight
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.core.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models import packed
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.engines import TINY, drain, token_ids
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.tokenizers import write_byte_tokenizer
from tests.helpers.toy_weights import (
    ToyExperts,
    ToyFormat,
    ToyWeight,
    read_toy,
    read_toy_with_grouped,
    save_coded,
)

BUILDERS = {
    "llama": checkpoints.save_tiny_llama,
    "llama with biases": lambda path: checkpoints.save_tiny_llama(path, attention_bias=True, mlp_bias=True),
    "mixtral": checkpoints.save_tiny_mixtral,
    "qwen3_moe": checkpoints.save_tiny_qwen3_moe,
}
PROMPTS = ([5, 9, 13, 2], list(range(40, 75)), [7])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(params=BUILDERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Directory of the checkpoints `coded` and `decoded`."""
    path = BUILDERS[request.param](tmp_path / "plain")
    write_byte_tokenizer(path)
    save_coded(path, tmp_path / "coded", tmp_path / "decoded")
    return tmp_path


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """A small Llama."""
    save_coded(checkpoints.save_tiny_llama(tmp_path / "plain"), tmp_path / "coded", tmp_path / "decoded")
    return tmp_path / "coded"


def served(path: Path, formats_of: FormatReader, *, is_native: bool = False) -> list[list[int]]:
    """Token ids of the greedy answers to `PROMPTS`, all served at once."""
    backend = "auto" if is_native else "reference"
    config = replace(TINY, model=str(path), native_kernels=is_native, attention_backend=backend)
    engine = build_engine(config, formats_of=formats_of)
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = drain(engine)
    return [token_ids(outputs[request_id, 0]) for request_id in ids]


def loaded(path: Path, formats_of: FormatReader, kernels: Kernels | None = None, **options: object) -> LoadedModel:
    device = torch.device("cpu")
    return load_model(
        str(path), device=device, kernels=kernels or TorchKernels(), formats_of=formats_of, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("is_native", [False, True])
def test_a_served_model_of_codes_answers_as_that_of_the_numbers_they_stand_for(
    checkpoint: Path, is_native: bool
) -> None:
    if is_native:
        load_or_skip()
    expected = served(checkpoint / "decoded", read_formats, is_native=is_native)
    assert served(checkpoint / "coded", read_toy, is_native=is_native) == expected
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)


def test_experts_can_be_one_call_of_their_format(tmp_path: Path) -> None:
    path = checkpoints.save_tiny_mixtral(tmp_path / "plain")
    write_byte_tokenizer(path)
    save_coded(path, tmp_path / "coded", tmp_path / "decoded")
    expected, before = served(tmp_path / "decoded", read_formats), ToyExperts.num_calls
    assert served(tmp_path / "coded", read_toy_with_grouped) == expected
    assert ToyExperts.num_calls > before


def test_each_weight_has_the_first_format_that_does_not_refuse_it(checkpoint: Path) -> None:
    weights = loaded(checkpoint / "coded", read_toy).decoder.parameters.weights
    plain = {name for name, weight in weights.items() if isinstance(weight, MatrixWeight)}
    assert HEAD in plain
    assert all(name == HEAD or ".gate." in name or ".router." in name for name in plain)
    assert all(isinstance(weight, ToyWeight) for name, weight in weights.items() if name not in plain)
    for name, weight in weights.items():
        coded_bytes = weight.shape[0] * weight.shape[1] + 4 * weight.shape[0]
        assert weight.num_bytes == (4 * weight.shape[0] * weight.shape[1] if name in plain else coded_bytes)


def test_codes_come_from_a_packed_file(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch and compiled kernels share one packed file. Neither packs the head, which has 199 rows."""
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    stored: set[str] = set()
    for kernels in (TorchKernels(), load_or_skip()):
        plain = loaded(checkpoint / "coded", read_toy, kernels)
        for _ in range(2):
            model = loaded(checkpoint / "coded", read_toy, kernels, packed_dir=tmp_path / "packed")
            weights = model.decoder.parameters.weights
            assert weights[HEAD].shape[0] == 199
            for name, weight in plain.decoder.parameters.weights.items():
                if isinstance(weight, ToyWeight):
                    stored |= {name, f"{name}_scale"}
                    found = weights[name]
                    assert isinstance(found, ToyWeight)
                    assert torch.equal(found.codes, weight.codes)
                    assert found.codes.stride() == (1, weight.shape[0]), "in the order of the file"
                    assert torch.equal(found.scales, weight.scales)
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert {*opened.keys()} == stored


def test_a_tensor_that_a_format_wants_is_missed_by_name(coded: Path) -> None:
    tensors = checkpoints.read_tensors(coded)
    scale = tensors.pop("model.layers.1.self_attn.k_proj.weight_scale")
    checkpoints.write_tensors(coded, tensors)
    with pytest.raises(CorruptCheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight_scale"):
        loaded(coded, read_toy)
    checkpoints.write_tensors(coded, tensors | {"model.layers.1.self_attn.k_proj.weight_scale": scale[:-1]})
    with pytest.raises(CorruptCheckpointError, match=r"k_proj\.weight_scale has shape"):
        loaded(coded, read_toy)


def test_codes_of_another_dtype_are_refused_in_both_directions(coded: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"weight_scale.*no place for"):
        loaded(coded, read_formats)
    tensors = checkpoints.read_tensors(coded)
    name = "model.layers.0.mlp.down_proj.weight"
    checkpoints.write_tensors(coded, tensors | {name: tensors[name].float()})
    with pytest.raises(UnsupportedCheckpointError, match=r"down_proj\.weight is stored as .*float32; supported: int8"):
        loaded(coded, read_toy)
    codes = {key: tensor for key, tensor in tensors.items() if not key.endswith("_scale")}
    checkpoints.write_tensors(coded, codes)
    with pytest.raises(UnsupportedCheckpointError, match=r"is stored as torch\.int8; supported: float32"):
        loaded(coded, read_formats)


def test_a_format_refuses_impossible_numbers(coded: Path) -> None:
    tensors = checkpoints.read_tensors(coded)
    name = "model.layers.2.mlp.up_proj.weight_scale"
    checkpoints.write_tensors(coded, tensors | {name: tensors[name].fill_(float("nan"))})
    with pytest.raises(CorruptCheckpointError, match=name):
        loaded(coded, read_toy)


def test_a_weight_that_all_formats_refuse_is_refused_with_their_reasons(coded: Path) -> None:
    def toy_alone(fields: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
        return (ToyFormat(),)

    with pytest.raises(UnsupportedCheckpointError, match=r"lm_head\.weight \(toy-int8: heads and routers"):
        loaded(coded, toy_alone)


def test_memory_is_asked_for_as_much_as_the_codes_take(coded: Path) -> None:
    num_bytes = sum(tensor.nbytes for tensor in checkpoints.read_tensors(coded).values())
    loaded(coded, read_toy, memory_bytes=num_bytes)
    with pytest.raises(CheckpointError, match="GB of memory"):
        loaded(coded, read_toy, memory_bytes=num_bytes - 1)


def test_another_meaning_of_the_same_bytes_has_another_fingerprint(coded: Path) -> None:
    def read_renamed(fields: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
        return ToyFormat(name="another"), DenseFormat(kernels)

    first, again, other = (loaded(coded, read).spec.fingerprint for read in (read_toy, read_toy, read_renamed))
    assert first == again != other
