/** The operations page: asks for the overview every two seconds and shows it, until it is paused or hidden. */

import { bindKey, read } from "./api.js";
import { legend } from "./blocks.js";
import { byId, el, tell } from "./dom.js";
import { ago, bandwidth, cores, duration, memory, milliseconds, NONE } from "./format.js";
import { LiveTable } from "./table.js";
import { ranksOf, RANKS } from "./ranks.js";
import { rangeOf, tiles } from "./tiles.js";
import { stateOf, Workers } from "./workers.js";

const EVERY_MS = 2000;
const mono = (words, title = null) => el("span", { class: "mono", title }, words ?? NONE);

const DECISIONS = [
  { title: "Ago", isNumber: true, cell: (d) => ago(d.age_s) },
  { title: "Request", isLong: true, cell: (d) => requestLink(d.request_id) },
  { title: "Prefill", cell: (d) => (d.decode_id ? mono(d.prefill_id ?? "by decode") : NONE) },
  { title: "Decode", cell: (d) => (d.decode_id ? mono(d.decode_id) : el("span", { class: "state bad", title: d.refusal }, "refused")) },
  { title: "Predicted", isNumber: true, cell: (d) => milliseconds(d.predicted_ms.ttft) },
  { title: "Measured", isNumber: true, cell: (d) => milliseconds(d.measured_ms.ttft) },
  { title: "Error", isNumber: true, cell: (d) => difference(d.ttft_error_ms) },
];

const LINKS = [
  { title: "From", sort: (l) => l.source_id, cell: (l) => mono(l.source_id) },
  { title: "To", sort: (l) => l.to, cell: (l) => mono(l.to) },
  { title: "Transport", sort: (l) => l.transport, cell: (l) => l.transport },
  { title: "Path", isLong: true, sort: (l) => l.path, cell: (l) => l.path },
  { title: "Bandwidth", isNumber: true, sort: (l) => l.bytes_per_s, cell: (l) => bandwidth(l.bytes_per_s) },
  { title: "Latency", isNumber: true, sort: (l) => l.latency_s, cell: (l) => duration(l.latency_s) },
  { title: "Verdict", sort: (l) => Number(l.is_slow), cell: (l) => (l.is_slow ? el("span", { class: "state warn" }, "slow") : el("span", { class: "state good" }, "as expected")) },
];

const PROCESSES = [
  { title: "Process", cell: (p) => mono(p.worker_id) },
  { title: "State", cell: (p) => stateOf(p.is_alive ? p.state : "away") },
  { title: "Address", cell: (p) => mono(p.address) },
  { title: "Pid", isNumber: true, cell: (p) => p.pid ?? NONE },
  { title: "CPU", isNumber: true, cell: (p) => cores(p.cpu_cores) },
  { title: "Memory", isNumber: true, cell: (p) => memory(p.memory_bytes) },
  { title: "Doing", cell: (p) => doing(p) },
];

class Operations {
  constructor() {
    this.workers = new Workers();
    this.decisions = new LiveTable(DECISIONS, { key: (d) => `${d.router} ${d.request_id}`, empty: "No request was paired yet." });
    this.links = new LiveTable(LINKS, { key: (l) => `${l.source_id} ${l.to} ${l.transport}`, empty: "No link was measured yet: prompts were computed where they were needed." });
    this.ranks = new LiveTable(RANKS, { key: (r) => `${r.worker_id} ${r.rank}`, empty: "", sortBy: 0, few: 16 });
    this.processes = new LiveTable(PROCESSES, { key: (p) => p.worker_id, empty: "" });
    this.isPaused = false;
    this.timer = 0;
    this.heardMs = null;
    this.overview = null;
    this.range = "live";
  }

  start() {
    byId("workers-table").append(this.workers.table.node);
    byId("pools").append(this.workers.pools);
    byId("decisions-table").append(this.decisions.node);
    byId("links-table").append(this.links.node);
    byId("ranks-table").append(this.ranks.node);
    byId("processes-table").append(this.processes.node);
    byId("legend").append(...legend());
    byId("filter").addEventListener("input", (event) => this.workers.filter(event.target.value.trim()));
    byId("pause").addEventListener("click", () => this.pause(!this.isPaused));
    for (const button of byId("range").children) button.addEventListener("click", () => this.setRange(button.value));
    document.addEventListener("visibilitychange", () => this.again());
    bindKey(byId("key"), () => this.again());
    this.again();
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    byId("pause").textContent = isPaused ? "Resume" : "Pause";
    this.again();
  }

  /** @param {"live" | "hour"} range what the tiles show */
  setRange(range) {
    this.range = range;
    for (const button of byId("range").children) button.setAttribute("aria-pressed", String(button.value === range));
    if (this.overview) this.showTiles();
  }

  /** Ask now, and again after a while, if somebody looks. */
  async again() {
    clearTimeout(this.timer);
    if (this.isPaused || document.hidden) return this.showFresh();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    await this.ask();
    if (turn === this.turn) this.timer = setTimeout(() => this.again(), EVERY_MS);
  }

  async ask() {
    try {
      const overview = await read("admin/overview");
      if (this.isPaused) return;
      this.heardMs = Date.now();
      this.show(overview);
      tell(byId("banner"), "");
    } catch (error) {
      tell(byId("banner"), error.message);
    }
    this.showFresh();
  }

  showFresh() {
    const at = this.heardMs === null ? "nothing heard yet" : `as of ${new Date(this.heardMs).toLocaleTimeString()}`;
    byId("fresh").textContent = this.isPaused ? `paused, ${at}` : at;
    byId("fresh").classList.toggle("paused", this.isPaused);
  }

  showTiles() {
    const live = this.overview[this.range];
    byId("tiles").setAttribute("aria-label", rangeOf(live));
    byId("tiles").replaceChildren(...tiles(live));
  }

  show(overview) {
    const { model, processes, links, num_links: numLinks, decisions } = overview;
    this.overview = overview;
    const isWorker = (process) => "blocks" in process;
    byId("model").textContent = model.name;
    byId("model").title = model.max_model_len ? `${model.name}: ${model.max_model_len} tokens, blocks of ${model.block_size}` : model.name;
    this.showTiles();
    this.workers.show(processes.filter(isWorker));
    const ranks = ranksOf(processes.filter(isWorker));
    byId("ranks").hidden = ranks.length === 0;
    this.ranks.show(ranks);
    this.processes.show(processes.filter((process) => !isWorker(process)));
    this.decisions.show([...decisions].reverse());
    this.links.show(links);
    byId("links-count").textContent = numLinks > links.length ? `the ${links.length} slowest of ${numLinks}` : numLinks ? `${numLinks} measured` : "";
  }
}

function difference(ms) {
  if (ms === null || ms === undefined) return NONE;
  return `${ms < 0 ? "−" : "+"}${milliseconds(Math.abs(ms))}`;
}

function doing(process) {
  if (process.problem) return process.problem;
  return process.role === "router" ? `knows ${process.num_workers} workers` : `${process.num_running} requests open`;
}

/** To the request's timeline; a choice of several is found by its request. */
function requestLink(id) {
  const short = id.length > 14 ? `${id.slice(0, 13)}…` : id;
  const address = `trace#${encodeURIComponent(id.replace(/\/\d+$/, ""))}`;
  return el("a", { class: "mono", href: address, title: id }, short);
}

new Operations().start();
