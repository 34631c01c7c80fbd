/** Conversations of this browser, each under a key of its own in local storage, until somebody deletes them. */

import { el } from "./dom.js";

const PREFIX = "tandem.conversation.";
const MAX_KEPT = 100;
const TITLE_LENGTH = 80;

/** @typedef {{id: string, title: string, savedMs: number, turns: import("./conversation.js").Turn[]}} Kept */

export const keyOf = (id) => PREFIX + id;

export const has = (id) => localStorage.getItem(keyOf(id)) !== null;

/** @returns {Kept[]} the latest first */
export function kept() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map((key) => load(key.slice(PREFIX.length))).filter(Boolean).sort((a, b) => b.savedMs - a.savedMs);
}

/** @returns {Kept | null} null where it was deleted or is not one of ours */
export function load(id) {
  try {
    const found = JSON.parse(localStorage.getItem(keyOf(id)) ?? "null");
    return Array.isArray(found?.turns) ? { ...found, id, savedMs: Number(found.savedMs) } : null;
  } catch {
    return null;
  }
}

/** A browser keeps a few megabytes: the oldest conversations make room, and what has none is kept by the page alone. */
export function store(id, turns) {
  const title = (turns.find(({ role }) => role === "user")?.text ?? "").slice(0, TITLE_LENGTH);
  const text = JSON.stringify({ title, savedMs: Date.now(), turns });
  const others = has(id) ? [] : kept();
  for (const other of others.splice(MAX_KEPT - 1)) remove(other.id);
  while (!written(keyOf(id), text)) {
    const oldest = kept().findLast((other) => other.id !== id);
    if (!oldest) return remove(id);
    remove(oldest.id);
  }
}

export function remove(id) {
  localStorage.removeItem(keyOf(id));
}

function written(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

/** The list of them. `doings`: what its buttons do. */
export class HistoryList {
  /** @param {HTMLElement} node @param {{open: (id: string) => void, remove: (id: string) => void}} doings */
  constructor(node, doings) {
    this.node = node;
    this.doings = doings;
  }

  /** @param {string} openId the conversation on the page */
  show(openId) {
    const items = kept().map((one) => this.item(one, one.id === openId));
    this.node.replaceChildren(...(items.length ? items : [el("li", { class: "muted" }, "No conversation yet.")]));
  }

  item({ id, title, savedMs }, isOpen) {
    const name = title || "Untitled";
    const when = new Date(savedMs).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
    return el("li", {},
      el("button", { type: "button", class: "open", "aria-current": isOpen && "true", on: { click: () => this.doings.open(id) } },
        el("span", { class: "title" }, name), el("span", { class: "when" }, when)),
      el("button", { type: "button", class: "delete", "aria-label": `Delete ${name}`, title: "Delete", on: { click: () => this.doings.remove(id) } }, "×"));
  }
}
