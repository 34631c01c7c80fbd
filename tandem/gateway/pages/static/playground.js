/** The playground: what is typed goes out in the chosen dialect, what comes back is shown as it comes. */

import * as anthropic from "./anthropic.js";
import { bindKey, call, read } from "./api.js";
import { copied } from "./clipboard.js";
import { Conversation, take } from "./conversation.js";
import { curlOf } from "./curl.js";
import { byId, el, tell } from "./dom.js";
import { HistoryList, kept, keyOf, remove } from "./history.js";
import * as openai from "./openai.js";
import { FieldError, SettingsForm } from "./settings.js";
import { eventData } from "./sse.js";
import { TurnView } from "./turn_view.js";

const DIALECTS = { openai, anthropic };
const SAVE_MS = 500;
const NEAR_PX = 80;
const STARTS = ["What does os.path.join do?", "Explain a KV cache in two sentences.", "Write a haiku about bicycles."];

class Playground {
  constructor() {
    this.conversation = Conversation.open();
    this.views = new Map();
    this.model = "";
    this.abort = null;
    this.turns = byId("turns");
    this.draft = byId("draft");
    this.form = new SettingsForm(byId("settings"), () => this.showSwitches());
    this.history = new HistoryList(byId("history"), { open: (id) => this.open(Conversation.open(id)), remove: (id) => this.remove(id) });
    this.doings = {
      again: (turn) => this.again(turn),
      edit: (turn, words) => this.edit(turn, words),
      goOn: () => this.generate(),
      changed: () => this.conversation.save(),
    };
  }

  start() {
    byId("composer").addEventListener("submit", (event) => this.submit(event));
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("fresh").addEventListener("click", () => this.fresh());
    byId("clear").addEventListener("click", () => this.clearHistory());
    byId("curl").addEventListener("click", () => this.copy());
    byId("example").addEventListener("click", () => this.form.insertExample());
    this.draft.addEventListener("keydown", (event) => this.key(event));
    addEventListener("pagehide", () => this.abort && this.conversation.save());
    addEventListener("storage", (event) => this.hear(event));
    bindKey(byId("key"), () => this.learnModel());
    this.foldPanels();
    this.showSwitches();
    this.showAll();
    this.learnModel();
  }

  /** Settings and history stand beside the conversation where there is room, and are folded above it where there is not. */
  foldPanels() {
    for (const [id, width] of [["panel", 901], ["past", 1181]]) {
      const wide = matchMedia(`(min-width: ${width}px)`);
      const apply = () => (byId(id).open = wide.matches);
      wide.addEventListener("change", apply);
      apply();
    }
  }

  async learnModel() {
    try {
      this.model = (await read("v1/models")).data[0].id;
      byId("model").textContent = this.model;
      byId("model").title = this.model;
      tell(byId("banner"), "");
    } catch (error) {
      tell(byId("banner"), error.message);
    }
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  }

  submit(event) {
    event.preventDefault();
    const words = this.draft.value.trim();
    if (!words || this.abort) return;
    const settings = this.settings();
    if (!settings) return;
    this.draft.value = "";
    this.ask(words, settings);
  }

  /** What the form says, or null when it is wrong, which the form shows. */
  settings() {
    try {
      return this.form.read();
    } catch (error) {
      if (error instanceof FieldError) return null;
      throw error;
    }
  }

  ask(words, settings) {
    this.show(this.conversation.add("user", words));
    this.history.show(this.conversation.id);
    this.generate(settings);
  }

  again(turn) {
    const settings = this.settings();
    if (!settings || this.abort) return;
    this.conversation.cut(turn);
    this.showAll();
    this.turns.focus();
    this.generate(settings);
  }

  /** Ask otherwise: the message and all after it make room. */
  edit(turn, words) {
    const settings = this.settings();
    if (!settings || this.abort) return;
    this.conversation.cut(turn);
    this.showAll();
    this.turns.focus();
    this.ask(words, settings);
  }

  async generate(settings = this.settings()) {
    if (!settings || this.abort) return;
    const { conversation } = this; // another may be opened meanwhile
    const dialect = DIALECTS[settings.api];
    const sent = dialect.body(this.model, said(conversation.turns), settings);
    const turn = conversation.add("assistant");
    this.show(turn);
    this.setBusy(new AbortController());
    const saving = setInterval(() => conversation.save(), SAVE_MS);
    await this.receive(turn, dialect, sent);
    clearInterval(saving);
    this.setBusy(null);
    this.refresh(turn);
    turn.timeline = await this.timelineOf(turn);
    conversation.save();
    this.refresh(turn);
  }

  async receive(turn, dialect, sent) {
    const began = performance.now();
    try {
      const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(sent) };
      const response = await call(dialect.path, { ...options, signal: this.abort.signal });
      turn.requestId = response.headers.get("x-request-id") ?? undefined;
      for await (const data of eventData(response)) {
        for (const piece of dialect.pieces(data)) this.take(turn, piece, performance.now() - began);
      }
      if (!turn.reason) throw new Error("The answer broke off.");
      turn.state = "done";
    } catch (error) {
      turn.state = error.name === "AbortError" ? "stopped" : "failed";
      if (turn.state === "failed") turn.error = error.message;
    }
  }

  take(turn, piece, nowMs) {
    take(turn, piece);
    if (piece.kind !== "usage" && piece.kind !== "finish") {
      turn.firstMs ??= nowMs;
      turn.lastMs = nowMs;
    }
    this.refreshSoon(turn);
  }

  /** NOTE: drawn once a frame however many tokens came; a hidden tab draws nothing until it is seen. */
  refreshSoon(turn) {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = undefined;
      this.refresh(turn);
    });
  }

  /** Follow what grows, unless somebody has scrolled away; what comes after the answer must not push it out of sight. */
  refresh(turn) {
    const { turns } = this;
    const view = this.views.get(turn);
    const isNear = turns.scrollHeight - turns.scrollTop - turns.clientHeight < NEAR_PX;
    view?.show();
    if (!view || !isNear) return;
    const isGrowing = turn.state === "streaming";
    const top = view.node.offsetTop - turns.offsetTop - NEAR_PX / 4;
    turns.scrollTop = isGrowing ? turns.scrollHeight : Math.max(turns.scrollTop, Math.min(turns.scrollHeight, top));
  }

  /** NOTE: the gateway may want an operator's key for this; without it the page has no timeline. */
  async timelineOf(turn) {
    return turn.requestId && read(`admin/requests/${encodeURIComponent(turn.requestId)}`).catch(() => undefined);
  }

  setBusy(abort) {
    this.abort = abort;
    byId("send").hidden = Boolean(abort);
    byId("stop").hidden = !abort;
    this.turns.setAttribute("aria-busy", String(Boolean(abort)));
  }

  fresh() {
    this.open(new Conversation());
    this.draft.focus();
  }

  /** @param {Conversation} conversation in place of the one on the page, which the history keeps */
  open(conversation) {
    this.abort?.abort();
    this.conversation = conversation;
    if (matchMedia("(max-width: 1180px)").matches) byId("past").open = false;
    this.showAll();
  }

  remove(id) {
    remove(id);
    if (id !== this.conversation.id) return this.history.show(this.conversation.id);
    this.conversation.clear();
    this.fresh();
  }

  /** Another tab has changed or deleted what `key` names. While an answer comes here, both go on, each for itself. */
  hear({ key, newValue }) {
    const { conversation } = this;
    const isMine = key === keyOf(conversation.id);
    if (isMine && newValue !== null && this.abort) conversation.part();
    else if (isMine) {
      conversation.leave();
      if (newValue === null) remove(conversation.id); // NOTE: this tab may have saved it before it heard of the deletion
      return this.open(Conversation.open(conversation.id));
    }
    this.history.show(this.conversation.id);
  }

  clearHistory() {
    const found = kept();
    if (!found.length || !confirm(`Delete all ${found.length} conversations from this browser?`)) return;
    this.conversation.clear();
    for (const { id } of found) remove(id);
    this.fresh();
  }

  showAll() {
    this.views.clear();
    this.turns.replaceChildren();
    if (!this.conversation.turns.length) this.turns.append(this.empty());
    for (const turn of this.conversation.turns) this.show(turn);
    this.history.show(this.conversation.id);
  }

  show(turn) {
    this.turns.querySelector(".empty")?.remove();
    for (const view of this.views.values()) view.setLatest(false);
    const view = new TurnView(turn, this.doings);
    this.views.set(turn, view);
    this.turns.append(view.node);
    this.turns.scrollTop = this.turns.scrollHeight;
  }

  empty() {
    const fill = (words) => () => {
      this.draft.value = words;
      this.draft.focus();
    };
    const starts = STARTS.map((words) => el("button", { type: "button", on: { click: fill(words) } }, words));
    return el("div", { class: "empty" }, el("h1", {}, "Playground"),
      el("p", {}, "Every answer comes with its timeline across the cluster: pairing, prefill, transfer, decode."),
      el("div", { class: "starts" }, ...starts));
  }

  showSwitches() {
    byId("schema-on").hidden = !this.form.has("schema");
    byId("tools-on").hidden = !this.form.has("tools");
  }

  /** The next request with the draft in it, or the last one again when nothing is typed. */
  async copy() {
    const settings = this.settings();
    if (!settings) return;
    const words = this.draft.value.trim();
    const turns = said(this.conversation.turns);
    while (!words && turns.at(-1)?.role === "assistant") turns.pop();
    const next = words ? [...turns, { role: "user", text: words }] : turns;
    const dialect = DIALECTS[settings.api];
    const text = curlOf(dialect.path, dialect.body(this.model, next, settings));
    byId("note").textContent = (await copied(text)) ? "Copied" : "The browser does not allow copying";
    setTimeout(() => (byId("note").textContent = ""), 2000);
  }
}

/** Without answers that never came. */
function said(turns) {
  return turns.filter((turn) => turn.role === "user" || turn.text || turn.calls.length);
}

new Playground().start();
