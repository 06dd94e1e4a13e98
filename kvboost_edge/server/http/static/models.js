/** The model in use (the only one, or the one chosen in the chat's head), and the state of each model. */

import { request } from "/static/api.js";
import { byId, element } from "/static/dom.js";
import { load, save } from "/static/storage.js";

const INTERVAL_MS = 2500;
const LONGEST_PAUSE_MS = 16000;
const PATIENCE_MS = 10000;
const KEPT = "model";

/** The models of /v1/models by first name: [{id, state, failure, sampling}]; state "" if unknown. */
export function different(listed) {
  const roots = new Set();
  const found = [];
  for (const { id, root = id, state = "", failure = null, sampling = null } of listed) {
    const remarks = { state: String(state), failure: failure === null ? "" : String(failure) };
    if (!roots.has(root)) found.push({ id: String(id), ...remarks, sampling: sampling ?? {} });
    roots.add(root);
  }
  return found;
}

const inWords = (state) => state.replaceAll("_", " ");

/** The remark below the choice; "" for a loaded model. */
export function remark({ state, failure }) {
  if (state === "" || state === "loaded") return "";
  if (state === "loading") return "This model is being loaded.";
  const next = "Your next message loads it.";
  return failure === "" ? `This model is not loaded. ${next}` : `This model could not be loaded: ${failure}`;
}

export class ModelChoice {
  #key;
  #changed;
  #models = [];
  #chosen = null;
  #timer = 0;
  #pause = INTERVAL_MS;

  /** `key()`: the API key. `changed()`: called if the model or its state changes. */
  constructor(key, changed) {
    this.#key = key;
    this.#changed = changed;
    byId("model-choice").addEventListener("change", (event) => {
      save(KEPT, event.target.value);
      this.#take(this.#models);
    });
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  /** True if the model is loaded, so that its pool can be shown. */
  get isLoaded() {
    return this.#chosen === null || ["", "loaded"].includes(this.#chosen.state);
  }

  /** The query that selects the model; "" if there is only one. */
  get query() {
    return this.#chosen !== null && this.#models.length > 1 ? `?model=${encodeURIComponent(this.#chosen.id)}` : "";
  }

  /** Default values of the sampling parameters; {} until they are known. */
  get sampling() {
    return this.#chosen?.sampling ?? {};
  }

  /** Promise of the model's name; rejects with ApiError. */
  async name() {
    return this.#chosen?.id ?? this.find();
  }

  /** Promise of the model's name, read from the server. */
  async find() {
    this.#chosen = null;
    const place = byId("model");
    try {
      await this.#read();
    } catch (error) {
      place.textContent = error.status === 401 ? "API key needed" : "server not responding";
      throw error;
    } finally {
      place.classList.toggle("warn", this.#chosen === null);
    }
    return this.#chosen.id;
  }

  async #read() {
    const key = this.#key();
    try {
      const response = await request("/v1/models", { key, signal: AbortSignal.timeout(PATIENCE_MS) });
      const models = different((await response.json()).data);
      if (key === this.#key()) this.#take(models);
      this.#pause = INTERVAL_MS;
    } catch (error) {
      this.#pause = Math.min(2 * this.#pause, LONGEST_PAUSE_MS);
      throw error;
    } finally {
      this.#schedule();
    }
  }

  /** Reads the states of several models again while they are visible. */
  #schedule() {
    clearTimeout(this.#timer);
    if (this.#models.length < 2 || document.visibilityState !== "visible") return;
    this.#timer = setTimeout(() => this.#read().catch(() => {}), this.#pause);
  }

  #take(models) {
    const before = this.#chosen;
    const kept = load(KEPT);
    this.#models = models;
    this.#chosen = models.find(({ id }) => id === kept) ?? models[0];
    byId("model").textContent = this.#chosen.id;
    this.#show();
    if (before?.id !== this.#chosen.id || before.state !== this.#chosen.state) this.#changed();
  }

  #show() {
    const choice = byId("model-choice");
    byId("model-field").hidden = this.#models.length < 2;
    document.body.classList.toggle("several", this.#models.length > 1); // then rows of requests name theirs
    if (choice.options.length !== this.#models.length) choice.replaceChildren(...this.#models.map(() => element("option")));
    this.#models.forEach(({ id, state }, at) => {
      const text = state === "" ? id : `${id} (${inWords(state)})`;
      if (choice.options[at].textContent !== text) choice.options[at].textContent = text;
      choice.options[at].value = id;
    });
    choice.value = this.#chosen.id;
    const said = this.#models.length < 2 ? "" : remark(this.#chosen);
    if (byId("model-remark").textContent !== said) byId("model-remark").textContent = said;
  }
}
