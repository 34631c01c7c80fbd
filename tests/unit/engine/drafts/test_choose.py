"""Drafters that `auto` stands for: what lies beside a checkpoint, whether it fits, and which comes first."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.architecture.stages import stage_of
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.formats import read_formats
from tandem.core.errors import ConfigurationError
from tandem.engine.drafts.networks import TargetModel
from tandem.models.loader import load_model
from tandem.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import read_tensors, save_tiny_llama, write_tensors
from tests.helpers.engines import tiny_engine
from tests.helpers.heads import save_deepseek_v3_with_mtp, save_eagle3
from tests.helpers.tokenizers import write_byte_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_byte_tokenizer(save_tiny_llama(tmp_path / "llama", num_hidden_layers=3))


def drafter_of_auto(model: Path) -> str | None:
    return tiny_engine(model, speculate="auto").model.drafter


@pytest.mark.parametrize("directory", ["eagle3", "eagle"])
def test_a_head_beside_the_checkpoint_is_taken(llama: Path, directory: str) -> None:
    save_eagle3(llama / directory, llama)
    assert drafter_of_auto(llama) == "eagle"


def test_other_directories_are_no_heads(llama: Path) -> None:
    save_eagle3(llama / "head", llama)
    (llama / "eagle").mkdir()
    assert drafter_of_auto(llama) == "suffix"


def test_the_checkpoints_own_module_comes_first(tmp_path: Path) -> None:
    model = write_byte_tokenizer(save_deepseek_v3_with_mtp(tmp_path, num_layers=3))
    save_eagle3(model / "eagle3", model)
    assert drafter_of_auto(model) == "mtp"


def test_a_head_that_does_not_fit_is_passed_over_with_a_warning(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other one is taken, or the text where there is none."""
    save_eagle3(llama / "eagle3", llama, hidden_size=48)
    with caplog.at_level(logging.WARNING):
        assert drafter_of_auto(llama) == "suffix"
    said = f"speculate='auto' passes over the head in {llama / 'eagle3'}: "
    assert said in caplog.text
    assert "hidden_size=48, and the model's hidden size is 64" in caplog.text
    save_eagle3(llama / "eagle", llama)
    assert drafter_of_auto(llama) == "eagle"


def test_an_unreadable_description_is_passed_over(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    (save_eagle3(llama / "eagle", llama) / "config.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert drafter_of_auto(llama) == "suffix"
    assert "config.json" in caplog.text


def test_a_head_that_fits_and_is_damaged_is_refused_by_name(llama: Path) -> None:
    head = save_eagle3(llama / "eagle", llama)
    write_tensors(head, read_tensors(head) | {"fc.weight": torch.zeros(64, 64)})
    with pytest.raises(ConfigurationError, match=rf"speculate='eagle={head}': the head cannot be used: .*fc\.weight"):
        tiny_engine(llama, speculate="auto")


def test_stages_of_layers_draft_from_the_text(llama: Path) -> None:
    """No stage has the states that a head reads; `auto` was refused where the checkpoint has one."""
    save_eagle3(llama / "eagle", llama)
    load = partial(load_model, dtype="float32", device=CPU, kernels=TorchKernels())
    whole = load(str(llama))
    target = TargetModel(
        whole, llama, Tokenizer.load(llama), TorchKernels(), CPU, read_formats, allow_pickle=False, load=load
    )
    assert target.offered_head() == f"eagle={llama / 'eagle'}"
    stage = replace(whole, spec=stage_of(whole.spec, 0, 2))
    assert replace(target, model=stage).offered_head() is None
