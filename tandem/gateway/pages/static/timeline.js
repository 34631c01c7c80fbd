/** Draws where a request's time went: one lane a process, its stages as bars. */

import { el } from "./dom.js";
import { duration, figure } from "./format.js";

/**
 * @typedef {{name: string, process: string, start_s: number, duration_s: number, attributes: Record<string, any>}} Stage
 * @typedef {{started_s: number, duration_s: number | null, ttft_s: number | null, stages: Stage[]}} Record_
 */

const ROW_PX = 18;
const ROOM = 1.15;

/** @param {Record_} record @returns {HTMLElement} */
export function timeline(record) {
  const stages = record.stages.map((stage) => placed(stage, record.started_s));
  const end = Math.max(0.001, record.duration_s ?? 0, ...stages.map((stage) => stage.end));
  const first = record.ttft_s === null ? end : Math.min(end, record.ttft_s * ROOM);
  const chart = el("div", { class: "chart" });
  const draw = (span) => chart.replaceChildren(...lanes(stages).map((lane) => row(lane, span)), axis(span));
  const isLate = first < end / 3;
  draw(isLate ? first : end);
  const every = el("details", { class: "every" }, el("summary", {}, `All ${stages.length} stages`), table(stages));
  return el("div", { class: "body" }, isLate && scale(first, end, draw), chart, sums(stages), every);
}

/** Seconds since the request began. */
function placed(stage, startedS) {
  const start = Math.max(0, stage.start_s - startedS);
  return { ...stage, start, end: start + stage.duration_s, lane: laneOf(stage) };
}

/** Pairing is the router's time, and a transfer is nobody's: it lies between two workers. */
function laneOf({ name, process, attributes }) {
  if (name === "pair") return "router";
  if (name === "transfer") return attributes?.source ? `${attributes.source} → ${process}` : `transfer → ${process}`;
  return process;
}

function lanes(stages) {
  const found = new Map();
  for (const stage of stages) found.set(stage.lane, [...(found.get(stage.lane) ?? []), stage]);
  return [...found].map(([name, members]) => {
    const [long, moments] = [members.filter(isLong), members.filter((stage) => !isLong(stage))];
    return { name, rows: packed(long), moments };
  });
}

const isLong = (stage) => stage.duration_s > 0;

/** Stages that overlap go to rows of their own; the longest lie on top. */
function packed(stages) {
  const rows = [];
  for (const stage of [...stages].sort((a, b) => a.start - b.start || b.end - a.end)) {
    const free = rows.find((row) => row.at(-1).end <= stage.start + 1e-6);
    if (free) free.push(stage);
    else rows.push([stage]);
  }
  return rows;
}

function row({ name, rows, moments }, span) {
  const bars = rows.flatMap((stages, index) => stages.filter((stage) => stage.start <= span).map((stage) => bar(stage, index, span)));
  bars.push(...moments.filter((stage) => stage.start <= span).map((stage) => bar(stage, 0, span)));
  const height = `${Math.max(1, rows.length) * ROW_PX + 2}px`;
  return el("div", { class: "lane" }, el("span", { class: "who" }, name), el("div", { class: "track", style: { height } }, ...bars));
}

function bar(stage, index, span) {
  const percent = (seconds) => `${(100 * Math.min(1, seconds / span)).toFixed(3)}%`;
  const long = { top: `${index * ROW_PX + 3}px`, width: percent(stage.duration_s) };
  const style = { left: percent(stage.start), ...(isLong(stage) ? long : {}) };
  const title = `${stage.name}: ${duration(stage.duration_s)} from ${duration(stage.start)}`;
  return el("span", { class: `stage ${kindOf(stage)}`, style, title });
}

function kindOf(stage) {
  return `${stage.name.replace(/[^a-z]+/g, "-")}${isLong(stage) ? "" : " moment"}`;
}

function axis(span) {
  return el("div", { class: "axis" }, el("span", {}, "0"), el("span", {}, duration(span / 2)), el("span", {}, duration(span)));
}

function scale(first, end, draw) {
  const buttons = [["First token", first], ["Whole request", end]].map(([words, span], index) =>
    el("button", { type: "button", "aria-pressed": String(index === 0), on: { click: (event) => press(event.target, span) } }, words)
  );
  const press = (pressed, span) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === pressed));
    draw(span);
  };
  return el("div", { class: "scale", role: "group", "aria-label": "Part of the request that is drawn" }, ...buttons);
}

/** What the colours mean, with the time each kind of stage took. */
function sums(stages) {
  const total = new Map();
  for (const stage of stages) total.set(stage.name, (total.get(stage.name) ?? 0) + stage.duration_s);
  const words = ([name, seconds]) => (seconds > 0 ? `${name} ${duration(seconds)}` : name);
  return el("div", { class: "key-of" }, ...[...total].map((sum) => el("span", {}, swatch({ name: sum[0], duration_s: sum[1] }), words(sum))));
}

function swatch(stage) {
  return el("i", { class: `stage swatch ${kindOf(stage)}` });
}

function table(stages) {
  const head = ["Stage", "Where", "From", "Took", "Details"].map((words, index) =>
    el("th", { class: (index === 2 || index === 3) && "number", scope: "col" }, words)
  );
  const rows = stages.map((stage) =>
    el("tr", {},
      el("td", {}, swatch(stage), stage.name),
      el("td", { class: "mono" }, stage.process),
      el("td", { class: "number" }, duration(stage.start)),
      el("td", { class: "number" }, stage.duration_s > 0 ? duration(stage.duration_s) : "–"),
      el("td", {}, details(stage.attributes ?? {})))
  );
  return el("table", { class: "stages" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
}

/** What a stage tells of itself; times of nothing are left out. @param {Record<string, any>} attributes */
function details(attributes) {
  const told = Object.entries(attributes).filter(([name, value]) => value || !/_m?s$/.test(name));
  return told.sort().map(([name, value]) => figure(name, value)).join(", ");
}
