/** Anthropic's words for a conversation: the body of /v1/messages, and its stream as pieces. */

import { ApiError, wordsOf } from "./api.js";
import { compact } from "./openai.js";

export const path = "v1/messages";

/** @param {import("./conversation.js").Turn[]} turns @param {import("./settings.js").Settings} settings */
export function body(model, turns, settings) {
  const output = compact({
    effort: settings.effort === "none" ? undefined : EFFORTS[settings.effort] ?? settings.effort,
    format: settings.schema && { type: "json_schema", schema: settings.schema },
  });
  return compact({
    model,
    max_tokens: settings.maxTokens,
    system: settings.system || undefined,
    messages: turns.flatMap(messages),
    temperature: settings.temperature,
    top_p: settings.topP,
    seed: settings.seed,
    stop_sequences: settings.stop,
    thinking: settings.effort && { type: settings.effort === "none" ? "disabled" : "adaptive" },
    output_config: Object.keys(output).length ? output : undefined,
    tools: settings.tools?.map((tool) =>
      compact({ name: tool.name, description: tool.description, input_schema: tool.parameters ?? { type: "object" } })
    ),
    tool_choice: settings.tools && CHOICES[settings.toolChoice],
    stream: true,
  });
}

const EFFORTS = { minimal: "low" }; // which this API does not have
const CHOICES = { required: { type: "any" }, none: { type: "none" } };

/** What one event says. @returns {Generator<import("./conversation.js").Piece>} */
export function* pieces(data) {
  const event = JSON.parse(data);
  const block = event.content_block;
  const delta = event.delta ?? {};
  if (event.type === "error") throw new ApiError(wordsOf(event.error));
  if (event.type === "message_start") yield { kind: "usage", ...usage(event.message?.usage ?? {}) };
  if (event.type === "content_block_start" && block.type === "tool_use") {
    yield { kind: "call", index: event.index, id: block.id, name: block.name };
  }
  if (event.type === "content_block_delta") {
    if (delta.type === "text_delta") yield { kind: "text", text: delta.text };
    if (delta.type === "thinking_delta") yield { kind: "thought", text: delta.thinking };
    if (delta.type === "input_json_delta") yield { kind: "arguments", index: event.index, text: delta.partial_json };
  }
  if (event.type === "message_delta") {
    yield { kind: "usage", ...usage(event.usage ?? {}) };
    if (delta.stop_reason) yield { kind: "finish", reason: delta.stop_reason };
  }
}

/** NOTE: Anthropic's input tokens leave out what was read from the cache or written to it. */
function usage(counted) {
  const cached = counted.cache_read_input_tokens ?? 0;
  const found = { output: counted.output_tokens, thinking: counted.output_tokens_details?.thinking_tokens };
  if (counted.input_tokens !== undefined && counted.input_tokens !== null) {
    found.cached = cached;
    found.prompt = counted.input_tokens + cached + (counted.cache_creation_input_tokens ?? 0);
  }
  return compact(found);
}

function messages(turn) {
  if (turn.role === "user") return [{ role: "user", content: turn.text }];
  if (!turn.calls.length) return [{ role: "assistant", content: turn.text }];
  const said = turn.text ? [{ type: "text", text: turn.text }] : [];
  const calls = turn.calls.map(({ id, name, text }) => ({ type: "tool_use", id, name, input: asObject(text) }));
  const results = turn.calls.map(({ id, result }) => ({ type: "tool_result", tool_use_id: id, content: result ?? "" }));
  return [{ role: "assistant", content: [...said, ...calls] }, { role: "user", content: results }];
}

function asObject(text) {
  try {
    return JSON.parse(text || "{}");
  } catch {
    return {};
  }
}
