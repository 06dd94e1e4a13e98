/** Settings: the bounds of sampling, the check, the form. An empty field is not sent. */

import { byId, element } from "/static/dom.js";
import { JSON_FIELDS, validateJson } from "/static/jsonfields.js";
import { load, save } from "/static/storage.js";

/** Bounds of the server; the seed ends at the largest exact integer. */
export const FIELDS = [
  { name: "temperature", label: "Temperature", low: 0, high: 2, integer: false, hint: "0 takes the most likely token" },
  { name: "top_p", label: "Top p", low: 0, high: 1, integer: false, openLow: true, hint: "above 0, up to 1" },
  { name: "top_k", label: "Top k", low: -1, high: 1000000, integer: true, hint: "0 or −1: off" },
  { name: "min_p", label: "Min p", low: 0, high: 1, integer: false, hint: "minimum probability, relative to the most likely token" },
  { name: "max_tokens", label: "Max tokens", low: 1, high: 16777216, integer: true, hint: "length of an answer" },
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

/** The settings form. Values are kept in the tab's session storage; `onKey` is called for a new API key. */
export class SettingsForm {
  #form = byId("settings-form");

  constructor(onKey) {
    for (const field of FIELDS) byId("sampling").append(samplingField(field));
    for (const control of this.#controls()) {
      control.value = load(control.name);
      control.addEventListener("input", () => {
        save(control.name, control.value);
        // JSON is invalid until its last bracket, so it is checked on leaving the field, and then while it is marked.
        const early = JSON_FIELDS.some(({ name }) => name === control.name) && control.getAttribute("aria-invalid") !== "true";
        if (control.name !== "api-key" && !early) this.check();
      });
    }
    for (const { name } of JSON_FIELDS) byId(name).addEventListener("change", () => this.check());
    byId("api-key").addEventListener("change", () => onKey());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    byId("reset-settings").addEventListener("click", () => this.#reset(onKey));
    this.check();
  }

  /** Shows the model's defaults, name -> number, in empty fields. */
  showDefaults(values) {
    for (const { name } of FIELDS) byId(name).placeholder = values?.[name] === undefined ? "default" : String(values[name]);
  }

  get key() {
    return byId("api-key").value.trim();
  }

  get system() {
    return byId("system").value;
  }

  /** The cache mode for the request; undefined for the server's default. */
  get cacheUse() {
    const mode = byId("reuse").value;
    return mode ? { kvboost: { mode } } : {};
  }

  /** Marks invalid fields; returns the `values` for a request, and `errors` as `validate` does. */
  check() {
    const raw = Object.fromEntries(this.#controls().map(({ name, value }) => [name, value]));
    const numbers = validate(raw);
    const json = validateJson(raw);
    const errors = { ...numbers.errors, ...json.errors };
    for (const { name } of [...FIELDS, ...JSON_FIELDS]) {
      const error = errors[name] ?? "";
      byId(name).setAttribute("aria-invalid", String(error !== ""));
      byId(`${name}-error`).textContent = error;
    }
    return { values: { ...numbers.values, ...json.values }, errors };
  }

  #controls() {
    return [...this.#form.querySelectorAll("input, select, textarea")];
  }

  #reset(onKey) {
    for (const control of this.#controls()) {
      control.value = "";
      save(control.name, "");
    }
    this.check();
    onKey();
  }
}

function samplingField({ name, label, integer, hint }) {
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
