/** The models of the server: load, unload, add and delete them, as far as this API key may. */

import { byId, keepRows, setText } from "/static/dom.js";
import { bytes } from "/static/format.js";
import { deleteModel, loadModel, unloadModel } from "/static/modelactions.js";
import { ModelRow } from "/static/modelrow.js";
import { PullView } from "/static/pullview.js";

const MAX_MODEL_NAME = 200; // characters

export class ModelsView {
  #models;
  #pulls;
  #key;
  #confirmation;
  #rows = new Map(); // by model; kept, so that the keyboard focus stays

  /** `models`: Models. `pulls`: Pulls. `key()`: the API key. `confirmation`: a Confirmation. */
  constructor(models, pulls, key, confirmation) {
    this.#models = models;
    this.#pulls = pulls;
    this.#key = key;
    this.#confirmation = confirmation;
    new PullView(byId("pull-view"), pulls, { use: (name) => this.use(name) });
    byId("pull-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#add();
    });
    byId("pull-name").addEventListener("input", () => this.#complain(""));
    models.listen(() => this.#show());
    pulls.listen(() => this.#pullChanged());
  }

  /** Uses a model, whose name may have Ollama's tag, in the chat. Reads the list again if it is not in it yet. */
  async use(name) {
    const isNamed = ({ id }) => id === name || `${id}:latest` === name;
    if (!this.#models.all.some(isNamed)) await this.#models.refresh();
    const found = this.#models.all.find(isNamed);
    if (found !== undefined) this.#models.choose(found.id);
  }

  #add() {
    const name = byId("pull-name").value.trim();
    if (name === "") this.#complain("Enter the name of a model.");
    else if (name.length > MAX_MODEL_NAME) this.#complain(`The name is longer than ${MAX_MODEL_NAME} characters.`);
    else if (this.#pulls.isRunning) this.#complain("Another model is being downloaded. Wait until it is complete, or cancel it.");
    else this.#pulls.start(name);
  }

  #complain(text) {
    byId("pull-error").textContent = text;
    byId("pull-name").setAttribute("aria-invalid", String(text !== ""));
    if (text !== "") byId("pull-name").focus();
  }

  #pullChanged() {
    const { name, state } = this.#pulls.current ?? {};
    if (state !== "running") this.#complain(""); // about the running download
    if (state !== "done") return;
    if (byId("pull-name").value.trim() === name) byId("pull-name").value = "";
    this.#models.refresh();
  }

  #show() {
    const { all, chosen, changes, memory, problem } = this.#models;
    setText(byId("models-state"), problem || (chosen === null ? "waiting for the server" : "live"));
    byId("models-state").classList.toggle("warn", problem !== "");
    setText(byId("models-memory"), memory === null ? "" : `Loaded models use ${bytes(memory.taken_bytes)} of ${bytes(memory.max_bytes)} of memory.`);
    const known = chosen !== null;
    byId("pull-form").hidden = !known || !changes.allowed;
    byId("models-closed").hidden = !known || changes.allowed;
    setText(byId("models-closed"), `Models cannot be added or deleted here${changes.reason ? `: ${changes.reason}` : "."}`);
    this.#showRows(all);
  }

  #showRows(all) {
    const rows = new Map(all.map((model) => [model.id, this.#rows.get(model.id) ?? this.#row(model)]));
    keepRows(byId("model-list"), rows.values());
    this.#rows = rows;
    const { chosen, changes, memory } = this.#models;
    for (const model of all) {
      rows.get(model.id).update(model, {
        isChosen: model.id === chosen?.id,
        mayDelete: changes.allowed,
        seconds: this.#models.loadingSeconds(model.id),
        memory: memory?.data?.find(({ id }) => id === model.id),
      });
    }
  }

  #row(model) {
    return new ModelRow(model, {
      use: (id) => this.use(id),
      load: (id) => this.#changing(loadModel(id, this.#key())),
      unload: (id) => this.#changing(unloadModel(id, this.#key())),
      done: () => this.#models.hurry(),
      remove: (id, fileBytes) => this.#remove(id, fileBytes),
    });
  }

  /** Reads the states while a request runs; returns its promise. */
  #changing(running) {
    this.#models.hurry();
    return running;
  }

  #remove(id, fileBytes) {
    const files = fileBytes === null ? "" : ` Its files (${bytes(fileBytes)}) are deleted from the server's disk, unless another model uses them.`;
    this.#confirmation.ask({ title: "Delete this model?", text: `The server will no longer serve ${id}.${files}`, verb: "Delete" }, async () => {
      const row = this.#rows.get(id);
      row?.showError(null);
      try {
        await deleteModel(id, this.#key());
        byId("models-title").focus(); // the row is about to go
      } catch (error) {
        row?.showError(error);
      }
      this.#models.refresh();
    });
  }
}
