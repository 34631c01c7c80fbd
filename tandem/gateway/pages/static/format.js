/** Figures with their units, short enough for a table. Pure. */

export const NONE = "–";

/** Seconds as ms or s. @param {number} seconds */
export function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(seconds < 100 ? 2 : 0)} s`;
  if (seconds > 0 && seconds < 1e-4) return `${Math.round(1e6 * seconds)} µs`;
  const value = 1000 * seconds;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

/** Milliseconds, or a dash. @param {number | null | undefined} value */
export function milliseconds(value) {
  return value === null || value === undefined ? NONE : duration(value / 1000);
}

/** @param {number} value */
export function count(value) {
  return value >= 10000 ? `${(value / 1000).toFixed(value < 1e5 ? 1 : 0)}k` : String(value);
}

/** A rate with as many digits as it deserves. @param {number} value */
export function rate(value) {
  if (value >= 100) return count(Math.round(value));
  return value.toFixed(value > 0 && value < 0.1 ? 2 : value > 0 && value < 10 ? 1 : 0);
}

/** @param {number} bytesPerS */
export function bandwidth(bytesPerS) {
  const gb = bytesPerS / 1e9;
  return gb >= 1 ? `${gb.toFixed(1)} GB/s` : `${(1000 * gb).toFixed(gb < 0.01 ? 1 : 0)} MB/s`;
}

/** How long ago. @param {number} seconds */
export function ago(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

/** A share of 1, or a dash. @param {number | null | undefined} share */
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const value = 100 * share;
  return `${value > 0 && value < 10 ? value.toFixed(1).replace(/\.0$/, "") : Math.round(value)} %`;
}

/** @param {number | null | undefined} bytes */
export function memory(bytes) {
  if (bytes === null || bytes === undefined) return NONE;
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.round(bytes / 1e6)} MB`;
}

/** CPU as cores. @param {number | null | undefined} value */
export function cores(value) {
  return value === null || value === undefined ? NONE : `${value.toFixed(value < 10 ? 2 : 0)} cores`;
}

/** An attribute of a stage, in the unit that its name tells. @param {string} name @param {any} value */
export function figure(name, value) {
  const words = (end) => name.slice(0, name.length - end).replaceAll("_", " ");
  if (typeof value !== "number") return `${words(0)} ${value}`;
  if (name.endsWith("_bytes")) return `${words(6).replace(/^num$/, "")} ${size(value)}`.trim();
  if (name === "gb_per_s") return bandwidth(1e9 * value);
  if (name.startsWith("num_")) return `${value} ${words(0).slice(4)}`;
  if (name.endsWith("_ms")) return `${words(3)} ${milliseconds(value)}`;
  return name.endsWith("_s") ? `${words(2)} ${duration(value)}` : `${words(0)} ${value}`;
}

/** Bytes as B, kB, MB or GB. @param {number} bytes */
export function size(bytes) {
  if (bytes < 1e3) return `${bytes} B`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : memory(bytes);
}
