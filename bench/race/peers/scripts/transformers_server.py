"""transformers' continuous batching behind a light completions server; run by its environment's interpreter.

bfloat16 on all cores, SDPA attention over its pages, prefix sharing as it does by itself.
"""

import argparse
import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.race.peers.scripts.completions import Asked, Delta, Server, tokenizer_decoder

# NOTE: of another environment, whose version need not be the one whose types are checked here.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

_NO_END = -1


class Manager:
    """One `ContinuousBatchingManager`: it steps on a thread of its own and delivers on the loop."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._on_error: Callable[[BaseException], None] = _unexpected

    def begin(self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._manager.start()

    def put(self, asked: Asked) -> None:
        request_id, num_given = str(asked.request_id), 0

        def take(output: Any) -> None:
            nonlocal num_given
            if output.error:
                self._on_error(RuntimeError(output.error))
                return
            new = output.generated_tokens[num_given:]
            num_given += len(new)
            asked.deltas.put_nowait(Delta(asked.request_id, new, num_given >= asked.num_output))

        self._manager.register_result_handler(request_id, take)
        self._manager.add_request(
            asked.prompt, request_id, max_new_tokens=asked.num_output, streaming=True, eos_token_id=_NO_END
        )

    def cancel(self, request_id: int) -> None:
        self._manager.cancel_request(str(request_id))


def _unexpected(error: BaseException) -> None:
    raise error


def load(path: Path, num_threads: int, cache_gb: int, dtype: torch.dtype) -> Manager:
    """The model and what batches for it."""
    torch.set_num_threads(num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    config = model.config
    token_bytes = 2 * dtype.itemsize * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    batching = transformers.ContinuousBatchingConfig(max_batch_tokens=2048, auto_switch_to_flash=False)
    batching.num_blocks = cache_gb * 2**30 // (batching.page_size * token_bytes)
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=_NO_END)
    return Manager(model.init_continuous_batching(greedy, batching))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gb", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    asked = parser.parse_args()
    decoder = tokenizer_decoder(str(asked.model / "tokenizer.json"))
    manager = load(asked.model, asked.threads, asked.cache_gb, getattr(torch, asked.dtype))
    server = Server(manager, asked.name, decoder)
    asyncio.run(server.run(asked.port))


if __name__ == "__main__":
    main()
