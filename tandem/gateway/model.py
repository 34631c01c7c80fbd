"""The model a gateway speaks for: its name, tokenizer and chat template. Immutable; computes no tokens, only ids."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError
from tandem.gateway.grammar_check import GrammarCheck
from tandem.gateway.parsing.answer_format import AnswerFormat
from tandem.gateway.prompt_encoder import LONG_TEXT, PromptEncoder
from tandem.models.hub import resolve_model_path, served_name
from tandem.rpc.messages import ModelInfo
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer

MANY_MESSAGES = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`created_s`: when this gateway began to serve it, seconds since the epoch."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    created_s: int
    answers: AnswerFormat
    grammars: GrammarCheck
    encoder: PromptEncoder

    @classmethod
    def load(
        cls,
        path_or_hub_id: str,
        name: str | None,
        created_s: int,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> "ServedModel":
        """The model's tokenizer, template and the form of its answers.

        Raises:
            CheckpointError: there is no such directory or its tokenizer cannot be used.
            ConfigurationError: no parser has that name.
        """
        path = resolve_model_path(path_or_hub_id, has_weights=False)
        tokenizer, template = Tokenizer.load(path), ChatTemplate.find(path)
        answers = AnswerFormat.detect(
            None if template is None else template.source,
            tokenizer,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        name = name or served_name(path_or_hub_id)
        return cls(name, tokenizer, template, created_s, answers, GrammarCheck(tokenizer), PromptEncoder(tokenizer))

    def require(self, name: str) -> None:
        """Raises RequestError, which becomes 404, for a model that is not served here."""
        if name != self.name:
            raise RequestError(
                f"the model {shown(name)} does not exist here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def check_grammar(self, grammar: str, info: ModelInfo) -> None:
        """Raises InvalidRequestError for one that cannot be enforced, naming why."""
        await self.grammars.check(grammar, info.vocab_size)

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt of a chat.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the messages.
        """
        template = self.template
        if template is None:
            raise RequestError(
                f"the model {self.name!r} has no chat template, so it takes plain prompts: use /v1/completions",
                param="messages",
            )
        # NOTE: what a template costs is its loop over the messages; long contents are copied, which is nothing.
        size = LONG_TEXT * (len(messages) + len(variables.get("tools") or ())) // MANY_MESSAGES
        return await _off_loop(size, lambda: template.render(messages, **variables))


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """Long work goes to a thread."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)
