/** The settings form. An empty field is not sent. */

import { byId } from "/static/dom.js";
import { JSON_FIELDS, validateJson } from "/static/jsonfields.js";
import { FIELDS, samplingField, validate } from "/static/sampling.js";
import { load, save } from "/static/storage.js";

/**
 * The form; its values are kept in the tab's session storage. `onKey` is called for a new API key. `confirmation`: a
 * Confirmation. The form gets an event "settingschange" when a value has changed.
 */
export class SettingsForm {
  #form = byId("settings-form");

  constructor(onKey, confirmation) {
    for (const field of FIELDS) byId("sampling").append(samplingField(field));
    for (const control of this.#controls()) {
      control.value = load(control.name);
      control.addEventListener("input", () => {
        save(control.name, control.value);
        // JSON is invalid until its last bracket, so it is checked on leaving the field, and then while it is marked.
        const early = JSON_FIELDS.some(({ name }) => name === control.name) && control.getAttribute("aria-invalid") !== "true";
        if (control.name !== "api-key" && !early) this.check();
        this.#tell();
      });
    }
    for (const { name } of JSON_FIELDS) byId(name).addEventListener("change", () => this.check());
    byId("api-key").addEventListener("change", () => onKey());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    byId("reset-settings").addEventListener("click", () => {
      const text = "This clears all fields, including the system prompt, the tools and the API key. Presets are kept.";
      confirmation.ask({ title: "Reset the settings?", text, verb: "Reset" }, () => this.#reset(onKey));
    });
    this.check();
  }

  /** Shows the model's defaults, name -> number, in empty fields. */
  showDefaults(values) {
    for (const { name } of FIELDS) byId(name).placeholder = values?.[name] === undefined ? "default" : String(values[name]);
  }

  /** The text of each of the fields `names`. */
  texts(names) {
    return Object.fromEntries(names.map((name) => [name, byId(name).value.trim()]));
  }

  /** Fills fields, name -> text. */
  fill(texts) {
    for (const [name, text] of Object.entries(texts)) {
      byId(name).value = text;
      save(name, text);
    }
    this.check();
    this.#tell();
  }

  get key() {
    return byId("api-key").value.trim();
  }

  get system() {
    return byId("system").value;
  }

  /** The valid sampling parameters, name -> number. */
  get sampling() {
    return validate(this.texts(FIELDS.map(({ name }) => name))).values;
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
    return [...this.#form.querySelectorAll("[name]")];
  }

  #reset(onKey) {
    for (const control of this.#controls()) {
      control.value = "";
      save(control.name, "");
    }
    this.check();
    this.#tell();
    onKey();
  }

  #tell() {
    this.#form.dispatchEvent(new Event("settingschange"));
  }
}
