"""Drafts and `tandem quantize` of a model with recurrent layers: refused by name, auto goes on."""

from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.core.sampling_params import SamplingParams
from tandem.quantize.recipe import Recipe
from tests.helpers.engines import drain, tiny_engine, token_ids
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid
from tests.helpers.quantizing import quantize_tiny
from tests.helpers.tokenizers import write_byte_tokenizer


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
