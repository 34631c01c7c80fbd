/** The turns of a conversation, kept for the tab so that a reload loses nothing. */

/**
 * @typedef {{kind: "text" | "thought", text: string} | {kind: "call", index: number, id: string, name: string}
 *   | {kind: "arguments", index: number, text: string} | {kind: "finish", reason: string}
 *   | {kind: "usage", prompt?: number, cached?: number, output?: number, thinking?: number}} Piece
 * @typedef {{index: number, id: string, name: string, text: string, result?: string}} Call
 * @typedef {{role: "user" | "assistant", text: string, state: "streaming" | "done" | "stopped" | "failed",
 *   thought: string, calls: Call[], usage: Record<string, number>, reason?: string, error?: string, requestId?: string,
 *   firstMs?: number, lastMs?: number, timeline?: any}} Turn
 */

const PLACE = "tandem.conversation";

export class Conversation {
  constructor() {
    /** @type {Turn[]} */
    this.turns = stored().map((turn) => (turn.state === "streaming" ? { ...turn, state: "stopped" } : turn));
  }

  /** @returns {Turn} */
  add(role, text = "") {
    const turn = { role, text, state: role === "user" ? "done" : "streaming", thought: "", calls: [], usage: {} };
    this.turns.push(turn);
    this.save();
    return turn;
  }

  remove(turn) {
    this.turns = this.turns.filter((other) => other !== turn);
    this.save();
  }

  clear() {
    this.turns = [];
    this.save();
  }

  get last() {
    return this.turns.at(-1);
  }

  /** NOTE: a tab's storage is small; when it is full the page goes on and only a reload forgets. */
  save() {
    try {
      sessionStorage.setItem(PLACE, JSON.stringify(this.turns));
    } catch {
      sessionStorage.removeItem(PLACE);
    }
  }
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

function stored() {
  try {
    const found = JSON.parse(sessionStorage.getItem(PLACE) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}
