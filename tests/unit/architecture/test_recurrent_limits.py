"""A draft model with recurrent layers is refused by name; auto drafts for such a model."""

from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tests.helpers.engines import tiny_engine
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid
from tests.helpers.tokenizers import write_byte_tokenizer


def test_auto_drafts(tmp_path: Path) -> None:
    engine = tiny_engine(write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path)), speculate="auto")
    assert engine.model.drafter == "suffix"


def test_a_draft_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    path = write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path))
    with pytest.raises(ConfigurationError, match=r"speculate='draft=.*recurrent state.*use a model without one"):
        tiny_engine(path, speculate=f"draft={path}")
