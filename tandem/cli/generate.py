"""`tandem generate`: answers prompts from the command line or a file, with an engine in this process.

The answer to a single prompt is streamed. Several prompts are batched; their answers are written as JSON lines in the
order of the prompts, each once it and all before it are complete.
"""

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field
from rich.console import Console
from rich.table import Table

from tandem.cli.prompt_file import Prompt, read_prompts
from tandem.core.errors import CapacityError, ConfigurationError, InvalidRequestError
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tandem.process.settings import EngineSettings, SamplingSettings


@dataclass(slots=True)
class _Answer:
    """Text generated for one choice of one prompt."""

    prompt: str | list[int]
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    last: RequestOutput | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finished

    @property
    def failed(self) -> bool:
        return self.last is not None and self.last.finish_reason is FinishReason.ERROR

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.last = output


@dataclass(frozen=True, slots=True)
class _Request:
    """A prompt on its way into the engine."""

    prompt: Prompt
    token_ids: Sequence[int]
    params: SamplingParams


class GenerateCommand(EngineSettings, SamplingSettings, cli_prog_name="tandem generate"):
    """Answer prompts. Several --prompt flags, or the lines of --file, are served together as one batch."""

    prompt: list[str] = Field([], description="text to continue; repeatable")
    file: Path | None = Field(
        None,
        description='JSON lines: {"prompt": "…" or [token ids], and optionally any sampling setting}',
    )
    output: Path | None = Field(None, description="write answers as JSON lines here; omitted: they are printed")
    stats: bool = Field(False, description="print TTFT, TPOT, prefix hits, blocks used and accepted drafts")

    def run(self) -> int:
        """Serve every prompt; the exit code is 1 when one of them failed."""
        prompts = self._prompts()
        with _opened(self.output) as target:
            engine = build_engine(self.engine_config())
            pending = deque(self._request(engine, prompt) for prompt in prompts)
            streaming = len(pending) == 1 and pending[0].params.n == 1 and self.output is None
            answers, peak_blocks = self._serve(engine, pending, target, streaming)
        if self.stats:
            _print_stats(engine, answers, peak_blocks)
        return int(any(answer.failed for answer in answers))

    def _prompts(self) -> list[Prompt]:
        prompts = [Prompt(text) for text in self.prompt]
        if self.file is not None:
            prompts += read_prompts(self.file)
        if not prompts:
            raise InvalidRequestError("there is no prompt; give --prompt TEXT or --file FILE.jsonl")
        return prompts

    def _request(self, engine: Engine, prompt: Prompt) -> _Request:
        with _blaming(prompt.where):
            params = self.sampling_params(engine.sampling_defaults, **prompt.options)
            return _Request(prompt, engine.encode(prompt.prompt), params)

    def _serve(
        self, engine: Engine, pending: deque[_Request], target: TextIO, streaming: bool
    ) -> tuple[list[_Answer], int]:
        """Runs the engine until all is answered, writing answers in order; returns them and the peak of used blocks."""
        answers: dict[tuple[str, int], _Answer] = {}
        num_written, peak_blocks = 0, 0
        while pending or engine.has_work:
            _feed(engine, pending, answers)
            outputs = engine.step()
            peak_blocks = max(peak_blocks, engine.kv_usage.used)
            for output in outputs:
                answers[output.request_id, output.index].add(output)
                if streaming:
                    target.write(output.text)
                    target.flush()
            ready = list(takewhile(lambda answer: answer.finished, islice(answers.values(), num_written, None)))
            num_written += len(ready)
            for answer in ready:
                target.write("\n" if streaming else _as_json_line(answer, target))
                if answer.failed and answer.last is not None:
                    sys.stderr.write(f"error: {answer.last.stop_reason}\n")
        return list(answers.values()), peak_blocks


def _feed(engine: Engine, pending: deque[_Request], answers: dict[tuple[str, int], _Answer]) -> None:
    """Add requests in order while the engine's queue has room."""
    while pending:
        request = pending[0]
        try:
            with _blaming(request.prompt.where):
                request_id = engine.add_request(request.token_ids, request.params)
        except CapacityError:
            return
        pending.popleft()
        for index in range(request.params.n):
            answers[request_id, index] = _Answer(request.prompt.prompt, index)


@contextmanager
def _blaming(where: str) -> Iterator[None]:
    """Adds the prompt's place in its file to errors raised inside the block."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}" if where else str(error)) from error


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    """Opens the destination of answers, before anything is computed that could not be written."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigurationError(f"--output={path}: {error}; name a file that can be written") from error
    with file:
        yield file


def _as_json(answer: _Answer) -> dict[str, Any]:
    """An answer as JSON values; logprobs only where they were requested."""
    last = answer.last
    values: dict[str, Any] = {
        "prompt": answer.prompt,
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": None if last is None else last.finish_reason,
        "stop_reason": None if last is None else last.stop_reason,
    }
    if answer.logprobs:
        values["logprobs"] = [asdict(entry) for entry in answer.logprobs]
    if answer.prompt_logprobs is not None:
        values["prompt_logprobs"] = [entry and asdict(entry) for entry in answer.prompt_logprobs]
    return values


def _as_json_line(answer: _Answer, target: TextIO) -> str:
    """NOTE: in ASCII except on a terminal, so that no reader takes a separator inside text for the end of a line."""
    in_ascii = not target.isatty() or target.encoding.lower() != "utf-8"
    return json.dumps(_as_json(answer), ensure_ascii=in_ascii) + "\n"


def _print_stats(engine: Engine, answers: list[_Answer], peak_blocks: int) -> None:
    table = Table("prompt tokens", "cached", "output tokens", "TTFT ms", "TPOT ms", "preempted")
    for answer in answers:
        metrics = answer.last.metrics if answer.last is not None else None
        if metrics is not None:
            table.add_row(
                str(metrics.num_prompt_tokens),
                str(metrics.num_cached_tokens),
                str(metrics.num_output_tokens),
                _milliseconds(metrics.ttft_s),
                _milliseconds(metrics.tpot_s),
                str(metrics.num_preemptions),
            )
    console = Console(stderr=True)
    console.print(table)
    counters, usage = engine.counters, engine.kv_usage
    console.print(
        f"prefix hits: {counters.num_cached_prompt_tokens} of {counters.num_prompt_tokens} prompt tokens · "
        f"KV blocks: {peak_blocks} of {usage.total} at the peak, {usage.cached} cached now · "
        f"preemptions: {counters.num_preemptions}{_drafts(engine)}",
        highlight=False,
    )


def _drafts(engine: Engine) -> str:
    """Accepted and drafted tokens, if the model has a drafter."""
    drafts = engine.counters.drafts
    if engine.model.drafter is None:
        return ""
    return f" · drafts: {drafts.num_accepted} of {drafts.num_drafted} accepted, {drafts.saved_s or 0.0:.2f} s saved"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
