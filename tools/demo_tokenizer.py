"""Owns the demo model's tokenizer and chat template.

Byte-level BPE without normalisation, so that decode(encode(text)) == text for every text. The special tokens come last
in the vocabulary and are never split. The template renders a conversation turn by turn, so a longer conversation
always starts with the exact text of a shorter one: prefix caching relies on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
VISIBLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Words with the one space or sign before them, single digits, runs of signs, line ends, indentation.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if has_system or tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if has_system %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if has_system and tools %}
        {{- '\\n\\n' }}
    {%- endif %}
    {%- if tools %}
        {{- 'These functions can be called, one JSON description a line:\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson }}
            {{- '\\n' }}
        {%- endfor %}
        {{- 'To call one, write its name and arguments as JSON, like this:\\n' }}
        {{- '<tool_call>\\n{"name": "function", "arguments": {"key": "value"}}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('only the first message can have the role system') }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts`; the same texts in the same order give the same tokenizer."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(texts, trainer=_trainer())
    return _with_added_tokens(core)


def _trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(VISIBLE_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _with_added_tokens(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in VISIBLE_TOKENS])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
