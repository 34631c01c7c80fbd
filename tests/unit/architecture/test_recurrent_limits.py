"""Quantised weights, drafts and `tandem quantize` of a model with recurrent layers: refused by name, auto goes on."""

from pathlib import Path

import pytest
import torch

from tandem.architecture.quantisation import QUANTISED
from tandem.cli.model_cost import named_model
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import ConfigurationError, UnsupportedCheckpointError
from tandem.core.sampling_params import SamplingParams
from tandem.models.loader import load_model
from tandem.quantize.recipe import Recipe
from tests.helpers.checkpoints import edit_config
from tests.helpers.engines import drain, tiny_engine, token_ids
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid, save_tiny_lfm2
from tests.helpers.quantizing import quantize_tiny
from tests.helpers.tokenizers import write_byte_tokenizer


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_weights_beside_a_recurrent_state_are_refused(method: str, tmp_path: Path) -> None:
    path = edit_config(save_tiny_lfm2(tmp_path), quantization_config={"quant_method": method})
    refused = rf"quant_method='{method}', and layer 0 keeps a recurrent state.*serve the checkpoint"
    with pytest.raises(UnsupportedCheckpointError, match=refused):
        load_model(str(path), device=torch.device("cpu"), kernels=TorchKernels())
    with pytest.raises(UnsupportedCheckpointError, match=rf"{refused}.*plan for its unquantised checkpoint"):
        named_model(str(path), None, 16)


def test_quantising_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = save_tiny_granite_hybrid(tmp_path / "granite")
    with pytest.raises(ConfigurationError, match=r"model\.layers\.0\.mamba\..* recurrent state.*serve the checkpoint"):
        quantize_tiny(source, tmp_path / "out", Recipe("int8", "rtn"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["granite"]


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_named_drafters_are_refused(name: str, tmp_path: Path) -> None:
    path = write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path))
    with pytest.raises(ConfigurationError, match=rf"speculate='{name}': .*recurrent state.*use off or auto"):
        tiny_engine(path, speculate=name)


def test_auto_drafts_nothing(tmp_path: Path) -> None:
    engine = tiny_engine(write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path)), speculate="auto")
    engine.add_request([7, 8, 9] * 8, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), request_id="r")
    assert len(token_ids(drain(engine)["r", 0])) == 8
    assert engine.counters.num_drafted == 0
