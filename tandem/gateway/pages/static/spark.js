/** A line of one figure over time, in SVG, with the ends of both axes named. Spans without a value are bridged. */

import { el, svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 44;
const EDGE = 3;
const ROUND = [1, 2, 5, 10];

/**
 * @param {(number | null)[]} values oldest first, one every `stepS` seconds
 * @param {{title: string, stepS: number, length: number, words: (value: number) => string, most?: number}} options
 *   `length`: values of a whole line; `words`: a value with its unit; `most`: the largest that the axis need show
 * @returns {HTMLElement}
 */
export function sparkline(values, { title, stepS, length, words, most = Infinity }) {
  const top = Math.min(most, rounded(Math.max(0, ...values.filter((value) => value !== null))));
  const past = stepS * length;
  const from = past >= 3600 ? `${past / 3600} h ago` : `${past} s ago`;
  return el("figure", { class: "spark" },
    el("div", { class: "plot" }, line(values, length, top, title), el("span", { class: "most" }, words(top).replace(/\.0+(?=\D)/, "")), el("span", { class: "least" }, "0")),
    el("figcaption", {}, el("span", {}, from), el("span", {}, "now")));
}

/** The next of 1, 2, 5, 10 times a power of ten; 1 for nothing. */
function rounded(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return ROUND.find((step) => step * unit >= value * 0.999) * unit;
}

function line(values, length, top, title) {
  const x = (index) => ((length - values.length + index) * WIDTH) / (length - 1);
  const y = (value) => HEIGHT - EDGE - (Math.min(value, top) / top) * (HEIGHT - 2 * EDGE);
  const points = values.flatMap((value, index) => (value === null ? [] : [`${x(index).toFixed(1)},${y(value).toFixed(1)}`]));
  const drawn = points.join(" ");
  const ends = [points[0], points.at(-1)].map((point) => point?.split(",")[0]);
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title },
    svg("path", { class: "grid", d: `M0 ${EDGE}H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - EDGE}H${WIDTH}` }),
    points.length > 1 && svg("polygon", { class: "area", points: `${ends[0]},${HEIGHT - EDGE} ${drawn} ${ends[1]},${HEIGHT - EDGE}` }),
    points.length > 1 && svg("polyline", { class: "line", points: drawn }),
    points.length === 1 && svg("path", { class: "line", d: `M${points[0]}h-4` }));
}
