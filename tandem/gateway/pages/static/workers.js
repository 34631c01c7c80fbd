/** The workers' table and the pools' summaries. A worker that is no longer heard of stays for a while, as gone. */

import { shares, together, usage } from "./blocks.js";
import { el } from "./dom.js";
import { ago, cores, count, memory } from "./format.js";
import { LiveTable } from "./table.js";

const REMEMBERED_MS = 5 * 60 * 1000;
const SILENT_S = 2; // without a report, after which a worker is gone
const ROLES = ["prefill", "decode"];

/** @typedef {Record<string, any>} Worker an entry of /admin/workers */

/** Whether it reports. NOTE: `is_alive` means that it is given requests; one that starts, drains or recovers is not. */
export function isHeard({ is_alive: isGivenRequests, state, age_s: ageS }) {
  return isGivenRequests || (state !== "ready" && ageS <= SILENT_S);
}

/** Requests that have begun; `num_running` has all that were accepted. */
const running = ({ num_running: numAccepted, num_waiting: numWaiting }) => Math.max(0, (numAccepted ?? 0) - (numWaiting ?? 0));

export class Workers {
  constructor() {
    /** @type {Map<string, {worker: Worker, seenMs: number}>} */
    this.known = new Map();
    this.words = "";
    this.table = new LiveTable(COLUMNS, {
      key: (worker) => worker.worker_id,
      tone: (worker) => (worker.state === "gone" ? "gone" : ""),
      empty: "No worker matches.",
      sortBy: 0,
      few: 24,
    });
    this.pools = el("div", { class: "tiles" });
  }

  /** @param {Worker[]} workers what is heard of now */
  show(workers, nowMs = Date.now()) {
    for (const worker of workers) {
      const state = isHeard(worker) ? worker.state : "gone";
      this.known.set(worker.worker_id, { worker: { ...worker, state }, seenMs: nowMs });
    }
    for (const [id, { worker, seenMs }] of this.known) {
      if (nowMs - seenMs > REMEMBERED_MS) this.known.delete(id);
      else if (seenMs < nowMs) this.known.get(id).worker = gone(worker, (nowMs - seenMs) / 1000);
    }
    this.draw();
  }

  /** @param {string} words all of which a worker's id, role or state must hold */
  filter(words) {
    this.words = words.toLowerCase();
    this.draw();
  }

  draw() {
    const all = [...this.known.values()].map(({ worker }) => worker);
    const wanted = this.words.split(/\s+/);
    const text = ({ worker_id: id, role, state, address }) => `${id} ${role} ${state} ${address}`.toLowerCase();
    this.table.show(all.filter((worker) => wanted.every((word) => text(worker).includes(word))));
    const roles = [...new Set([...ROLES, ...all.map(({ role }) => role)])];
    this.pools.replaceChildren(...roles.map((role) => pool(role, all.filter((worker) => worker.role === role))).filter(Boolean));
  }
}

function gone(worker, silentS) {
  return { ...worker, state: "gone", age_s: silentS, num_running: 0, num_waiting: 0, cpu_cores: null, memory_bytes: null };
}

const COLUMNS = [
  { title: "Worker", sort: (w) => w.worker_id, cell: (w) => el("span", { class: "mono", title: w.address }, w.worker_id) },
  { title: "Role", sort: (w) => w.role, cell: (w) => w.role },
  { title: "State", sort: (w) => w.state, cell: (w) => stateOf(w.state) },
  { title: "Ranks", isNumber: true, sort: (w) => numRanks(w), cell: (w) => numRanks(w) },
  { title: "Running", isNumber: true, sort: running, cell: (w) => count(running(w)) },
  { title: "Waiting", isNumber: true, sort: (w) => w.num_waiting, cell: (w) => count(w.num_waiting) },
  { title: "Context tokens", isNumber: true, sort: (w) => w.num_context_tokens, cell: (w) => count(w.num_context_tokens) },
  { title: "KV blocks", isWide: true, sort: (w) => shares(w.blocks).held, cell: (w) => usage(w.blocks) },
  { title: "CPU", isNumber: true, sort: (w) => w.cpu_cores ?? 0, cell: (w) => cores(w.cpu_cores) },
  { title: "Memory", isNumber: true, sort: (w) => w.memory_bytes ?? 0, cell: (w) => memory(w.memory_bytes) },
  { title: "Last report", isNumber: true, sort: (w) => w.age_s, cell: (w) => ago(w.age_s) },
];

const numRanks = (worker) => worker.ranks?.pids.length ?? 1;

/** A process's state with the colour of its meaning. @param {string} state */
export function stateOf(state) {
  const tones = { ready: "good", starting: "warn", draining: "warn", recovering: "warn", gone: "bad", away: "bad", stopped: "bad" };
  return el("span", { class: `state ${tones[state] ?? ""}` }, state);
}

function pool(role, members) {
  if (!members.length) return null;
  const alive = members.filter(({ state }) => state !== "gone");
  const sum = (name) => alive.reduce((all, worker) => all + (worker[name] ?? 0), 0);
  const numRunning = alive.reduce((all, worker) => all + running(worker), 0);
  const blocks = together(alive.map((worker) => worker.blocks));
  const missing = members.length - alive.length;
  return el("article", { class: "tile" },
    el("h2", {}, `${role} pool`),
    el("p", { class: "figure" }, el("b", {}, alive.length), ` of ${members.length} alive`, missing > 0 && el("span", { class: "state bad" }, `${missing} gone`)),
    el("p", { class: "muted" }, `${count(numRunning)} running · ${count(sum("num_waiting"))} waiting · ${count(sum("queued_tokens"))} tokens queued`),
    el("p", { class: "muted" }, `${cores(sum("cpu_cores"))} · ${memory(sum("memory_bytes"))} of memory`),
    el("p", { class: "muted label" }, "KV blocks"), usage(blocks));
}
