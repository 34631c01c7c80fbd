"""Sequences of tokens for calibration and evaluation, out of files of text. The two never overlap."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.core.errors import ConfigurationError, InvalidRequestError
from tandem.text.tokenizer import Tokenizer

_HELD_OUT_SHARE = 8  # one sequence of so many


@dataclass(frozen=True, slots=True)
class Sequences:
    """int64 [sequences, length] each; none at all where there is no text."""

    calibration: torch.Tensor
    evaluation: torch.Tensor


def read_sequences(
    tokenizer: Tokenizer,
    calibrate: Path | None,
    evaluate: Path | None,
    *,
    length: int,
    most_calibration: int,
    most_evaluation: int,
) -> Sequences:
    """The text of `calibrate` cut into sequences of `length` tokens.

    Without `evaluate` the last eighth is held out for evaluation. Where there are more sequences than wanted, those at
    even distances are taken.

    Raises:
        InvalidRequestError: a file cannot be read or is too short.
    """
    empty = torch.empty(0, length, dtype=torch.int64)
    if calibrate is None:
        held_out = empty if evaluate is None else _read(tokenizer, evaluate, "--evaluate", length, 1)
        return Sequences(empty, _spaced(held_out, most_evaluation))
    found = _read(tokenizer, calibrate, "--calibrate", length, 1 if evaluate is not None else 2)
    if evaluate is not None:
        if calibrate.resolve() == evaluate.resolve():
            raise ConfigurationError(f"--evaluate={evaluate} is the file of --calibrate; leave it out or name another")
        held_out = _read(tokenizer, evaluate, "--evaluate", length, 1)
    else:
        num_kept = len(found) - max(1, len(found) // _HELD_OUT_SHARE)
        found, held_out = found[:num_kept], found[num_kept:]
    return Sequences(_spaced(found, most_calibration), _spaced(held_out, most_evaluation))


def _read(tokenizer: Tokenizer, path: Path, flag: str, length: int, fewest: int) -> torch.Tensor:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{flag}={path}: {error}; give a readable file of text in UTF-8") from error
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    num_sequences = len(token_ids) // length
    if num_sequences < fewest:
        raise InvalidRequestError(
            f"{flag}={path} has {len(token_ids)} tokens and {fewest * length} are needed; give a longer text, or "
            f"shorter sequences by --sequence-length (now {length})"
        )
    return torch.tensor(token_ids[: num_sequences * length]).view(num_sequences, length)


def _spaced(sequences: torch.Tensor, most: int) -> torch.Tensor:
    if len(sequences) <= most:
        return sequences
    return sequences[torch.arange(most) * len(sequences) // most]
