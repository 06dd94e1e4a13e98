/** The choice of a preset in the settings, and the field that stores the settings as one. */

import { byId, element, isComposing, setText } from "/static/dom.js";
import { BUILT_IN, matching, PRESET_FIELDS, problemOfName, removePreset, storedPresets, storePreset } from "/static/presets.js";
import { load, save } from "/static/storage.js";

const STORAGE_KEY = "preset";

export class PresetChoice {
  #settings;

  /** `settings`: a SettingsForm. `confirmation`: a Confirmation. */
  constructor(settings, confirmation) {
    this.#settings = settings;
    byId("preset").addEventListener("change", (event) => this.use(event.target.value));
    byId("save-preset").addEventListener("click", () => this.#store());
    byId("delete-preset").addEventListener("click", () => {
      const text = `This browser will no longer keep “${byId("preset").value}”.`;
      confirmation.ask({ title: "Delete this preset?", text, verb: "Delete" }, () => this.#remove());
    });
    byId("preset-name").addEventListener("input", () => this.#complain(""));
    byId("preset-name").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || isComposing(event)) return;
      event.preventDefault();
      this.#store();
    });
    byId("settings-form").addEventListener("settingschange", () => this.#show());
    addEventListener("storage", () => this.#show()); // another tab stored or deleted one
    this.#show();
  }

  /** All presets, the built-in ones first: [{name, texts}]. */
  get all() {
    return [...BUILT_IN, ...storedPresets()];
  }

  /** Fills the settings with those of a preset. */
  use(name) {
    const preset = this.all.find((one) => one.name === name);
    if (preset === undefined) return;
    save(STORAGE_KEY, name);
    const { system = "", ...texts } = preset.texts;
    this.#settings.fill(system === "" ? texts : preset.texts); // a preset without a system prompt keeps the present one
  }

  #store() {
    const name = byId("preset-name").value.trim();
    const texts = this.#settings.texts(PRESET_FIELDS);
    const wrong = Object.keys(this.#settings.check().errors).find((field) => field in texts);
    const problem = problemOfName(name) || (wrong === undefined ? storePreset({ name, texts }) : "Correct the marked fields before you save them.");
    this.#complain(problem);
    if (problem !== "") return;
    save(STORAGE_KEY, name);
    byId("preset-name").value = "";
    this.#say(`The preset ${name} is saved in this browser.`);
    this.#show();
  }

  #remove() {
    const name = byId("preset").value;
    const problem = removePreset(name);
    this.#complain(problem);
    if (problem !== "") return;
    byId("preset").focus(); // the button is about to be hidden
    this.#say(`The preset ${name} is deleted.`);
    this.#show();
  }

  #complain(text) {
    setText(byId("preset-error"), text);
    byId("preset-name").setAttribute("aria-invalid", String(text !== ""));
    if (text === "") return;
    this.#say("");
    byId("preset-name").focus();
  }

  #say(text) {
    setText(byId("preset-status"), text);
  }

  /** Lists the presets and chooses the one that matches the settings. */
  #show() {
    const stored = storedPresets();
    const chosen = matching(this.all, this.#settings.texts(PRESET_FIELDS), load(STORAGE_KEY));
    const groups = [element("optgroup", { label: "Built in" }, ...BUILT_IN.map(option))];
    if (stored.length > 0) groups.push(element("optgroup", { label: "Yours" }, ...stored.map(option)));
    if (chosen === null) groups.unshift(element("option", { value: "", text: "Your own values" }));
    byId("preset").replaceChildren(...groups);
    byId("preset").value = chosen?.name ?? "";
    byId("delete-preset").hidden = !stored.some(({ name }) => name === chosen?.name);
  }
}

const option = ({ name }) => element("option", { value: name, text: name });
