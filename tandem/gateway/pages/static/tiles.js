/** The tiles of the operations page: what this gateway served in the last minute or hour. */

import { el } from "./dom.js";
import { milliseconds, percent, rate } from "./format.js";
import { sparkline } from "./spark.js";

const LENGTH = 60;
const WHOLE = 1; // of a share

/** @param {Record<string, any>} live figures and series, as `live` and `hour` of /admin/overview @returns {HTMLElement[]} */
export function tiles(live) {
  const { series } = live;
  const spread = ({ p95, p99 }) => [`p95 ${milliseconds(p95)}`, `p99 ${milliseconds(p99)}`];
  const perS = (value) => `${rate(value)}/s`;
  const tile = (title, figure, unit, notes, values, words, most) =>
    el("article", { class: "tile" }, el("h2", {}, title),
      el("p", { class: "figure" }, el("b", {}, figure), unit && ` ${unit}`),
      el("p", { class: "muted notes" }, ...notes.map((note) => el("span", {}, note))),
      sparkline(values ?? [], { title: `${title}, ${rangeOf(live)}`, stepS: live.step_s, length: LENGTH, words, most }));
  return [
    tile("Time to first token", milliseconds(live.ttft_ms.p50), "median", spread(live.ttft_ms), series.ttft_p50_ms, milliseconds),
    tile("Time per output token", milliseconds(live.tpot_ms.p50), "median", spread(live.tpot_ms), series.tpot_p50_ms, milliseconds),
    tile("Requests per second", rate(live.requests_per_s), "", [`${live.num_requests} in ${spanOf(live.window_s)}`], series.requests_per_s, perS),
    tile("Output tokens per second", rate(live.output_tokens_per_s), "", [`prompt ${perS(live.prompt_tokens_per_s)}`], series.output_tokens_per_s, perS),
    tile("Failed requests", percent(live.failed_share), "", [`${live.num_failed} failed`, `${live.num_refused} refused`], series.failed_share, percent, WHOLE),
    tile("Prefix cache hits", percent(live.cached_share), "of prompt tokens", [], series.cached_share, percent, WHOLE),
  ];
}

/** @param {{step_s: number}} live */
export function rangeOf(live) {
  return live.step_s > 1 ? "last hour" : "last minute";
}

function spanOf(seconds) {
  return seconds < 120 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
}
