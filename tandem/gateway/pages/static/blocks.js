/** KV blocks by state as one stacked bar, and the legend of its colours. */

import { el } from "./dom.js";
import { count, percent } from "./format.js";

/** In the order they are stacked; the rest of the bar is free. A state that is new to this page is "other". */
const MEANINGS = {
  used: "a request of this worker has them",
  leased: "another worker may read them",
  transferring: "a transfer reads or writes them",
  pinned: "they stay cached for the time that was paid for",
  cached: "they serve prompts that begin alike, and are given away when none is free",
};
const STATES = Object.keys(MEANINGS);

/** @typedef {Record<string, number>} Blocks by state */

/** @param {Blocks} blocks */
export function total(blocks) {
  return Object.values(blocks).reduce((sum, value) => sum + value, 0);
}

/**
 * Shares of the pool, 0 to 1. `held`: what cannot be given to a new request; `cached`: what can, and serves prompts that
 * begin alike until then.
 * @param {Blocks} blocks
 */
export function shares({ free = 0, cached = 0, ...rest }) {
  const held = total(rest);
  const all = held + free + cached || 1;
  return { held: held / all, cached: cached / all };
}

/** @param {Blocks[]} many @returns {Blocks} */
export function together(many) {
  const sum = {};
  for (const blocks of many) {
    for (const [state, value] of Object.entries(blocks)) sum[state] = (sum[state] ?? 0) + value;
  }
  return sum;
}

/** @param {Blocks} blocks */
function bar(blocks) {
  const all = total(blocks) || 1;
  const words = Object.entries(blocks).filter(([, value]) => value).map(([state, value]) => `${state} ${count(value)}`).join(", ");
  const parts = Object.entries(parted(blocks)).filter(([, value]) => value > 0);
  const segments = parts.map(([state, value]) => el("span", { class: `part ${state}`, style: { width: `${(100 * value) / all}%` } }));
  return el("span", { class: "kv", role: "img", title: words, "aria-label": `KV blocks: ${words || "none"}` }, ...segments);
}

/** The bar with its shares in words. @param {Blocks} blocks */
export function usage(blocks) {
  const { held, cached } = shares(blocks);
  return el("span", { class: "usage" }, bar(blocks),
    el("span", { class: "shares" }, el("span", {}, `${percent(held)} in use`), el("span", {}, `${percent(cached)} cached`)));
}

export function legend() {
  return [...STATES, "free"].map((state) => el("span", { title: MEANINGS[state] ?? "" }, el("i", { class: `part ${state}` }), state));
}

function parted({ free, ...blocks }) {
  const found = {};
  for (const state of STATES) found[state] = blocks[state] ?? 0;
  for (const state of STATES) delete blocks[state];
  return { ...found, other: total(blocks) };
}
