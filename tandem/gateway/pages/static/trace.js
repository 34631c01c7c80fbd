/** The page of one request, named in the address after #: what it was and where its time went. */

import { bindKey, read } from "./api.js";
import { byId, el, tell } from "./dom.js";
import { milliseconds, NONE } from "./format.js";
import { timeline } from "./timeline.js";

const FACTS = [
  ["State", (record) => (record.error ? `${record.state}: ${record.error}` : record.state)],
  ["Asked for", (record) => record.kind || NONE],
  ["Began", (record) => new Date(1000 * record.started_s).toLocaleString()],
  ["Took", (record) => inMilliseconds(record.duration_s)],
  ["First token", (record) => inMilliseconds(record.ttft_s)],
  ["Prompt tokens", (record) => `${record.prompt_tokens} (${record.cached_tokens} cached)`],
  ["Output tokens", (record) => record.output_tokens],
  ["Workers", (record) => record.workers.join(", ") || NONE],
  ["Failovers", (record) => record.num_failovers],
];

function inMilliseconds(seconds) {
  return seconds === null ? NONE : milliseconds(1000 * seconds);
}

/** NOTE: a gateway knows its own latest requests only, and says so where this one is not among them. */
async function show() {
  byId("facts").replaceChildren();
  byId("timeline").hidden = true;
  try {
    const id = decodeURIComponent(location.hash.slice(1));
    byId("request").textContent = id;
    const record = await read(`admin/requests/${encodeURIComponent(id)}`);
    byId("model").textContent = record.model;
    byId("facts").append(...FACTS.map(([name, fact]) => el("div", {}, el("dt", {}, name), el("dd", {}, fact(record)))));
    byId("timeline").replaceChildren(timeline(record));
    byId("timeline").hidden = false;
    tell(byId("banner"), "");
  } catch (error) {
    tell(byId("banner"), error.message);
  }
}

addEventListener("hashchange", show);
bindKey(byId("key"), show);
show();
