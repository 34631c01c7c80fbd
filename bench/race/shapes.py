"""The checkpoints of the race: random ones of real shapes, as `bench.checkpoints` makes them, SmolLM2 and the demo.

Rows of the vocabulary that the tokenizer does not have are zero, so that no greedy answer holds a token without text.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.checkpoints import DEMO, EXPERT_SHAPES, random_checkpoint
from bench.dtypes import checkpoint as default_checkpoint
from bench.race.work import ModelCost

DEMO_SHAPE, REAL = "demo", "smollm2"
SHAPE_NAMES = ("qwen3-0.6b", "small", *EXPERT_SHAPES, REAL, DEMO_SHAPE)
_GROUP, _SHORTER_GROUP = 128, 64
_WEIGHTS = "model.safetensors"
_EMBEDDINGS = "model.embed_tokens.weight"


def checkpoint(shape: str) -> Path:
    """The directory of that shape's checkpoint; made on first use."""
    if shape == DEMO_SHAPE:
        return DEMO
    if shape == REAL:
        return default_checkpoint("bfloat16")
    source = random_checkpoint(shape)
    path = source.with_name(f"{shape}-race")
    if not (path / "complete").exists():
        shutil.rmtree(path, ignore_errors=True)
        _copy(source, path)
        (path / "complete").touch()
    return path


def cost_of(path: Path) -> ModelCost:
    """Of a checkpoint's tokens."""
    return ModelCost(json.loads((path / "config.json").read_text()))


def _copy(source: Path, path: Path) -> None:
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("complete", _WEIGHTS))
    weights = load_file(source / _WEIGHTS)
    num_words = Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size(with_added_tokens=False)
    weights[_EMBEDDINGS][num_words:] = 0
    save_file(weights, path / _WEIGHTS, metadata={"format": "pt"})


def group_size(checkpoint: Path) -> int:
    """Inputs that share a scale in int4: 128, or where rows are no multiple of that 64."""
    config = json.loads((checkpoint / "config.json").read_text())
    sizes = config["hidden_size"], config["intermediate_size"]
    return _SHORTER_GROUP if any(size % _GROUP for size in sizes) else _GROUP
