/** The models of the server and the one in use, read again while their states may change. */

import { ApiError, readJsonFrom } from "/static/api.js";
import { inWords } from "/static/format.js";
import { load, save } from "/static/storage.js";

const INTERVAL_MS = 2500;
const SHORT_INTERVAL_MS = 1000; // while models change
const HURRY_MS = 20000; // how long a change is awaited
const LONGEST_PAUSE_MS = 16000;
const STORAGE_KEY = "model";
const KEY_NEEDED = "API key needed"; // the list is read again with another key
const FIXED = { allowed: false, reason: "" };

/**
 * The models of /v1/models by first name: [{id, state, failure, sampling, managed, unloadable, fileBytes, context,
 * format}]; `state` is "" and the figures are null if unknown.
 */
export function different(listed) {
  const roots = new Set();
  const found = [];
  for (const one of listed) {
    const { id, root = id } = one;
    if (!roots.has(root)) found.push(described(one));
    roots.add(root);
  }
  return found;
}

function described({ id, state = "", failure = null, sampling = null, managed, unloadable, file_bytes: fileBytes = null, max_model_len: context = null, meta = null, approximations = [] }) {
  return {
    id: String(id),
    state: String(state),
    failure: failure === null ? "" : String(failure),
    sampling: sampling ?? {},
    managed: managed === true,
    unloadable: unloadable === true,
    fileBytes,
    context,
    format: meta === null ? "" : [`${meta.dtype}, ${meta.runner} runner`, ...inWords(approximations)].join(", "),
  };
}

const isActive = ({ state }) => state === "loading" || state === "unloading";

export class Models {
  all = [];
  chosen = null;
  changes = FIXED; // {allowed, reason}: whether models may be added and deleted
  memory = null; // memory of all models, or null if this API key may not see it
  problem = ""; // why the list could not be read
  #key;
  #listeners = [];
  #since = new Map(); // model -> time at which the page saw it loading
  #timer = 0;
  #pause = INTERVAL_MS;
  #hurryUntil = 0;
  #begun = 0; // number of reads so far
  #latest = 0; // the latest read that has ended

  /** `key()`: the API key. */
  constructor(key) {
    this.#key = key;
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  /** `listener(whether the model in use or its state is another)` is called after each change. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  /** True if the model in use is loaded, so that its pool can be shown. */
  get isLoaded() {
    return this.chosen === null || ["", "loaded"].includes(this.chosen.state);
  }

  /** The query that selects the model; "" if there is only one. */
  get query() {
    return this.chosen !== null && this.all.length > 1 ? `?model=${encodeURIComponent(this.chosen.id)}` : "";
  }

  /** Default values of the sampling parameters; {} until they are known. */
  get sampling() {
    return this.chosen?.sampling ?? {};
  }

  /** Uses the model `id` from now on. */
  choose(id) {
    save(STORAGE_KEY, id);
    this.#choose();
  }

  /** Seconds since the page saw the model loading. */
  loadingSeconds(id) {
    return this.#since.has(id) ? Math.floor((performance.now() - this.#since.get(id)) / 1000) : 0;
  }

  /** Promise of the name of the model in use; rejects with ApiError. */
  async name() {
    return this.chosen?.id ?? this.find();
  }

  /** Promise of the name of the model in use, read from the server. */
  async find() {
    this.chosen = null;
    await this.#read();
    return this.chosen?.id ?? this.find(); // null if the key was changed meanwhile
  }

  /** Reads the list again; errors are kept in `problem`. */
  async refresh() {
    await this.#read().catch(() => {});
  }

  /** Reads again now, and for a while more often, because a model is about to change. */
  hurry() {
    this.#hurryUntil = performance.now() + HURRY_MS;
    return this.refresh();
  }

  async #read() {
    const key = this.#key();
    this.#begun += 1;
    const number = this.#begun;
    try {
      const answer = await readJsonFrom("/v1/models", key);
      if (!this.#isLatest(number)) return;
      if (key === this.#key()) this.#take(answer);
      this.#pause = INTERVAL_MS;
    } catch (error) {
      if (this.#isLatest(number)) this.#report(error);
      throw error;
    } finally {
      this.#schedule();
    }
  }

  /** Returns whether no later read than `number` has ended. If one has, the answer is outdated. */
  #isLatest(number) {
    this.#latest = Math.max(this.#latest, number);
    return this.#latest === number;
  }

  #report(error) {
    this.#pause = Math.min(2 * this.#pause, LONGEST_PAUSE_MS);
    this.problem = error.status === 401 ? KEY_NEEDED : "server not responding";
    this.#tell(false);
  }

  /** Reads again while the page is visible, if anything may change. */
  #schedule() {
    clearTimeout(this.#timer);
    const isFixed = this.all.length < 2 && this.all.every(({ state }) => state === "" || state === "loaded") && !this.changes.allowed;
    const isFinal = this.problem === "" ? isFixed : this.problem === KEY_NEEDED;
    if (isFinal || document.visibilityState !== "visible") return;
    const hurries = this.all.some(isActive) || performance.now() < this.#hurryUntil;
    this.#timer = setTimeout(() => this.refresh(), hurries && this.#pause === INTERVAL_MS ? SHORT_INTERVAL_MS : this.#pause);
  }

  #take({ data, changes, memory }) {
    const listed = different(data);
    if (listed.length === 0) throw new ApiError("The server has no models.");
    this.all = listed;
    this.changes = { ...FIXED, ...changes };
    this.memory = memory ?? null;
    this.problem = "";
    for (const one of listed) {
      if (!isActive(one)) this.#since.delete(one.id);
      else if (!this.#since.has(one.id)) this.#since.set(one.id, performance.now());
    }
    this.#choose();
  }

  #choose() {
    const before = this.chosen;
    const kept = load(STORAGE_KEY);
    this.chosen = this.all.find(({ id }) => id === kept) ?? this.all[0] ?? null;
    this.#tell(before?.id !== this.chosen?.id || before?.state !== this.chosen?.state);
  }

  #tell(isOther) {
    for (const listener of this.#listeners) listener(isOther);
  }
}
