/** OpenAI's words for a conversation: the body of /v1/chat/completions, and its stream as pieces. Pure. */

import { ApiError, wordsOf } from "./api.js";

export const path = "v1/chat/completions";

/** @param {import("./conversation.js").Turn[]} turns @param {import("./settings.js").Settings} settings */
export function body(model, turns, settings) {
  return compact({
    model,
    messages: [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...turns.flatMap(messages)],
    temperature: settings.temperature,
    top_p: settings.topP,
    max_tokens: settings.maxTokens,
    seed: settings.seed,
    stop: settings.stop,
    reasoning_effort: settings.effort,
    response_format: settings.schema && {
      type: "json_schema",
      json_schema: { name: "answer", schema: settings.schema, strict: true },
    },
    tools: settings.tools?.map((tool) => ({
      type: "function",
      function: compact({ name: tool.name, description: tool.description, parameters: tool.parameters }),
    })),
    tool_choice: settings.tools && settings.toolChoice !== "auto" ? settings.toolChoice : undefined,
    stream: true,
    stream_options: { include_usage: true },
  });
}

/** What one event says. @returns {Generator<import("./conversation.js").Piece>} */
export function* pieces(data) {
  if (data === "[DONE]") return;
  const event = JSON.parse(data);
  if (event.error) throw new ApiError(wordsOf(event.error));
  for (const { delta = {}, finish_reason: reason } of event.choices ?? []) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) yield { kind: "thought", text: thought };
    if (delta.content) yield { kind: "text", text: delta.content };
    if (delta.refusal) yield { kind: "text", text: delta.refusal };
    for (const call of delta.tool_calls ?? []) {
      const { name, arguments: text } = call.function ?? {};
      if (name) yield { kind: "call", index: call.index, id: call.id, name };
      if (text) yield { kind: "arguments", index: call.index, text };
    }
    if (reason) yield { kind: "finish", reason };
  }
  if (event.usage) yield { kind: "usage", ...usage(event.usage) };
}

function usage(counted) {
  return {
    prompt: counted.prompt_tokens,
    cached: counted.prompt_tokens_details?.cached_tokens ?? 0,
    output: counted.completion_tokens,
    thinking: counted.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

function messages(turn) {
  if (turn.role === "user") return [{ role: "user", content: turn.text }];
  if (!turn.calls.length) return [{ role: "assistant", content: turn.text }];
  const calls = turn.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text || "{}" } }));
  const results = turn.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  return [{ role: "assistant", content: turn.text || null, tool_calls: calls }, ...results];
}

/** Without what is undefined. */
export function compact(value) {
  return Object.fromEntries(Object.entries(value).filter(([, item]) => item !== undefined));
}
