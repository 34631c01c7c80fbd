"""`tandem generate`: answers prompts and streams the text.

One prompt streams as it grows; several are batched and printed whole, each when it ends, or written as JSON lines.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.output import RequestOutput
from tandem.engine.resolve import build_engine
from tandem.serving.settings import EngineSettings, SamplingSettings


@dataclass(slots=True)
class _Answer:
    """What has been generated for one choice of one prompt."""

    prompt: str | list[int]
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    last: RequestOutput | None = None


class Generate(EngineSettings, SamplingSettings, cli_prog_name="tandem generate"):
    """Answer prompts. Several --prompt flags, or the lines of --file, are served together as one batch."""

    prompt: list[str] = Field([], description="text to continue; repeatable")
    file: Path | None = Field(
        None,
        description='JSON lines: {"prompt": "…" or [token ids], and optionally any sampling setting}',
    )
    output: Path | None = Field(None, description="write answers as JSON lines here instead of printing them")
    stats: bool = Field(False, description="print TTFT, TPOT, prefix hits and blocks used")

    def run(self) -> int:
        """Serve every prompt; the exit code is 1 when one of them failed."""
        prompts = self._prompts()
        engine = build_engine(self.engine_config())
        requests = [(prompt, self._params(engine, options)) for prompt, options in prompts]
        answers: dict[tuple[str, int], _Answer] = {}
        for prompt, params in requests:
            request_id = engine.add_request(prompt, params)
            answers.update({(request_id, index): _Answer(prompt, index) for index in range(params.n)})
        streaming = len(answers) == 1 and self.output is None
        peak_blocks = self._serve(engine, answers, streaming)
        self._report(list(answers.values()), streaming)
        if self.stats:
            _print_stats(engine, list(answers.values()), peak_blocks)
        return int(any(answer.last is not None and answer.last.finish_reason == "error" for answer in answers.values()))

    def _prompts(self) -> list[tuple[str | list[int], dict[str, Any]]]:
        prompts: list[tuple[str | list[int], dict[str, Any]]] = [(text, {}) for text in self.prompt]
        if self.file is not None:
            prompts += list(_read_file(self.file))
        if not prompts:
            raise InvalidRequestError("there is no prompt; give --prompt TEXT or --file FILE.jsonl")
        return prompts

    def _params(self, engine: Engine, options: dict[str, Any]) -> SamplingParams:
        return SamplingParams(**{**engine.sampling_defaults, **self.overrides(), **options})

    def _serve(self, engine: Engine, answers: dict[tuple[str, int], _Answer], streaming: bool) -> int:
        """Step until everything is answered; returns the most blocks that were used at once."""
        peak_blocks = 0
        while engine.has_work:
            outputs = engine.step()
            peak_blocks = max(peak_blocks, engine.kv_usage.used)
            for output in outputs:
                answer = answers[output.request_id, output.index]
                answer.text += output.text
                answer.token_ids += output.token_ids
                answer.last = output
                if streaming:
                    sys.stdout.write(output.text)
                    sys.stdout.flush()
        return peak_blocks

    def _report(self, answers: list[_Answer], streaming: bool) -> None:
        if self.output is not None:
            self.output.write_text("".join(json.dumps(_as_json(answer)) + "\n" for answer in answers))
        elif streaming:
            sys.stdout.write("\n")
        else:
            for answer in answers:
                sys.stdout.write(json.dumps(_as_json(answer), ensure_ascii=False) + "\n")
        for answer in answers:
            if answer.last is not None and answer.last.finish_reason == "error":
                sys.stderr.write(f"error: {answer.last.stop_reason}\n")


def _read_file(path: Path) -> Iterator[tuple[str | list[int], dict[str, Any]]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--file={path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), (str, list)):
            raise InvalidRequestError(f'{path}, line {number} must be an object with "prompt": text or token ids')
        yield entry.pop("prompt"), _sampling_options(entry, f"{path}, line {number}")


def _sampling_options(entry: dict[str, Any], where: str) -> dict[str, Any]:
    unknown = sorted(set(entry) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise InvalidRequestError(f"{where}: unknown sampling settings {unknown}; known are {known}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def _as_json(answer: _Answer) -> dict[str, Any]:
    last = answer.last
    return {
        "prompt": answer.prompt,
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": None if last is None else last.finish_reason,
        "stop_reason": None if last is None else last.stop_reason,
    }


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
        f"preemptions: {counters.num_preemptions}",
        highlight=False,
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
