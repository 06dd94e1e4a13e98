/** Formatting of numbers. Values other than finite numbers become a dash. */

const DASH = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-GB") : DASH);

export const percent = (share) => (isNumber(share) ? `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %` : DASH);

export const rate = (value) => (isNumber(value) ? value.toFixed(value < 100 ? 1 : 0) : DASH);

/** `value` with about three digits. */
const short = (value) => value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);

/** Milliseconds as "34 ms", "1.25 s" or "300 s". */
export function duration(ms) {
  if (!isNumber(ms)) return DASH;
  return ms < 999.5 ? `${ms.toFixed(ms < 9.95 ? 1 : 0)} ms` : `${short(ms / 1000)} s`;
}

/** Bytes in decimal units, as in the rest of the project. */
export function bytes(value) {
  if (!isNumber(value)) return DASH;
  if (value < 999.5) return `${Math.round(value)} B`;
  const [size, unit] = value >= 999.5e6 ? [value / 1e9, "GB"] : value >= 999.5e3 ? [value / 1e6, "MB"] : [value / 1e3, "kB"];
  return `${short(size)} ${unit}`;
}

/** The beginning of `text`, at most `length` characters, without half of the last one. */
export const beginning = (text, length) => text.slice(0, length).replace(/[\ud800-\udbff]$/, "");

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Labels of options as words: ["wide_arithmetic"] becomes ["wide arithmetic"]. */
export const inWords = (labels) => (Array.isArray(labels) ? labels.map((one) => String(one).replaceAll("_", " ")) : []);
