"""Token sequences for calibration and evaluation, cut from text files; the two never overlap.

Without a file the text is the reference of the Python language that the running Python contains: English with code,
some 700 kB on every machine, so that nothing is bundled or downloaded.
"""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch

from tandem.core.errors import ConfigurationError, InvalidRequestError
from tandem.text.tokenizer import Tokenizer

_HELD_OUT_SHARE = 8  # one of so many sequences is held out
_SAMPLE = "the reference of Python (omit --calibrate)"


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences for calibration and evaluation: int64 [sequences, length] each, at least one of each."""

    calibration: torch.Tensor
    evaluation: torch.Tensor


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of the sequences. `length`: tokens of a sequence. `most_calibration`, `most_evaluation`: numbers of
    sequences; from a longer text they are taken at equal distances.
    """

    length: int
    most_calibration: int
    most_evaluation: int


def read_sequences(
    tokenizer: Tokenizer, calibrate: Path | None, evaluate: Path | None, limits: TextLimits
) -> Sequences:
    """The text of `calibrate` cut into sequences; without `evaluate` the last eighth of them is held out for
    evaluation.

    Each begins with the token that the tokenizer puts before a text, if there is one.

    Raises:
        InvalidRequestError: a file cannot be read or is too short.
        ConfigurationError: both names are of the same file.
    """
    if calibrate is not None and evaluate is not None and calibrate.resolve() == evaluate.resolve():
        raise ConfigurationError(f"--evaluate={evaluate} is the file of --calibrate; leave it out or name another")
    text, where = (_sample(), _SAMPLE) if calibrate is None else (_text(calibrate, "--calibrate"), str(calibrate))
    found = _cut(tokenizer, text, where, limits.length, 1 if evaluate is not None else 2)
    if evaluate is not None:
        held_out = _cut(tokenizer, _text(evaluate, "--evaluate"), str(evaluate), limits.length, 1)
    else:
        num_kept = len(found) - max(1, len(found) // _HELD_OUT_SHARE)
        found, held_out = found[:num_kept], found[num_kept:]
    return Sequences(_spaced(found, limits.most_calibration), _spaced(held_out, limits.most_evaluation))


def _sample() -> str:
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def _text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{flag}={path}: {error}; give a readable file of text in UTF-8") from error


def _cut(tokenizer: Tokenizer, text: str, where: str, length: int, fewest: int) -> torch.Tensor:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    first = _first(tokenizer)
    step = length - len(first)
    num_sequences = len(token_ids) // step
    if num_sequences < fewest:
        raise InvalidRequestError(
            f"{where} has {len(token_ids)} tokens and {fewest * step} are needed; give a longer text, or shorter "
            f"sequences by --sequence-length (now {length})"
        )
    rows = torch.tensor(token_ids[: num_sequences * step]).view(num_sequences, step)
    return torch.cat((torch.tensor(first, dtype=torch.int64).expand(num_sequences, -1), rows), dim=1)


def _first(tokenizer: Tokenizer) -> list[int]:
    """The token that begins a text; empty = there is none."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []


def _spaced(sequences: torch.Tensor, most: int) -> torch.Tensor:
    if len(sequences) <= most:
        return sequences
    return sequences[torch.arange(most) * len(sequences) // most]
