"""JSON schemas of the gateway's answers, for the OpenAPI document. Values only.

Each names the members that clients may rely on; objects may have more.
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


def ref(name: str) -> Schema:
    """A reference to a schema of `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def just(*values: str) -> Schema:
    """Schema of a string that is one of `values`."""
    return {"type": "string", "enum": list(values)}


def maybe(schema: Schema) -> Schema:
    """Schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


def many(items: Schema) -> Schema:
    """Schema of a list."""
    return {"type": "array", "items": items}


def thing(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """Schema of an object with these required and optional properties."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


_OPENAI_ERROR = thing({"message": TEXT | {"minLength": 1}, "type": TEXT, "param": maybe(TEXT), "code": maybe(TEXT)})
_ENVELOPE = {"id": TEXT, "created": WHOLE, "model": TEXT, "system_fingerprint": TEXT}
_FINISH = maybe(just("stop", "length", "tool_calls", "content_filter"))
_FUNCTION = thing({"name": TEXT, "arguments": TEXT})
_LOGPROBS = maybe({"type": "object"})

OPENAI: dict[str, Schema] = {
    "OpenAIError": thing({"error": _OPENAI_ERROR}),
    "OpenAIUsage": thing(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        prompt_tokens_details=thing({"cached_tokens": COUNT}, cache_write_tokens=COUNT),
        completion_tokens_details=thing({"reasoning_tokens": COUNT}),
    ),
    "ToolCall": thing({"id": TEXT, "type": just("function"), "function": _FUNCTION}),
    "ChatCompletion": thing(
        {
            **_ENVELOPE,
            "object": just("chat.completion"),
            "choices": many(
                thing(
                    {
                        "index": COUNT,
                        "message": thing(
                            {"role": just("assistant"), "content": maybe(TEXT)},
                            reasoning=maybe(TEXT),
                            reasoning_content=maybe(TEXT),
                            tool_calls=many(ref("ToolCall")),
                        ),
                        "finish_reason": _FINISH,
                    },
                    logprobs=_LOGPROBS,
                )
            ),
            "usage": ref("OpenAIUsage"),
        }
    ),
    "ChatCompletionChunk": thing(
        {
            **_ENVELOPE,
            "object": just("chat.completion.chunk"),
            "choices": many(
                thing(
                    {
                        "index": COUNT,
                        "delta": thing(
                            {},
                            role=just("assistant"),
                            content=maybe(TEXT),
                            reasoning=TEXT,
                            reasoning_content=TEXT,
                            tool_calls=many(thing({"index": COUNT, "function": thing({"arguments": TEXT}, name=TEXT)})),
                        ),
                        "finish_reason": _FINISH,
                    },
                    logprobs=_LOGPROBS,
                )
            ),
        },
        usage=maybe(ref("OpenAIUsage")),
    ),
    "Completion": thing(
        {
            **_ENVELOPE,
            "object": just("text_completion"),
            "choices": many(thing({"index": COUNT, "text": TEXT, "finish_reason": _FINISH}, logprobs=_LOGPROBS)),
        },
        usage=maybe(ref("OpenAIUsage")),
    ),
    "Response": thing(
        {
            "id": TEXT,
            "object": just("response"),
            "status": just("completed", "incomplete", "failed", "in_progress", "queued", "cancelled"),
            "model": TEXT,
            "output": many(thing({"type": TEXT})),
        },
        usage=maybe(thing({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})),
        error=maybe({"type": "object"}),
        incomplete_details=maybe({"type": "object"}),
    ),
    "ResponseDeleted": thing({"id": TEXT, "object": TEXT, "deleted": FLAG}),
    "ResponseItems": thing(
        {"object": just("list"), "data": many(thing({"type": TEXT})), "has_more": FLAG},
        first_id=maybe(TEXT),
        last_id=maybe(TEXT),
    ),
    "ResponseEvent": thing({"type": TEXT, "sequence_number": COUNT}, response=ref("Response")),
}

_BLOCK = thing(
    {"type": just("text", "thinking", "redacted_thinking", "tool_use")},
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
    "AnthropicError": thing(
        {
            "type": just("error"),
            "error": thing({"type": TEXT, "message": TEXT | {"minLength": 1}}, details={"type": "object"}),
        },
        request_id=TEXT,
    ),
    "AnthropicUsage": thing(
        {
            "input_tokens": COUNT,
            "cache_creation_input_tokens": COUNT,
            "cache_read_input_tokens": COUNT,
            "output_tokens": COUNT,
        },
        cache_creation=thing({"ephemeral_5m_input_tokens": COUNT, "ephemeral_1h_input_tokens": COUNT}),
    ),
    "Message": thing(
        {
            "id": TEXT,
            "type": just("message"),
            "role": just("assistant"),
            "model": TEXT,
            "content": many(_BLOCK),
            "stop_reason": maybe(TEXT),
            "stop_sequence": maybe(TEXT),
            "usage": ref("AnthropicUsage"),
        }
    ),
    "MessageEvent": thing(
        {"type": just(*_MESSAGE_EVENTS)},
        message=ref("Message"),
        index=COUNT,
        content_block=_BLOCK,
        delta={"type": "object"},
        usage={"type": "object"},
        error={"type": "object"},
    ),
}

_MODEL = {
    "id": TEXT,
    "object": just("model"),
    "created": WHOLE,
    "owned_by": TEXT,
    "type": just("model"),
    "display_name": TEXT,
    "created_at": TEXT,
    "max_model_len": maybe(COUNT),
}

OTHERS: dict[str, Schema] = {
    "Model": thing(_MODEL),
    "ModelList": thing({"object": just("list"), "data": many(ref("Model")), "has_more": FLAG}),
    "TokenCount": thing({"input_tokens": COUNT}),
    "Tokens": thing({"count": COUNT, "max_model_len": COUNT, "tokens": many(COUNT)}, token_strs=maybe(many(TEXT))),
    "Text": thing({"prompt": TEXT}),
    "TokenizerInfo": thing(
        {"tokenizer_class": TEXT, "vocab_size": COUNT, "chat_template": maybe(TEXT)},
        bos_token=maybe(TEXT),
        eos_token=maybe(TEXT),
        pad_token=maybe(TEXT),
        model_max_length=maybe(COUNT),
    ),
    "Ready": thing({"status": just("ready"), "num_prefill": COUNT, "num_decode": COUNT}),
    "Status": thing({"status": just("ok")}),
    "Version": thing({"version": TEXT}),
    "Workers": thing({"workers": many(thing({"role": TEXT, "worker_id": TEXT, "is_alive": FLAG}))}),
    "Decisions": thing({"decisions": many(thing({"router": TEXT, "request_id": TEXT, "policy": TEXT}))}),
    "Overview": {"type": "object", "description": "What the operations page shows."},
    "Alive": {"type": "object", "maxProperties": 0},
    "Timeline": thing({"request_id": TEXT, "stages": many({"type": "object"})}),
}

_KEY = {"key_id": TEXT, "name": TEXT, "tenant": TEXT, "spent": TEXT}

ACCOUNTS: dict[str, Schema] = {
    "AccountKey": thing(_KEY),
    "NewAccountKey": thing({**_KEY, "secret": TEXT}),
    "AccountKeys": thing({"keys": many(ref("AccountKey"))}),
    "Revoked": thing({"key_id": TEXT, "revoked": FLAG}),
    "Usage": many({"type": "object"}),
}

SCHEMAS: dict[str, Schema] = {**OPENAI, **ANTHROPIC, **OTHERS, **ACCOUNTS}
