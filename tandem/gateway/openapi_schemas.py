"""JSON schemas of the gateway's answers, and functions to write them; `openapi` puts them into its document.

`SCHEMAS` has all of them by name. Each names the members that clients may rely on; objects may have more.
"""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {}


def reference_to(name: str) -> Schema:
    """A reference to a schema of `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*values: str) -> Schema:
    """Schema of a string that is one of `values`."""
    return {"type": "string", "enum": list(values)}


def or_null(schema: Schema) -> Schema:
    """Schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(items: Schema) -> Schema:
    """Schema of a list."""
    return {"type": "array", "items": items}


def object_with(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """Schema of an object with these required and optional properties."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


_OPENAI_ERROR = object_with(
    {"message": TEXT | {"minLength": 1}, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)}
)
_ENVELOPE = {"id": TEXT, "created": WHOLE, "model": TEXT, "system_fingerprint": TEXT}
_FINISH = or_null(one_of("stop", "length", "tool_calls", "content_filter"))
_FUNCTION = object_with({"name": TEXT, "arguments": TEXT})
_LOGPROBS = or_null({"type": "object"})

OPENAI: dict[str, Schema] = {
    "OpenAIError": object_with({"error": _OPENAI_ERROR}),
    "OpenAIUsage": object_with(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        prompt_tokens_details=object_with({"cached_tokens": COUNT}, cache_write_tokens=COUNT),
        completion_tokens_details=object_with({"reasoning_tokens": COUNT}),
    ),
    "ToolCall": object_with({"id": TEXT, "type": one_of("function"), "function": _FUNCTION}),
    "ChatCompletion": object_with(
        {
            **_ENVELOPE,
            "object": one_of("chat.completion"),
            "choices": list_of(
                object_with(
                    {
                        "index": COUNT,
                        "message": object_with(
                            {"role": one_of("assistant"), "content": or_null(TEXT)},
                            reasoning=or_null(TEXT),
                            reasoning_content=or_null(TEXT),
                            tool_calls=list_of(reference_to("ToolCall")),
                        ),
                        "finish_reason": _FINISH,
                    },
                    logprobs=_LOGPROBS,
                )
            ),
            "usage": reference_to("OpenAIUsage"),
        }
    ),
    "ChatCompletionChunk": object_with(
        {
            **_ENVELOPE,
            "object": one_of("chat.completion.chunk"),
            "choices": list_of(
                object_with(
                    {
                        "index": COUNT,
                        "delta": object_with(
                            {},
                            role=one_of("assistant"),
                            content=or_null(TEXT),
                            reasoning=TEXT,
                            reasoning_content=TEXT,
                            tool_calls=list_of(
                                object_with({"index": COUNT, "function": object_with({"arguments": TEXT}, name=TEXT)})
                            ),
                        ),
                        "finish_reason": _FINISH,
                    },
                    logprobs=_LOGPROBS,
                )
            ),
        },
        usage=or_null(reference_to("OpenAIUsage")),
    ),
    "Completion": object_with(
        {
            **_ENVELOPE,
            "object": one_of("text_completion"),
            "choices": list_of(
                object_with({"index": COUNT, "text": TEXT, "finish_reason": _FINISH}, logprobs=_LOGPROBS)
            ),
        },
        usage=or_null(reference_to("OpenAIUsage")),
    ),
    "Response": object_with(
        {
            "id": TEXT,
            "object": one_of("response"),
            "status": one_of("completed", "incomplete", "failed", "in_progress", "queued", "cancelled"),
            "model": TEXT,
            "output": list_of(object_with({"type": TEXT})),
        },
        usage=or_null(object_with({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})),
        error=or_null({"type": "object"}),
        incomplete_details=or_null({"type": "object"}),
    ),
    "ResponseDeleted": object_with({"id": TEXT, "object": TEXT, "deleted": FLAG}),
    "ResponseItems": object_with(
        {"object": one_of("list"), "data": list_of(object_with({"type": TEXT})), "has_more": FLAG},
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
    ),
    "ResponseEvent": object_with({"type": TEXT, "sequence_number": COUNT}, response=reference_to("Response")),
}

_BLOCK = object_with(
    {"type": one_of("text", "thinking", "redacted_thinking", "tool_use")},
    text=TEXT,
    thinking=TEXT,
    signature=TEXT,
    id=TEXT,
    name=TEXT,
    input={"type": "object"},
)
_MESSAGE_EVENTS = (
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "ping",
    "error",
)

ANTHROPIC: dict[str, Schema] = {
    "AnthropicError": object_with(
        {
            "type": one_of("error"),
            "error": object_with({"type": TEXT, "message": TEXT | {"minLength": 1}}, details={"type": "object"}),
        },
        request_id=TEXT,
    ),
    "AnthropicUsage": object_with(
        {
            "input_tokens": COUNT,
            "cache_creation_input_tokens": COUNT,
            "cache_read_input_tokens": COUNT,
            "output_tokens": COUNT,
        },
        cache_creation=object_with({"ephemeral_5m_input_tokens": COUNT, "ephemeral_1h_input_tokens": COUNT}),
    ),
    "Message": object_with(
        {
            "id": TEXT,
            "type": one_of("message"),
            "role": one_of("assistant"),
            "model": TEXT,
            "content": list_of(_BLOCK),
            "stop_reason": or_null(TEXT),
            "stop_sequence": or_null(TEXT),
            "usage": reference_to("AnthropicUsage"),
        }
    ),
    "MessageEvent": object_with(
        {"type": one_of(*_MESSAGE_EVENTS)},
        message=reference_to("Message"),
        index=COUNT,
        content_block=_BLOCK,
        delta={"type": "object"},
        usage={"type": "object"},
        error={"type": "object"},
    ),
}

_MODEL = {
    "id": TEXT,
    "object": one_of("model"),
    "created": WHOLE,
    "owned_by": TEXT,
    "type": one_of("model"),
    "display_name": TEXT,
    "created_at": TEXT,
    "max_model_len": or_null(COUNT),
}

OTHERS: dict[str, Schema] = {
    "Model": object_with(_MODEL),
    "ModelList": object_with({"object": one_of("list"), "data": list_of(reference_to("Model")), "has_more": FLAG}),
    "TokenCount": object_with({"input_tokens": COUNT}),
    "Tokens": object_with(
        {"count": COUNT, "max_model_len": COUNT, "tokens": list_of(COUNT)}, token_strs=or_null(list_of(TEXT))
    ),
    "Text": object_with({"prompt": TEXT}),
    "TokenizerInfo": object_with(
        {"tokenizer_class": TEXT, "vocab_size": COUNT, "chat_template": or_null(TEXT)},
        bos_token=or_null(TEXT),
        eos_token=or_null(TEXT),
        pad_token=or_null(TEXT),
        model_max_length=or_null(COUNT),
    ),
    "Ready": object_with({"status": one_of("ready"), "num_prefill": COUNT, "num_decode": COUNT}),
    "Status": object_with({"status": one_of("ok")}),
    "Version": object_with({"version": TEXT}),
    "Workers": object_with({"workers": list_of(object_with({"role": TEXT, "worker_id": TEXT, "is_alive": FLAG}))}),
    "Decisions": object_with({"decisions": list_of(object_with({"router": TEXT, "request_id": TEXT, "policy": TEXT}))}),
    "Overview": {"type": "object", "description": "What the operations page shows."},
    "Alive": {"type": "object", "maxProperties": 0},
    "Timeline": object_with({"request_id": TEXT, "stages": list_of({"type": "object"})}),
}

_KEY = {"key_id": TEXT, "name": TEXT, "tenant": TEXT, "spent": TEXT}

ACCOUNTS: dict[str, Schema] = {
    "AccountKey": object_with(_KEY),
    "NewAccountKey": object_with({**_KEY, "secret": TEXT}),
    "AccountKeys": object_with({"keys": list_of(reference_to("AccountKey"))}),
    "Revoked": object_with({"key_id": TEXT, "revoked": FLAG}),
    "Usage": list_of({"type": "object"}),
}

SCHEMAS: dict[str, Schema] = {**OPENAI, **ANTHROPIC, **OTHERS, **ACCOUNTS}
