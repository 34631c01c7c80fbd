"""llama.cpp's batches of sequences behind a light completions server; run by its environment's interpreter.

As its own server does: decodes of all sequences and as much of the prompts as fits go into one batch of 2,048 tokens,
which the library computes in parts of 512.
"""

import argparse
import asyncio
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.race.peers.scripts.completions import Delta, Server, tokenizer_decoder
from bench.race.peers.scripts.stepping import Stepping

# NOTE: of another environment; what checks types here does not know it.
llama: Any = importlib.import_module("llama_cpp")
numpy: Any = importlib.import_module("numpy")

NUM_SEQUENCES = 16
NUM_CONTEXT = 40960  # tokens of all sequences
BATCH = 2048


@dataclass
class Placed:
    """A request that has a place. `waiting`: tokens that are not computed yet."""

    place: int
    waiting: list[int]
    num_left: int
    num_past: int = 0


@dataclass
class Queued:
    """A request that waits for a place."""

    prompt: list[int]
    num_output: int


@dataclass
class LlamaEngine:
    """One context with places for `NUM_SEQUENCES` requests."""

    model: Any
    context: Any
    batch: Any
    num_words: int
    running: dict[int, Placed] = field(default_factory=dict)
    queued: dict[int, Queued] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(NUM_SEQUENCES)))

    @classmethod
    def open(cls, path: str, num_threads: int) -> "LlamaEngine":
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = NUM_CONTEXT, BATCH, NUM_SEQUENCES
        options.n_threads = options.n_threads_batch = num_threads
        options.kv_unified = True
        context = llama.llama_init_from_model(model, options)
        num_words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        return cls(model, context, llama.llama_batch_init(BATCH, 0, 1), num_words)

    def add(self, request_id: int, prompt: list[int], num_output: int) -> None:
        self.queued[request_id] = Queued(prompt, num_output)

    def cancel(self, request_id: int) -> None:
        self.queued.pop(request_id, None)
        if request_id in self.running:
            self._leave(request_id)

    def step(self) -> Sequence[Delta]:
        self._admit()
        ends = self._fill()
        if status := llama.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode: {status}")
        return [self._next(request_id, index) for request_id, index in ends]

    def _admit(self) -> None:
        while self.free and self.queued:
            request_id = next(iter(self.queued))
            queued = self.queued.pop(request_id)
            self.running[request_id] = Placed(self.free.pop(), queued.prompt, queued.num_output)

    def _fill(self) -> list[tuple[int, int]]:
        """The batch; of each sequence whose logits come, where in the batch. Decodes go first."""
        self.batch.n_tokens, ends = 0, []
        for request_id, one in sorted(self.running.items(), key=lambda item: len(item[1].waiting)):
            taken, one.waiting = (
                one.waiting[: BATCH - self.batch.n_tokens],
                one.waiting[BATCH - self.batch.n_tokens :],
            )
            for token_id in taken:
                self._put(token_id, one)
            if taken and not one.waiting:
                self.batch.logits[self.batch.n_tokens - 1] = 1
                ends.append((request_id, self.batch.n_tokens - 1))
        return ends

    def _put(self, token_id: int, one: Placed) -> None:
        index = self.batch.n_tokens
        self.batch.token[index], self.batch.pos[index] = token_id, one.num_past
        self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, one.place
        self.batch.logits[index] = 0
        self.batch.n_tokens, one.num_past = index + 1, one.num_past + 1

    def _next(self, request_id: int, index: int) -> Delta:
        one = self.running[request_id]
        row = llama.llama_get_logits_ith(self.context, index)
        token_id = int(numpy.ctypeslib.as_array(row, shape=(self.num_words,)).argmax())
        one.waiting, one.num_left = [token_id], one.num_left - 1
        if not one.num_left:
            self._leave(request_id)
        return Delta(request_id, [token_id], not one.num_left)

    def _leave(self, request_id: int) -> None:
        place = self.running.pop(request_id).place
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), place, -1, -1)
        self.free.append(place)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    asked = parser.parse_args()
    engine = LlamaEngine.open(asked.model, asked.threads)
    server = Server(Stepping(engine), asked.name, tokenizer_decoder(asked.tokenizer))
    asyncio.run(server.run(asked.port))


if __name__ == "__main__":
    main()
