"""`tandem chat`: a conversation in the terminal, rendered by the checkpoint's own chat template.

Every turn is an ordinary request with the whole conversation; the prefix cache makes its beginning cheap.
"""

import sys
import time

from pydantic import Field
from rich.console import Console
from rich.markup import escape

from tandem.core.errors import InvalidRequestError
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tandem.models.loader import resolve_model_path
from tandem.process.settings import EngineSettings, SamplingSettings
from tandem.text.chat_template import ChatTemplate

Message = dict[str, str]


class ChatCommand(EngineSettings, SamplingSettings, cli_prog_name="tandem chat"):
    """Talk with a model. /new starts over, /quit or Ctrl-D ends."""

    system: str | None = Field(None, description="system message; omitted: the template's")

    def run(self) -> int:
        if self.n != 1:
            raise InvalidRequestError(f"n={self.n}: a conversation has one answer in turn; leave --n out")
        console = Console(highlight=False)
        started_s = time.monotonic()
        path = resolve_model_path(self.model, allow_pickle=self.allow_pickle)
        template = ChatTemplate.load(path)
        engine = build_engine(self.engine_config())
        params = self.sampling_params(engine.sampling_defaults)
        console.print(
            f"[bold]{escape(self.model)}[/] is ready in {time.monotonic() - started_s:.1f} s. /new starts over, /quit "
            "ends."
        )
        messages = self._opening()
        while (line := _read_line()) is not None:
            if line == "/new":
                messages = self._opening()
            elif line:
                messages.append({"role": "user", "content": line})
                self._answer(engine, template, messages, params, console)
        return 0

    def _opening(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _answer(
        self, engine: Engine, template: ChatTemplate, messages: list[Message], params: SamplingParams, console: Console
    ) -> None:
        """Stream the answer to the last message and add it to the conversation; Ctrl-C ends it early."""
        assert engine.tokenizer is not None
        try:
            prompt = engine.tokenizer.encode(template.render(messages), add_special_tokens=False)
            request_id = engine.add_request(prompt, params)
        except InvalidRequestError as error:
            messages.pop()
            console.print(f"[red]{escape(str(error))}[/]\n/new starts a new conversation.")
            return
        text, last = "", None
        try:
            while engine.has_work:
                for last in engine.step():
                    text += last.text
                    sys.stdout.write(last.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            engine.abort(request_id)
        messages.append({"role": "assistant", "content": text})
        console.print(f"\n[dim]{_summary(last)}[/]")


def _read_line() -> str | None:
    try:
        line = input("\n> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/quit" else line


def _summary(last: RequestOutput | None) -> str:
    if last is None or last.metrics is None:
        return "stopped"
    metrics = last.metrics
    rate = "" if not metrics.tpot_s else f" · {1 / metrics.tpot_s:.0f} tokens/s"
    first = "" if metrics.ttft_s is None else f"first token {metrics.ttft_s * 1000:.0f} ms"
    return f"{first}{rate} · {metrics.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens cached"
