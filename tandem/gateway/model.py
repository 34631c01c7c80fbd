"""The model a gateway speaks for: its name, tokenizer and chat template. Immutable; computes no tokens, only ids."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError
from tandem.gateway.grammar_check import GrammarCheck
from tandem.gateway.parsing.answer_format import AnswerFormat
from tandem.models.hub import resolve_model_path, served_name
from tandem.rpc.messages import ModelInfo
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer

LONG_TEXT = 2048  # characters; encoding more, about a millisecond, must not hold up other streams
MANY_MESSAGES = 32
MAX_CHARACTERS_PER_TOKEN = 1024  # of a whole prompt on average; real text has fewer than ten

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
        return cls(name, tokenizer, template, created_s, answers, GrammarCheck(tokenizer))

    def require(self, name: str) -> None:
        """Raises RequestError, which becomes 404, for a model that is not served here."""
        if name != self.name:
            raise RequestError(
                f"the model {shown(name)} does not exist here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def encode(self, text: str, max_model_len: int, *, add_special_tokens: bool) -> list[int]:
        """The ids of `text`, counted before and after.

        Raises:
            InvalidRequestError: it is empty, too long, or no text.
        """
        longest = MAX_CHARACTERS_PER_TOKEN * max_model_len
        if len(text) > longest:
            raise _too_long(f"the prompt has {len(text)} characters", max_model_len)

        def encoded() -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return check_length(await _off_loop(len(text), encoded), max_model_len)

    async def token_ends(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """For each token of `text`, which `encode` has taken, how many characters lie before its end."""

        def ends() -> list[int]:
            return self.tokenizer.token_ends(text, add_special_tokens=add_special_tokens)

        return await _off_loop(len(text), ends)

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


def check_length(token_ids: list[int], max_model_len: int) -> list[int]:
    """`token_ids` if there are some and the context has room for one more."""
    if not token_ids:
        raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
    if len(token_ids) >= max_model_len:
        raise _too_long(f"the prompt has {len(token_ids)} tokens", max_model_len)
    return token_ids


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """Long work goes to a thread."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)


def _too_long(what: str, max_model_len: int) -> RequestError:
    return RequestError(
        f"{what}; the context of {max_model_len} tokens has room for at most {max_model_len - 1}; shorten it",
        param="prompt",
        code="context_length_exceeded",
    )
