/** Sampling parameters: bounds, the check, fields of the form. An empty field is not sent. */

import { element } from "/static/dom.js";

/** Bounds of the server; the seed ends at the largest exact integer. */
export const FIELDS = [
  { name: "temperature", label: "Temperature", low: 0, high: 2, integer: false, hint: "0 takes the most likely token" },
  { name: "top_p", label: "Top p", low: 0, high: 1, integer: false, openLow: true, hint: "above 0, up to 1" },
  { name: "top_k", label: "Top k", low: -1, high: 1000000, integer: true, hint: "0 or −1: off" },
  { name: "min_p", label: "Min p", low: 0, high: 1, integer: false, hint: "minimum probability, relative to the most likely token" },
  { name: "max_tokens", label: "Max tokens", low: 1, high: 16777216, integer: true, hint: "length of an answer" },
  { name: "reasoning_budget", label: "Thinking budget", low: -1, high: 16777216, integer: true, hint: "tokens of reasoning; 0: none, −1: no limit" },
  { name: "seed", label: "Seed", low: 0, high: Number.MAX_SAFE_INTEGER, integer: true, hint: "same seed, same answer" },
];

/** `raw`: field name -> text. Returns `values` (name -> number, empty fields left out) and `errors` (name -> words). */
export function validate(raw) {
  const values = {};
  const errors = {};
  for (const field of FIELDS) {
    const text = (raw[field.name] ?? "").trim();
    if (text === "") continue;
    const value = numberFrom(text);
    const error = problem(field, value);
    if (error === "") values[field.name] = value;
    else errors[field.name] = error;
  }
  return { values, errors };
}

/** A decimal number, with a point or a comma; else NaN ("0x10", "Infinity"). */
function numberFrom(text) {
  return /^[+-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text.replace(",", ".")) : NaN;
}

function problem(field, value) {
  if (!Number.isFinite(value)) return `${field.label} must be a number.`;
  if (field.integer && !Number.isInteger(value)) return `${field.label} must be an integer.`;
  const tooLow = field.openLow ? value <= field.low : value < field.low;
  if (!tooLow && value <= field.high) return "";
  const from = field.openLow ? `above ${field.low}, up to` : `from ${field.low} to`;
  return `${field.label} must be ${from} ${field.high}.`;
}

/** A field of the form, with its label, its hint and a place for an error. */
export function samplingField({ name, label, integer, hint }) {
  return element(
    "div",
    { class: "field row" },
    element("label", { for: name, text: label }),
    element("input", {
      id: name,
      name,
      type: "text",
      inputmode: integer ? "numeric" : "decimal",
      placeholder: "default",
      "aria-describedby": `${name}-hint ${name}-error`,
    }),
    element("span", { class: "note", id: `${name}-hint`, text: hint }),
    element("span", { class: "field-error", id: `${name}-error`, "aria-live": "polite" }),
  );
}
