/** A model in the list: its state, its figures, and what can be done with it. */

import { Bar } from "/static/bar.js";
import { button, element, setText } from "/static/dom.js";
import { errorBox } from "/static/errorbox.js";
import { bytes, count, duration, plural } from "/static/format.js";

const STATES = { loaded: "loaded", not_loaded: "not loaded", loading: "loading", unloading: "unloading" };
const LEAVING_MS = 20000; // how long the page says that an unloading model waits for its requests

/** The line of figures. `memory`: the model's entry of the server's memory, or undefined. */
function figuresOf({ state, fileBytes, context, format }, memory) {
  const isLoaded = state === "loaded";
  const left = memory?.unloads_in_seconds ?? null;
  return [
    isLoaded && memory?.bytes > 0 ? `${bytes(memory.bytes)} of memory` : "",
    fileBytes === null ? "" : `${bytes(fileBytes)} on disk`,
    context === null ? "" : `${plural(context, "token")} of context`,
    format,
    memory?.in_use > 0 ? `used by ${plural(memory.in_use, "request")}` : "",
    isLoaded && left !== null && !memory.in_use ? `unloads in ${duration(1000 * left)}` : "",
  ].filter((part) => part !== "").join(", ");
}

export class ModelRow {
  #model;
  #actions;
  #isBusy = false; // a request of this row is running
  #leavingUntil = 0;
  #state = element("span", { class: "state" });
  #figures = element("p", { class: "note" });
  #failure = element("p", { class: "field-error" });
  #error = element("div");
  #bar;
  #use;
  #load;
  #remove;

  /** `actions`: {use(id), load(id), unload(id), done(), remove(id, fileBytes)}; load and unload return promises. */
  constructor(model, actions) {
    const { id } = model;
    this.#actions = actions;
    this.#bar = new Bar(`Loading ${id}`);
    this.#use = button("Use in chat", () => actions.use(id), { class: "small", "aria-label": `Use ${id} in chat` });
    this.#load = button("Load", () => this.#change(), { class: "small" });
    this.#remove = button("Delete", () => actions.remove(id, this.#model.fileBytes), { class: "quiet small", "aria-label": `Delete ${id}` });
    const head = element("div", { class: "model-head" }, element("span", { class: "model-name", text: id }), this.#state);
    this.root = element("li", { class: "model-row" }, head, this.#figures, this.#failure, this.#bar.root, this.#error);
    this.root.append(element("div", { class: "buttons" }, this.#use, this.#load, this.#remove));
  }

  /** `context`: {isChosen, mayDelete, seconds: how long it has been loading, memory: see figuresOf}. */
  update(model, { isChosen, mayDelete, seconds, memory }) {
    this.#model = model;
    const { id, state, failure, managed, unloadable } = model;
    if (state !== "loaded") this.#leavingUntil = 0;
    setText(this.#state, STATES[state] ?? state);
    this.#state.dataset.state = state;
    setText(this.#figures, figuresOf(model, memory));
    const isLeaving = state === "loaded" && performance.now() < this.#leavingUntil;
    setText(this.#failure, failure);
    this.#bar.root.hidden = state !== "loading" && state !== "unloading" && !isLeaving;
    if (isLeaving) this.#bar.show(null, "waits until no request uses the model");
    else this.#bar.show(null, [seconds > 0 ? `${count(seconds)} s` : "", memory?.waits_for ?? ""].filter((part) => part !== "").join(", "));
    this.#use.setAttribute("aria-pressed", String(isChosen));
    const isLoaded = state === "loaded";
    this.#load.hidden = isLoaded ? !unloadable : state === "";
    const verb = isLoaded ? "Unload" : "Load";
    setText(this.#load, verb);
    this.#load.setAttribute("aria-label", `${verb} ${id}`);
    // Not `disabled`, which would lose the keyboard focus.
    this.#load.setAttribute("aria-disabled", String(this.#isBusy || isLeaving || !["loaded", "not_loaded"].includes(state)));
    this.#remove.hidden = !(managed && mayDelete);
  }

  /** Shows an error of an action, or with null none. */
  showError(error) {
    this.#error.replaceChildren(...(error === null ? [] : [errorBox(error)]));
  }

  async #change() {
    if (this.#load.getAttribute("aria-disabled") === "true") return;
    const { id, state } = this.#model;
    this.#isBusy = true;
    this.#load.setAttribute("aria-disabled", "true");
    this.showError(null);
    if (state === "loaded") this.#leavingUntil = performance.now() + LEAVING_MS;
    try {
      await (state === "loaded" ? this.#actions.unload(id) : this.#actions.load(id));
    } catch (error) {
      this.#leavingUntil = 0;
      this.showError(error);
    }
    this.#isBusy = false;
    this.#actions.done();
  }
}
