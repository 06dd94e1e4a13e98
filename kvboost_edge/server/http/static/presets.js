/** Presets of the settings: the built-in ones, and those stored in this browser. */

import { FIELDS, validate } from "/static/sampling.js";

const PLACE = "presets";
const MAX_PRESETS = 50;
const MAX_PRESET_NAME = 60; // characters

/** The fields that a stored preset has. `texts` of a built-in preset has fewer: the others keep their values. */
export const PRESET_FIELDS = ["system", ...FIELDS.map(({ name }) => name)];

const sampling = (texts) => ({ temperature: "", top_p: "", top_k: "", min_p: "", seed: "", ...texts });

export const BUILT_IN = [
  { name: "Server defaults", texts: sampling({}) },
  { name: "Creative", texts: sampling({ temperature: "1", top_p: "0.95", top_k: "0", min_p: "0.05" }) },
  { name: "Precise", texts: sampling({ temperature: "0.3", top_p: "0.9", top_k: "40" }) },
  { name: "Deterministic", texts: sampling({ temperature: "0", seed: "0" }) },
];

/** The stored presets by name: [{name, texts}]; entries that are not valid are left out. */
export function storedPresets() {
  try {
    return JSON.parse(localStorage.getItem(PLACE) ?? "[]").filter(isValid);
  } catch {
    return []; // storage is blocked, or has something else
  }
}

function isValid(preset) {
  const { name, texts } = preset ?? {};
  if (problemOfName(name) !== "" || typeof texts !== "object" || texts === null) return false;
  const areTexts = Object.entries(texts).every(([field, text]) => PRESET_FIELDS.includes(field) && typeof text === "string");
  return areTexts && Object.keys(validate(texts).errors).length === 0;
}

/** Why a preset cannot have this name, or "". */
export function problemOfName(name) {
  if (typeof name !== "string" || name.trim() === "") return "Enter a name for the preset.";
  if (name.length > MAX_PRESET_NAME) return `The name is longer than ${MAX_PRESET_NAME} characters.`;
  return BUILT_IN.some((one) => one.name.toLowerCase() === name.toLowerCase()) ? `${name} is a built-in preset. Choose another name.` : "";
}

/** Stores a preset in place of one with its name; returns why that failed, or "". */
export function storePreset({ name, texts }) {
  const others = storedPresets().filter((one) => one.name !== name);
  if (others.length >= MAX_PRESETS) return `${MAX_PRESETS} presets are stored, which is the limit. Delete one.`;
  return write([...others, { name, texts }]);
}

/** Deletes a preset; returns why that failed, or "". */
export function removePreset(name) {
  return write(storedPresets().filter((one) => one.name !== name));
}

function write(presets) {
  presets.sort((one, other) => one.name.localeCompare(other.name));
  try {
    localStorage.setItem(PLACE, JSON.stringify(presets));
    return "";
  } catch {
    return "The browser cannot store the presets.";
  }
}

/** The preset whose texts are the `current` ones, `wanted` if several are; or null. One without a system prompt fits any. */
export function matching(presets, current, wanted) {
  const fits = ([field, text]) => current[field] === text || (field === "system" && text === "");
  const found = presets.filter(({ texts }) => Object.entries(texts).every(fits));
  return found.find(({ name }) => name === wanted) ?? found[0] ?? null;
}
