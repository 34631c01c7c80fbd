"""Logits of every position of a text by llama.cpp, for the race's table of quality: MODEL TOKENS.json OUT.npy."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

# NOTE: of another environment; what checks types here does not know it.
llama: Any = importlib.import_module("llama_cpp")
numpy: Any = importlib.import_module("numpy")


def main() -> None:
    path, tokens, out = sys.argv[1:]
    token_ids = json.loads(Path(tokens).read_text())
    model = llama.Llama(model_path=path, n_ctx=len(token_ids) + 8, n_threads=2, logits_all=True, verbose=False)
    model.eval(token_ids)
    numpy.save(out, numpy.asarray(model.scores[: len(token_ids)], dtype=numpy.float32))


if __name__ == "__main__":
    main()
