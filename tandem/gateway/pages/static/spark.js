/** A small line of one figure over the last minute, drawn in SVG. Seconds without a value are bridged. */

import { svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 44;
const LENGTH = 60;
const EDGE = 3;

/** @param {(number | null)[]} values oldest first @param {string} label @returns {SVGElement} */
export function sparkline(values, label) {
  const top = Math.max(...values.filter((value) => value !== null), 1e-9);
  const x = (index) => ((LENGTH - values.length + index) * WIDTH) / (LENGTH - 1);
  const y = (value) => HEIGHT - EDGE - (value / top) * (HEIGHT - 2 * EDGE);
  const points = values.flatMap((value, index) => (value === null ? [] : [`${x(index).toFixed(1)},${y(value).toFixed(1)}`]));
  const line = [...points, ...points].slice(0, Math.max(2, points.length)).join(" ");
  const ends = [points[0], points.at(-1)].map((point) => point?.split(",")[0]);
  return svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    points.length > 1 && svg("polygon", { class: "area", points: `${ends[0]},${HEIGHT} ${line} ${ends[1]},${HEIGHT}` }),
    points.length > 0 && svg("polyline", { class: "line", points: line }));
}
