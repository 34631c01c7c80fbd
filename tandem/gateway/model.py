"""The model that a gateway serves: its name, tokenizer, chat template, and caches of encoded prompts. No weights."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.core.errors import ConfigurationError, shown
from tandem.gateway.errors import RequestError
from tandem.gateway.grammar_check import GrammarCheck
from tandem.gateway.known_conversations import KnownConversations
from tandem.gateway.known_prefixes import DEFAULT_MAX_BYTES, KnownPrefixes
from tandem.gateway.one_system import shows_later_systems
from tandem.gateway.parsing.answer_format import AnswerFormat
from tandem.gateway.prompt_encoder import PromptEncoder
from tandem.models.hub import resolve_model_path, served_name
from tandem.rpc.messages import ModelInfo
from tandem.text.chat_template import ChatTemplate, Rendered
from tandem.text.cuts import CutRule
from tandem.text.resumption import Resumption
from tandem.text.tokenizer import Tokenizer

MANY_MESSAGES = 32  # a chat with more messages is rendered in a thread
MANY_UNREAD_MESSAGES = 512  # likewise with more messages that the template's loop only skips, some 2 µs each
LONG_MESSAGES = 64 * 1024  # characters of all together
_CONVERSATIONS_SHARE = 1 / 8  # of the memory for encoded beginnings; an entry takes a fiftieth of its tokens

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One served model.

    Args:
        created_s: when this gateway began to serve it, seconds since the epoch.
        has_one_system: the template shows a system message at the beginning only.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    created_s: int
    has_one_system: bool
    answers: AnswerFormat
    grammars: GrammarCheck
    encoder: PromptEncoder
    conversations: KnownConversations

    @classmethod
    def load(
        cls,
        path_or_hub_id: str,
        name: str | None,
        created_s: int,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        max_known_bytes: int = DEFAULT_MAX_BYTES,
    ) -> "ServedModel":
        """Loads the model's tokenizer and template, and detects the format of its answers.

        Args:
            max_known_bytes: memory for the encoded beginnings of chats.

        Raises:
            CheckpointError: there is no such directory or its tokenizer cannot be used.
            ConfigurationError: no parser has that name, or tool calls are to be read of a model whose template shows no
                tools.
        """
        for_conversations = int(max_known_bytes * _CONVERSATIONS_SHARE)
        path = resolve_model_path(path_or_hub_id, has_weights=False)
        tokenizer, template = Tokenizer.load(path), ChatTemplate.find(path)
        answers = answer_format(path_or_hub_id, tokenizer, template, tool_parser, reasoning_parser)
        return cls(
            name=name or served_name(path_or_hub_id),
            tokenizer=tokenizer,
            template=template,
            created_s=created_s,
            has_one_system=template is not None and not shows_later_systems(template.source),
            answers=answers,
            grammars=GrammarCheck(tokenizer),
            encoder=PromptEncoder(
                tokenizer, _cut_rule(tokenizer, template), KnownPrefixes(max_known_bytes - for_conversations)
            ),
            conversations=KnownConversations(for_conversations),
        )

    def require(self, name: str) -> None:
        """Raises RequestError with status 404 if `name` is not the served model."""
        if name != self.name:
            raise RequestError(
                f"the model {shown(name)} does not exist here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def check_grammar(self, grammar: str, info: ModelInfo) -> None:
        """Raises InvalidRequestError for a grammar that cannot be enforced, naming the reason."""
        await self.grammars.check(grammar, info.vocab_size)

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Renders the prompt of a chat.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the messages.
        """
        template = self._required_template()
        if _is_quick(messages, variables):
            return template.render(messages, **variables)
        return await asyncio.to_thread(template.render, messages, **variables)

    async def render_from(
        self,
        messages: Sequence[Mapping[str, Any]],
        start: int,
        next_start: int,
        former: Resumption | None,
        variables: Mapping[str, Any],
    ) -> Rendered:
        """Renders the prompt of a chat from message number `start` on; arguments as of `ChatTemplate.render_from`."""
        render = partial(self._required_template().render_from, messages, start, next_start, former, **variables)
        is_quick = len(messages) <= MANY_UNREAD_MESSAGES and _is_quick([each for each in messages if each], variables)
        return render() if is_quick else await asyncio.to_thread(render)

    def _required_template(self) -> ChatTemplate:
        if self.template is None:
            raise RequestError(
                f"the model {self.name!r} has no chat template, so it takes plain prompts: use /v1/completions",
                param="messages",
            )
        return self.template


def _cut_rule(tokenizer: Tokenizer, template: ChatTemplate | None) -> CutRule:
    """The rule by which chats of the model are cut; logs the reason where they cannot be."""
    rule = CutRule.find(tokenizer, template)
    if rule.token is None and template is not None:
        _logger.info("every turn of a chat is encoded whole: %s", rule.reason)
    return rule


def _is_quick(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> bool:
    """Whether rendering takes so little time that it may run in the event loop.

    NOTE: the cost is the template's loop over messages and nested values, such as tools and calls; texts are copied.
    """
    if len(messages) > MANY_MESSAGES or any(isinstance(value, (dict, list)) for value in variables.values()):
        return False
    values = [value for message in messages for value in message.values()]
    texts = [value for value in values if isinstance(value, str)]
    return len(texts) == len(values) and sum(map(len, texts)) <= LONG_MESSAGES


def answer_format(
    model: str, tokenizer: Tokenizer, template: ChatTemplate | None, tool_parser: str, reasoning_parser: str
) -> AnswerFormat:
    """Format of a model's answers. `model`: its name in errors; the parsers as in `AnswerFormat.detect`.

    Raises:
        ConfigurationError: no parser has that name, or tool calls are to be read of a model whose template shows no
            tools.
    """
    source = None if template is None else template.source
    detect = partial(AnswerFormat.detect, source, tokenizer, reasoning_parser=reasoning_parser)
    answers = detect(tool_parser=tool_parser)
    if answers.tools is None or template is None or template.mentions("tools", has_tools=True):
        return answers
    if tool_parser != "auto":
        raise ConfigurationError(
            f"tool_parser={tool_parser}: the chat template of {model} shows no tools, so the model would never see "
            "them; leave it out, or serve a checkpoint with a template that shows them"
        )
    return detect(tool_parser="none")
