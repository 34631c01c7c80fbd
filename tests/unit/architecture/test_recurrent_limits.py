"""`tandem quantize` of a model with recurrent layers, and such a draft model: refused by name; auto drafts."""

from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.quantize.recipe import Recipe
from tests.helpers.engines import tiny_engine
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid
from tests.helpers.quantizing import quantize_tiny
from tests.helpers.tokenizers import write_byte_tokenizer


def test_quantising_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = save_tiny_granite_hybrid(tmp_path / "granite")
    with pytest.raises(ConfigurationError, match=r"model\.layers\.0\.mamba\..* recurrent state.*serve the checkpoint"):
        quantize_tiny(source, tmp_path / "out", Recipe("int8", "rtn"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["granite"]


def test_auto_drafts(tmp_path: Path) -> None:
    engine = tiny_engine(write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path)), speculate="auto")
    assert engine.model.drafter == "suffix"


def test_a_draft_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    path = write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path))
    with pytest.raises(ConfigurationError, match=r"speculate='draft=.*recurrent state.*use a model without one"):
        tiny_engine(path, speculate=f"draft={path}")
