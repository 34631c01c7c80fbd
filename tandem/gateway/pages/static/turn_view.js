/** Shows one turn: thinking folded, text, tool calls as cards, figures and timeline. Keeps no state but the page's. */

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";
import { editor } from "./editor.js";
import { milliseconds } from "./format.js";
import { MarkdownView } from "./markdown.js";
import { timeline } from "./timeline.js";

const MEASURABLE_MS = 10; // tokens that came in one packet tell nothing of their rate
const ONE_LINE = 60;

/** @typedef {{again: (turn: any) => void, edit: (turn: any, text: string) => void, goOn: (turn: any) => void,
 *   changed: () => void}} Doings */

export class TurnView {
  /** @param {import("./conversation.js").Turn} turn @param {Doings} doings */
  constructor(turn, doings) {
    this.turn = turn;
    this.doings = doings;
    this.cards = [];
    this.thought = el("div", { class: "body" });
    this.fold = el("details", { class: "thought", hidden: true }, el("summary", {}, "Thinking"), this.thought);
    this.said = el("div", { class: "said" });
    this.markdown = turn.role === "user" ? null : new MarkdownView(this.said);
    this.calls = el("div", { class: "calls" });
    this.deeds = this.makeDeeds();
    this.foot = el("div", {});
    this.time = el("div", {});
    this.node = el("article", { class: `turn ${turn.role}`, "aria-label": turn.role === "user" ? "You" : "Assistant" },
      this.fold, this.said, this.calls, this.deeds, this.foot, this.time);
    this.show();
  }

  /** Bring the page to the turn's state. */
  show() {
    const { turn } = this;
    this.node.classList.toggle("streaming", turn.state === "streaming");
    if (this.markdown) this.markdown.show(turn.text);
    else this.said.textContent = turn.text;
    this.showThought();
    this.showCalls();
    this.deeds.firstChild.hidden = !turn.text;
    if (this.onceMore) this.onceMore.hidden = turn.state === "failed"; // which has its own button
    if (turn.state !== "streaming" && turn.role !== "user") this.showEnd();
  }

  /** What may be done with a turn that is over. */
  makeDeeds() {
    const { turn, doings } = this;
    const isMine = turn.role === "user";
    const button = (words, deed) => el("button", { type: "button", class: "copy", on: { click: deed } }, words);
    const copy = copyButton(isMine ? "this message" : "this answer", () => turn.text);
    this.onceMore = isMine ? null : button("Regenerate", () => doings.again(turn));
    return el("div", { class: "deeds" }, copy, isMine ? button("Edit", () => this.edit()) : this.onceMore);
  }

  edit() {
    const leave = () => {
      field.replaceWith(this.said);
      this.deeds.hidden = false;
      this.deeds.lastChild.focus();
    };
    const field = editor(this.turn.text, (text) => this.doings.edit(this.turn, text), leave);
    this.said.replaceWith(field);
    this.deeds.hidden = true;
    field.querySelector("textarea").focus();
  }

  showThought() {
    const { thought, text, state, usage } = this.turn;
    this.fold.hidden = !thought;
    if (this.thought.textContent !== thought) this.thought.textContent = thought;
    const isThinking = state === "streaming" && !text;
    const counted = usage.thinking ? `Thought for ${usage.thinking} tokens` : "Thought";
    this.fold.querySelector("summary").textContent = isThinking ? "Thinking…" : counted;
  }

  showCalls() {
    this.turn.calls.forEach((call, index) => {
      this.cards[index] ??= this.addCard(call);
      this.cards[index].textContent = pretty(call.text);
    });
  }

  /** @returns {HTMLElement} where the arguments are shown */
  addCard(call) {
    const shown = el("pre", { class: "code" });
    const result = el("textarea", { rows: 2, class: "code", spellcheck: "false", "aria-label": `Result of ${call.name}`,
      placeholder: "What the tool returned", on: { input: () => this.answer(call, result.value) } });
    result.value = call.result ?? "";
    this.calls.append(el("section", { class: "call", "aria-label": `Call of ${call.name}` },
      el("header", {}, el("span", { class: "label" }, "calls"), el("span", { class: "name" }, call.name)),
      shown, el("label", { class: "result" }, el("span", { class: "label" }, "Result"), result)));
    return shown;
  }

  answer(call, words) {
    call.result = words;
    this.doings.changed();
  }

  showEnd() {
    const { turn, doings } = this;
    const problem = turn.error && el("div", { class: "problem", role: "alert" }, el("span", {}, turn.error),
      el("button", { type: "button", on: { click: () => doings.again(turn) } }, "Try again"));
    const goOn = turn.calls.length > 0 && turn.state === "done" &&
      el("button", { type: "button", class: "primary continue", on: { click: () => doings.goOn(turn) } }, "Send results");
    this.foot.replaceChildren(...[problem, goOn, figures(turn)].filter(Boolean));
    if (turn.timeline && !this.time.hasChildNodes()) this.showTimeline();
  }

  /** Only the latest answer can be gone on from, and earlier timelines are folded. */
  setLatest(isLatest) {
    if (!isLatest) for (const fold of this.time.children) fold.open = false;
    for (const button of this.foot.querySelectorAll("button")) button.hidden = !isLatest;
    if (this.onceMore && !isLatest) this.onceMore.remove();
    for (const field of this.calls.querySelectorAll("textarea")) field.readOnly = !isLatest;
  }

  /** Open where it leaves room for the answer. */
  showTimeline() {
    const { timeline: record, requestId, calls } = this.turn;
    const isOpen = !calls.length && matchMedia("(min-width: 901px)").matches;
    this.time.replaceChildren(el("details", { class: "timeline", open: isOpen },
      el("summary", {}, el("b", {}, "Timeline"), ` · ${milliseconds(1000 * record.duration_s)} · `, el("span", { class: "mono" }, requestId)),
      timeline(record), el("a", { class: "alone", href: `trace#${encodeURIComponent(requestId)}` }, "This request’s own page")));
  }
}

function figures(turn) {
  const { usage, firstMs, lastMs } = turn;
  const found = [];
  const add = (value, words) => found.push(el("span", {}, el("b", {}, value), ` ${words}`));
  if (turn.state === "stopped") found.push(el("span", { class: "stopped" }, "stopped"));
  if (firstMs !== undefined) add(milliseconds(firstMs), "to the first token");
  const rate = (1000 * ((usage.output ?? 0) - 1)) / (lastMs - firstMs);
  if (usage.output > 1 && lastMs - firstMs >= MEASURABLE_MS) add(rate.toFixed(rate < 10 ? 1 : 0), "tokens/s");
  if (usage.prompt !== undefined) add(usage.prompt, `prompt tokens (${usage.cached ?? 0} cached)`);
  if (usage.output !== undefined) add(usage.output, usage.thinking ? `output tokens (${usage.thinking} thinking)` : "output tokens");
  const drafts = turn.timeline?.stages.map((stage) => stage.attributes ?? {}).filter((said) => said.num_drafted);
  if (drafts?.length) {
    add(`${sum(drafts, "num_accepted")} of ${sum(drafts, "num_drafted")}`, "drafted tokens accepted");
    add(drafts.map((said) => said.accepted_by_position).join("; then "), "by position of the draft");
    add((1 + sum(drafts, "num_accepted") / Math.max(1, sum(drafts, "num_steps"))).toFixed(2), "tokens per decode step");
    add(milliseconds(1000 * sum(drafts, "time_saved_s")), "saved by drafts");
  }
  if (turn.reason) found.push(el("span", {}, `ended: ${turn.reason}`));
  return el("div", { class: "figures" }, ...found);
}

const sum = (all, name) => all.reduce((total, each) => total + (each[name] ?? 0), 0);

function pretty(text) {
  try {
    const value = JSON.parse(text);
    return text.length > ONE_LINE ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}
