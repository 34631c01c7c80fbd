"""llama.cpp by its Python binding, with or without prompt lookup; run by its environment's interpreter."""

import argparse
import importlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from bench.race.peers.scripts.speaking import speak

# NOTE: of another environment, whose version need not be the one whose types are checked here.
llama_cpp: Any = importlib.import_module("llama_cpp")
drafts_of: Any = importlib.import_module("llama_cpp.llama_speculative")

_MAX_MATCH = 8  # tokens that are compared, as of our own n-gram drafts


class LlamaVoice:
    """One context. `num_drafts` 0: nothing is looked up."""

    def __init__(self, model: str, num_threads: int, num_drafts: int) -> None:
        lookup = drafts_of.LlamaPromptLookupDecoding(max_ngram_size=_MAX_MATCH, num_pred_tokens=num_drafts)
        self._llama = llama_cpp.Llama(
            model_path=model,
            n_ctx=4096,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            draft_model=lookup if num_drafts else None,
            logits_all=num_drafts > 0,  # NOTE: checking drafts fails without room for all logits
            verbose=False,
        )

    def answer(self, prompt: list[int], num_output: int) -> Iterator[Sequence[int]]:
        found = self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        for token_id in islice(found, num_output):
            yield [token_id]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--drafts", type=int, required=True)
    asked = parser.parse_args()
    speak(lambda: LlamaVoice(asked.model, asked.threads, asked.drafts))


if __name__ == "__main__":
    main()
