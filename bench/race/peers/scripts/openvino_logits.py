"""Logits of every position of a text by OpenVINO, for the race's table of quality: MODEL PRECISION TOKENS.json OUT.npy.

One pass over the whole text, with keys and values in 8 bits as in the race.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

# NOTE: of another environment; what checks types here does not know it.
openvino: Any = importlib.import_module("openvino")
numpy: Any = importlib.import_module("numpy")


def main() -> None:
    path, precision, tokens, out = sys.argv[1:]
    token_ids = numpy.array([json.loads(Path(tokens).read_text())], dtype=numpy.int64)
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": "u8", "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(Path(path) / "openvino_model.xml", "CPU", properties)
    inputs = {
        "input_ids": token_ids,
        "attention_mask": numpy.ones_like(token_ids),
        "position_ids": numpy.arange(token_ids.shape[1], dtype=numpy.int64)[None],
        "beam_idx": numpy.zeros(1, dtype=numpy.int32),
    }
    numpy.save(out, model(inputs)["logits"][0].astype(numpy.float32))


if __name__ == "__main__":
    main()
