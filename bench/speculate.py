"""Speculative decoding of real text with the default model: tokens per second with drafts over those without.

    python -m bench.speculate [--batches 1,4] [--tokens 160] [--rounds 5] [--eagle DIR] [--save]

Engines without drafts, with n-gram, with suffix drafts and with those of a head run in one process, in turns whose
order changes, so that a busy machine disturbs all alike: the ratio is the median over rounds of one turn over the turn
without drafts in the same round. The tokens are greedy, and a run fails if drafts change any. Measured is decoding:
from the first token of the last request until all have ended, by the wall clock. Every request has a cache scope of its
own, so nothing is drafted from another's answer or from an earlier round's. An interrupt ends the run with a report of
what was measured.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, cycle, islice, product
from pathlib import Path

from bench.dtypes import checkpoint
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from tandem.core.config import EngineConfig
from tandem.core.draft_counts import DraftCounts
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tandem.models.default_model import NAME
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
OFF = "off"
SYSTEMS = (OFF, "ngram", "suffix")
HEAD = "eagle"
TEXT_CHARACTERS = 3000
CODE_BEGINS = "```python\n"
KV_BYTES = 1 << 30  # of up to 32 requests
MAX_BATCH = 64
EDITED = {
    "tandem/scheduler/queue.py": ("WaitingQueue", "RequestQueue"),
    "tandem/scheduler/step_plan.py": ("StepPlan", "StepDraft"),
    "tandem/engine/text_stream.py": ("TextStream", "TextWriter"),
    "tandem/worker/stopwatch.py": ("Stopwatch", "StageTimer"),
}
SUMMARISED = ("docs/disaggregation.md", "docs/gguf.md", "docs/accounts.md", "docs/prompt-caching.md")
CHATS = (
    ("What is gravity?", "Why do planets orbit the sun?", "Say both again, in one list."),
    ("How is bread made?", "What does yeast do in it?", "Write all of that as a recipe."),
    ("Write a Python function that reverses a string.", "Add a docstring.", "Show the whole function with types."),
    ("Who was Marie Curie?", "What did she discover?", "Write a short biography with what you said."),
)
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """One turn of one engine. `seconds`: those that are timed. `answers`: by request."""

    tokens_per_s: float
    seconds: float
    answers: Sequence[Sequence[int]]
    drafts: DraftCounts


class Speaker:
    """An engine with one drafter, or none; `speculation` in place of a named one."""

    def __init__(
        self, path: Path, drafter: str, speculation: Speculation | None = None, kv_bytes: int = KV_BYTES
    ) -> None:
        config = EngineConfig(
            model=str(path), dtype="bfloat16", max_model_len=4096, kv_cache_bytes=kv_bytes, speculate=drafter
        )
        self.engine: Engine = build_engine(config, speculation=speculation)
        self._numbers = count()

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
        """Answer all prompts at once with `num_tokens` tokens each."""
        engine, before = self.engine, self.engine.counters.drafts
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        ids = [
            engine.add_request(prompt, params, scope=CacheScope(salt=str(next(self._numbers)))) for prompt in prompts
        ]
        answers: dict[str, list[int]] = {request_id: [] for request_id in ids}
        began_s = time.perf_counter()
        num_early = 0
        while engine.has_work:
            has_begun = all(answers.values())
            for output in engine.step():
                answers[output.request_id].extend(output.token_ids)
            if not has_begun:
                began_s, num_early = time.perf_counter(), sum(map(len, answers.values()))
        seconds = time.perf_counter() - began_s
        num_timed = sum(map(len, answers.values())) - num_early
        drafts = engine.counters.drafts.since(before)
        return Run(num_timed / seconds, seconds, [answers[request_id] for request_id in ids], drafts)


class Prompts:
    """Prompts of each workload, as token ids."""

    def __init__(self, path: Path, speaker: Speaker, num_tokens: int) -> None:
        self._tokenizer = Tokenizer.load(path)
        self._template = ChatTemplate.load(path)
        self._speaker = speaker
        self._num_tokens = num_tokens

    def code(self) -> list[list[int]]:
        """Repeat a file of this repository with a class renamed. The answer is made to begin with code."""
        return [self._encoded([_user(_edit(name, *names))], CODE_BEGINS) for name, names in EDITED.items()]

    def summary(self) -> list[list[int]]:
        """Summarise the beginning of a document of this repository."""
        texts = ((ROOT / name).read_text()[:TEXT_CHARACTERS] for name in SUMMARISED)
        return [self._encoded([_user(f"Summarise the following text.\n\n{text}")]) for text in texts]

    def question(self) -> list[list[int]]:
        """The first question of a conversation, with no text before it to draft from."""
        return [self._encoded([_user(questions[0])]) for questions in CHATS]

    def chat(self) -> list[list[int]]:
        """The last question of a conversation whose earlier questions the model itself has answered."""
        return [self._encoded(self._talked(questions)) for questions in CHATS]

    def _talked(self, questions: Sequence[str]) -> list[Message]:
        messages: list[Message] = []
        for question in questions[:-1]:
            messages.append(_user(question))
            (answer,) = self._speaker.run([self._encoded(messages)], self._num_tokens).answers
            messages.append({"role": "assistant", "content": self._tokenizer.decode(answer)})
        return [*messages, _user(questions[-1])]

    def _encoded(self, messages: Sequence[Message], answer: str = "") -> list[int]:
        """`answer`: its first words, which the model continues."""
        return self._tokenizer.encode(self._template.render(messages) + answer, add_special_tokens=False)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _edit(name: str, old: str, new: str) -> str:
    code = (ROOT / name).read_text()
    return f"Repeat this file exactly, but rename the class {old} to {new}.\n{CODE_BEGINS}{code}```"


WORKLOADS: dict[str, Callable[[Prompts], list[list[int]]]] = {
    "code": Prompts.code,
    "summary": Prompts.summary,
    "question": Prompts.question,
    "chat": Prompts.chat,
}


def measure(
    model: Path | None,
    workloads: Sequence[str],
    batches: Sequence[int],
    num_tokens: int,
    rounds: int,
    eagle: Path | None = None,
) -> Report:
    """All systems on every workload, as far as it is not interrupted.

    Args:
        model: a checkpoint's directory; None = the default model.
        eagle: directory of an EAGLE-3 head for it; None = none is measured.

    Raises:
        RuntimeError: drafts changed a token.
    """
    path = model or checkpoint(None)
    kv_bytes = KV_BYTES * max(1, max(batches) // 32)
    speakers = {name: Speaker(path, name, kv_bytes=kv_bytes) for name in SYSTEMS}
    if eagle is not None:
        speakers[HEAD] = Speaker(path, f"{HEAD}={eagle}", kv_bytes=kv_bytes)
    prompts = Prompts(path, speakers[OFF], num_tokens)
    order = random.Random(0)
    rows: list[Row] = []
    with suppress(KeyboardInterrupt):
        for workload, batch in product(workloads, batches):
            asked = WORKLOADS[workload](prompts)
            runs: dict[str, list[Run]] = defaultdict(list)
            load = ForeignLoad()
            for _ in range(rounds):
                for name in order.sample(sorted(speakers), len(speakers)):
                    runs[name].append(speakers[name].run(list(islice(cycle(asked), batch)), num_tokens))
            require_equal(workload, runs)
            rows += rows_of(f"{workload}, batch {batch}", runs, load.cores())
    for speaker in speakers.values():
        speaker.engine.close()
    return Report("speculate", {"model": str(model or NAME), "tokens": num_tokens, "rounds": rounds}, rows)


def require_equal(workload: str, runs: Mapping[str, Sequence[Run]]) -> None:
    """Raises `RuntimeError` where drafts changed a token."""
    expected = runs[OFF][0].answers
    for name, found in runs.items():
        if any(run.answers != expected for run in found):
            raise RuntimeError(f"{workload}: {name} has other tokens than without drafts")


def rows_of(workload: str, runs: Mapping[str, Sequence[Run]], foreign_cores: float) -> list[Row]:
    """Speeds, and ratios to the turn without drafts in the same round."""
    rows = []
    for name, found in runs.items():
        rates = tuple(run.tokens_per_s for run in found)
        figures = {"decoded tokens/s": ("tok/s", rates)}
        if name != OFF:
            ratios = tuple(run.tokens_per_s / off.tokens_per_s for run, off in zip(found, runs[OFF], strict=True))
            drafts = [run.drafts for run in found]
            saved = tuple(off.seconds - run.seconds for run, off in zip(found, runs[OFF], strict=True))
            figures |= {
                "seconds saved": ("s", saved),
                "seconds saved, estimated": ("s", tuple(one.saved_s or 0.0 for one in drafts)),
                "over off": ("x", ratios),
                "accepted": ("share", tuple(one.num_accepted / max(1, one.num_drafted) for one in drafts)),
                "tokens per step": ("tokens", tuple(1 + one.num_accepted / one.num_steps for one in drafts)),
            }
        rows += [
            Row(workload, name, metric, statistics.median(samples), unit, None, None, samples, foreign_cores)
            for metric, (unit, samples) in figures.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's directory; omitted: the default model")
    parser.add_argument("--eagle", type=Path, help="directory of an EAGLE-3 head for the model; omitted: none")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--batches", default="1,4", help="numbers of requests; beyond four, prompts repeat")
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    workloads, batches = arguments.workloads.split(","), [int(number) for number in arguments.batches.split(",")]
    if not set(workloads) <= set(WORKLOADS):
        parser.error(f"--workloads {arguments.workloads}: name some of {', '.join(WORKLOADS)}")
    if not all(1 <= number <= MAX_BATCH for number in batches):
        parser.error(f"--batches {arguments.batches}: use 1 to {MAX_BATCH}")
    if arguments.tokens < 2:
        parser.error(f"--tokens {arguments.tokens}: at least 2, since the first is not timed")
    prioritise()
    report = measure(arguments.model, workloads, batches, arguments.tokens, arguments.rounds, arguments.eagle)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
