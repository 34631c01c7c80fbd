"""OpenVINO GenAI's continuous batching behind a light completions server; run by its environment's interpreter.

All cores, prefix caching, and prompts split so that they join the steps of decodes.
"""

import argparse
import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.race.peers.scripts.completions import Delta, Server, tokenizer_decoder
from bench.race.peers.scripts.stepping import Stepping

# NOTE: of another environment; what checks types here does not know it.
genai: Any = importlib.import_module("openvino_genai")
openvino: Any = importlib.import_module("openvino")
numpy: Any = importlib.import_module("numpy")


class OpenVinoEngine:
    """One `ContinuousBatchingPipeline`."""

    def __init__(self, model: Path, num_threads: int, cache_gb: int, precision: str, kv_precision: str) -> None:
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = cache_gb
        scheduling.max_num_batched_tokens = 2048
        scheduling.dynamic_split_fuse = True
        scheduling.enable_prefix_caching = True
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": num_threads,
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": kv_precision,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", properties)
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}

    def add(self, request_id: int, prompt: list[int], num_output: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = num_output
        config.ignore_eos = True
        config.do_sample = False
        tokens = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        self._handles[request_id] = self._pipeline.add_request(request_id, tokens, config)
        self._left[request_id] = num_output

    def cancel(self, request_id: int) -> None:
        self._forget(request_id).cancel()

    def step(self) -> Sequence[Delta]:
        self._pipeline.step()
        return [self._read(request_id) for request_id, handle in list(self._handles.items()) if handle.can_read()]

    def _read(self, request_id: int) -> Delta:
        """NOTE: a request that cannot be served becomes readable too, and would never end."""
        token_ids: list[int] = []
        handle = self._handles[request_id]
        while handle.can_read():
            for output in handle.read().values():
                token_ids += output.generated_ids
        if not token_ids:
            raise RuntimeError(f"request {request_id} got no token: {handle.get_status()}")
        self._left[request_id] -= len(token_ids)
        is_last = self._left[request_id] <= 0
        if is_last:
            self._forget(request_id)
        return Delta(request_id, token_ids, is_last)

    def _forget(self, request_id: int) -> Any:
        del self._left[request_id]
        return self._handles.pop(request_id)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gb", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--kv-precision", required=True)
    asked = parser.parse_args()
    engine = OpenVinoEngine(asked.model, asked.threads, asked.cache_gb, asked.precision, asked.kv_precision)
    server = Server(Stepping(engine), asked.name, tokenizer_decoder(str(asked.model / "tokenizer.json")))
    asyncio.run(server.run(asked.port))


if __name__ == "__main__":
    main()
