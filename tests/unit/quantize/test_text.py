from pathlib import Path

import pytest
import torch

from tandem.core.errors import ConfigurationError, InvalidRequestError
from tandem.quantize.text import TextLimits, read_sequences
from tandem.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import write_byte_tokenizer

LIMITS = TextLimits(length=16, most_calibration=5, most_evaluation=2)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path))


def write(path: Path, first: int, num_characters: int) -> Path:
    path.write_text("".join(chr(first + number % 26) for number in range(num_characters)))
    return path


def test_the_last_eighth_is_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = write(tmp_path / "text", ord("a"), 16 * 16)
    found = read_sequences(tokenizer, text, None, TextLimits(16, 100, 100))
    assert found.calibration.shape == (14, 16)
    assert found.evaluation.shape == (2, 16)
    whole = torch.cat((found.calibration, found.evaluation)).flatten().tolist()
    assert whole == tokenizer.encode(text.read_text(), add_special_tokens=False)


def test_sequences_are_taken_at_even_distances(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text, held_out = write(tmp_path / "a", ord("a"), 16 * 20), write(tmp_path / "b", ord("A"), 16 * 3)
    found = read_sequences(tokenizer, text, held_out, LIMITS)
    every = torch.tensor(tokenizer.encode(text.read_text(), add_special_tokens=False)).view(20, 16)
    assert torch.equal(found.calibration, every[::4])
    assert tokenizer.decode(found.evaluation[0].tolist()) == held_out.read_text()[:16]


def test_without_a_file_the_text_is_the_languages_reference(tokenizer: Tokenizer) -> None:
    found = read_sequences(tokenizer, None, None, LIMITS)
    assert found.calibration.shape == (5, 16)
    assert found.evaluation.shape == (2, 16)
    assert torch.equal(found.calibration, read_sequences(tokenizer, None, None, LIMITS).calibration)


def test_a_text_that_is_too_short(tokenizer: Tokenizer, tmp_path: Path) -> None:
    message = r"text has 31 tokens and 32 are needed; give a longer text, or shorter sequences by --sequence-length"
    with pytest.raises(InvalidRequestError, match=message):
        read_sequences(tokenizer, write(tmp_path / "text", ord("a"), 31), None, LIMITS)


def test_a_file_that_is_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"--calibrate=.*none: .*give a readable file of text in UTF-8"):
        read_sequences(tokenizer, tmp_path / "none", None, LIMITS)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match=r"--evaluate=.*bytes: .*give a readable file of text in UTF-8"):
        read_sequences(tokenizer, None, tmp_path / "bytes", LIMITS)


def test_one_file_for_both_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = write(tmp_path / "text", ord("a"), 600)
    with pytest.raises(ConfigurationError, match=r"--evaluate=.*text is the file of --calibrate; leave it out"):
        read_sequences(tokenizer, text, text, LIMITS)
