"""A checkpoint's chat template: renders messages to the prompt text on which the model was trained.

Equal to transformers' `apply_chat_template(tokenize=False)`. Templates run in Jinja's immutable sandbox: they see plain
JSON data, no objects. The size of the output and the number of steps are bounded. Of a long conversation whose
beginning was rendered before, only the end can be rendered (`render_from`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from tandem.core.errors import CorruptCheckpointError, InvalidRequestError, UnsupportedCheckpointError
from tandem.text.files import (
    MAX_CONFIG_BYTES,
    read_optional_object,
    read_text,
    read_tokenizer_config,
    template_tokens,
)
from tandem.text.resumable import RENDERING, NotQualifiedError
from tandem.text.resumption import PartialRendering, Resumption
from tandem.text.sandbox import BUDGET, Budget, Sandbox
from tandem.text.seen_messages import NotResumableError

MAX_PROMPT_CHARACTERS = 32 * 2**20
_MAX_DEPTH = 64
_RESERVED = frozenset({"messages", BUDGET, RENDERING})
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names under which messages may have reasoning
_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

_CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
_QUESTION, _ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
_LOOKED = (
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "a", "name": "look", "content": "seen"},
)
# Short conversations that a resumable template is tried with.
_TRIALS = (
    (_QUESTION, _ANSWER, _QUESTION),
    ({"role": "system", "content": "Be brief."}, _QUESTION, *_LOOKED, _ANSWER, _QUESTION, _ANSWER, _QUESTION),
    (_QUESTION, *_LOOKED, _ANSWER, _QUESTION, *_LOOKED),
)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Result of `render_from`: the prompt's text from one of the messages on.

    Args:
        num_before_kept: characters of `text` before the message at which a later rendering may begin.
        num_steps: steps that the template took.
        resumption: state that the later rendering needs; None where storing it would take too much memory.
    """

    text: str
    num_before_kept: int
    num_steps: int
    resumption: Resumption | None


class ChatTemplate:
    """One checkpoint's compiled template, or several by name. Safe to share between threads.

    Args:
        sources: Jinja source by name; "default" is used, or "tool_use" where there are tools and such a template.
        tokens: the special tokens that a template may mention by name, such as `bos_token`.
        now: the clock that templates read by `strftime_now`, in local time.

    Raises:
        CorruptCheckpointError: a source is not valid Jinja.
    """

    def __init__(
        self, sources: Mapping[str, str], tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        sandbox = Sandbox(now)
        self._templates = {name: _compile(sandbox, name, source) for name, source in sources.items()}
        self._tokens = dict(tokens)
        self._sources = dict(sources)
        self._resumable: dict[str, jinja2.Template | str] = {}
        for name, source in sources.items():
            self._resumable[name] = self._tried(name, _resumable(sandbox, source))
        self.source = sources.get("tool_use", sources.get("default", ""))

    @classmethod
    def find(cls, path: Path) -> "ChatTemplate | None":
        """The template of the checkpoint directory `path`, or None where it has none (a base model)."""
        config = read_tokenizer_config(path)
        other = path / "chat_template.json"  # of multimodal checkpoints
        sources = (
            _source_files(path)
            or _configured_sources(config, path / "tokenizer_config.json")
            or _configured_sources(read_optional_object(other), other)
        )
        return cls(sources, template_tokens(config)) if sources else None

    @classmethod
    def load(cls, path: Path) -> "ChatTemplate":
        """As `find`, but raises UnsupportedCheckpointError where the checkpoint has no template."""
        template = cls.find(path)
        if template is None:
            raise UnsupportedCheckpointError(
                f"{path} has no chat template, so it takes plain prompts only; add the chat_template.jinja it was "
                "trained with, or serve an instruction-tuned checkpoint"
            )
        return template

    def mentions(self, variable: str, *, has_tools: bool) -> bool:
        """Whether the template's source, in its version with or without tools, contains the name of this variable."""
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        return re.search(rf"\b{re.escape(variable)}\b", self._sources.get(name, "")) is not None

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, ready to be encoded without special tokens.

        `variables` are further names the template sees (`enable_thinking`, ...) and may replace special tokens.

        Raises:
            InvalidRequestError: the template refuses the messages (its own words are given), or the data is not
                JSON, or the prompt would be longer than 32 Mi characters.
        """
        seen = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt, **variables}
        conversation = [_message(message) for message in _require_messages(messages)]
        return self._run(self._templates[self._choose(tools)], self._seen(seen, conversation), Budget())

    def render_from(
        self,
        messages: Sequence[Message],
        start: int = 0,
        next_start: int | None = None,
        former: Resumption | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> Rendered:
        """Renders the end of the prompt, from message number `start` on, as `render` would write it; 0: the whole.

        Args:
            messages: those before number `start - 1` may be empty, except the first.
            next_start: number of the message at which a later rendering may begin; the last by default.
            former: state stored at message `start` of an earlier conversation with the same variables and earlier
                messages.

        Raises:
            InvalidRequestError: as `render`, about the part that is rendered.
            NotResumableError: why only `render` can do it. `ChangedInputsError` if another `former` might do.
        """
        template = self._resumable[self._choose(tools)]
        if isinstance(template, str):
            raise NotResumableError(template)
        return self._render_from(
            template,
            [_message(each) if each else None for each in _require_messages(messages)],
            start,
            len(messages) - 1 if next_start is None else next_start,
            former,
            {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt, **variables},
        )

    def _render_from(
        self,
        template: jinja2.Template,
        messages: Sequence[Message | None],
        start: int,
        next_start: int,
        former: Resumption | None,
        variables: Mapping[str, Any],
    ) -> Rendered:
        rendering, budget = PartialRendering(messages, start, next_start, former), Budget()
        seen = {**self._seen(variables, rendering.shown), RENDERING: rendering}
        before, after = rendering.parts(self._run(template, seen, budget))
        try:
            resumption = rendering.resumption()
        except NotResumableError:
            resumption = None
        return Rendered(before + after, len(before), budget.num_spent, resumption)

    def _tried(self, name: str, template: jinja2.Template | str) -> jinja2.Template | str:
        """Returns the template if it renders short conversations like the original one, else the reason as text.

        NOTE: a precaution; it also finds templates that can never be resumed.
        """
        if isinstance(template, str):
            return template
        for messages in _TRIALS:
            given = [_message(each) for each in messages]
            try:
                whole = self._run(self._templates[name], self._seen({"tools": None}, given), Budget())
            except InvalidRequestError:
                continue
            try:
                found = self._render_from(template, given, 0, len(given) - 1, None, {"tools": None})
            except (InvalidRequestError, NotResumableError) as error:
                return str(error)
            if found.text != whole:
                return "the template is rendered otherwise in parts"
        return template

    def _seen(self, variables: Mapping[str, Any], messages: Sequence[Any]) -> dict[str, Any]:
        """The variables that a template sees, as plain data."""
        if clash := _RESERVED & variables.keys():
            raise InvalidRequestError(f"chat template variables may not be named {sorted(clash)}")
        return {**self._tokens, **_plain(variables), "messages": messages}

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequestError(
                f"the model has chat templates {sorted(self._templates)}, but none named {name!r}"
            )
        return name

    def _run(self, template: jinja2.Template, variables: Mapping[str, Any], budget: Budget) -> str:
        chunks: list[str] = []
        num_characters = 0
        try:
            for chunk in template.generate({**variables, BUDGET: budget}):
                chunks.append(chunk)
                num_characters += len(chunk)
                if num_characters > MAX_PROMPT_CHARACTERS:
                    raise InvalidRequestError(f"the chat prompt exceeds {MAX_PROMPT_CHARACTERS} characters")
        except _FAULTS as error:
            raise InvalidRequestError(f"the model's chat template refused the messages: {error}") from error
        return "".join(chunks)


def _source_files(path: Path) -> dict[str, str]:
    """Templates that are files of their own, as transformers saves them; they replace tokenizer_config.json's."""
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files = {"default": path / "chat_template.jinja"} | files
    return {name: read_text(file, MAX_CONFIG_BYTES) for name, file in files.items()}


def _configured_sources(values: Mapping[str, Any], file: Path) -> dict[str, str]:
    """`chat_template` of a JSON file: one source, or a list of {name, template}."""
    value = values.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = [{"name": k, "template": v} for k, v in value.items()] if isinstance(value, Mapping) else value
    if not isinstance(entries, list) or not all(map(_is_named_source, entries)):
        raise CorruptCheckpointError(f"{file}: chat_template is no template: {value!r:.200}; download it again")
    return {entry["name"]: entry["template"] for entry in entries}


def _is_named_source(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _resumable(sandbox: Sandbox, source: str) -> jinja2.Template | str:
    """Compiles a template that can be rendered from a later message on; the reason as text where that is impossible."""
    try:
        return sandbox.load_resumable(source)
    except NotQualifiedError as error:
        return str(error)


def _compile(sandbox: Sandbox, name: str, source: str) -> jinja2.Template:
    try:  # NOTE: some faults, such as a break outside loops, only Python finds in what Jinja makes of a template
        return sandbox.load(source)
    except (jinja2.TemplateSyntaxError, SyntaxError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the chat template {name!r} is not valid Jinja: {error}") from error


def _require_messages(messages: Sequence[Message]) -> Sequence[Message]:
    if not messages:
        raise InvalidRequestError("messages is empty; a chat needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages holds a {type(message).__name__}; each message must be an object")
    return messages


def _message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no nulls, and reasoning under each name a template may read it by."""
    plain: dict[str, Any] = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, depth: int = 0) -> Any:
    """`value` rebuilt from plain JSON types, so that a template cannot reach an object's methods."""
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"messages or tools are nested more than {_MAX_DEPTH} deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): item if type(item) is str else _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise InvalidRequestError(f"messages, tools and template variables must be JSON, not {type(value).__name__}")
