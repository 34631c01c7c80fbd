/** The turns of a conversation. The browser keeps it, and the tab remembers which one it has open. */

import { has, load, remove, store } from "./history.js";

/**
 * @typedef {{kind: "text" | "thought", text: string} | {kind: "call", index: number, id: string, name: string}
 *   | {kind: "arguments", index: number, text: string} | {kind: "finish", reason: string}
 *   | {kind: "usage", prompt?: number, cached?: number, output?: number, thinking?: number}} Piece
 * @typedef {{index: number, id: string, name: string, text: string, result?: string}} Call
 * @typedef {{role: "user" | "assistant", text: string, state: "streaming" | "done" | "stopped" | "failed",
 *   thought: string, calls: Call[], usage: Record<string, number>, reason?: string, error?: string, requestId?: string,
 *   firstMs?: number, lastMs?: number, timeline?: any}} Turn
 */

const OPEN = "tandem.open";

export class Conversation {
  /** @param {string} id @param {Turn[]} turns */
  constructor(id = newId(), turns = []) {
    this.id = id;
    this.isKept = turns.length > 0;
    this.isLeft = false;
    this.turns = turns.map((turn) => (turn.state === "streaming" ? { ...turn, state: "stopped" } : turn));
    sessionStorage.setItem(OPEN, id);
  }

  /** The one with this id, or that this tab had open; a new one where there is none. */
  static open(id = sessionStorage.getItem(OPEN) ?? "") {
    const found = load(id);
    return found ? new Conversation(id, found.turns) : new Conversation();
  }

  /** @returns {Turn} */
  add(role, text = "") {
    const turn = { role, text, state: role === "user" ? "done" : "streaming", thought: "", calls: [], usage: {} };
    this.turns.push(turn);
    this.save();
    return turn;
  }

  /** Without this turn and those after it. @param {Turn} turn */
  cut(turn) {
    this.turns.splice(this.turns.indexOf(turn));
    this.save();
  }

  clear() {
    this.turns = [];
    this.save();
  }

  /** What was deleted meanwhile, here or in another tab, stays deleted. */
  save() {
    if (this.isLeft || (this.isKept && !has(this.id))) return;
    if (this.turns.length) store(this.id, this.turns);
    else remove(this.id);
    this.isKept = has(this.id);
  }

  /** Another tab goes on with it: this page saves it no more. */
  leave() {
    this.isLeft = true;
  }

  /** Another tab goes on with it too: from here on this one is another conversation. */
  part() {
    this.id = newId();
    this.isKept = false;
    sessionStorage.setItem(OPEN, this.id);
    this.save();
  }
}

function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

/** Add what came. @param {Turn} turn @param {Piece} piece */
export function take(turn, piece) {
  const call = turn.calls.find((other) => other.index === piece.index);
  if (piece.kind === "text") turn.text += piece.text;
  else if (piece.kind === "thought") turn.thought += piece.text;
  else if (piece.kind === "call") turn.calls.push({ index: piece.index, id: piece.id, name: piece.name, text: "" });
  else if (piece.kind === "arguments" && call) call.text += piece.text;
  else if (piece.kind === "finish") turn.reason = piece.reason;
  else if (piece.kind === "usage") {
    const { kind, ...counted } = piece;
    Object.assign(turn.usage, counted);
  }
}
