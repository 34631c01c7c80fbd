"""vLLM's engine moved step by step, with or without its own n-gram drafts; run by its environment's interpreter."""

import argparse
import importlib
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from bench.race.peers.scripts.speaking import speak
from bench.race.peers.scripts.vllm_drafts import ngram_drafts

# NOTE: of another environment, whose version need not be the one whose types are checked here.
vllm: Any = importlib.import_module("vllm")


class VllmVoice:
    """One engine. `num_drafts` 0: it drafts nothing."""

    def __init__(self, model: str, dtype: str, num_drafts: int) -> None:
        options = {"speculative_config": ngram_drafts(num_drafts)} if num_drafts else {}
        self._engine = vllm.LLM(model=model, dtype=dtype, max_model_len=4096, **options).llm_engine
        self._numbers = count()

    def answer(self, prompt: list[int], num_output: int) -> Iterator[Sequence[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        self._engine.add_request(str(next(self._numbers)), {"prompt_token_ids": prompt}, params)
        num_given = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                token_ids = list(output.outputs[0].token_ids)
                if len(token_ids) > num_given:
                    yield token_ids[num_given:]
                    num_given = len(token_ids)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--drafts", type=int, required=True)
    asked = parser.parse_args()
    speak(lambda: VllmVoice(asked.model, asked.dtype, asked.drafts))


if __name__ == "__main__":
    main()
