/** The model in use: its name in the page's head, and the choice with its progress in the chat's head. */

import { Bar } from "/static/bar.js";
import { byId, element, setText } from "/static/dom.js";
import { count } from "/static/format.js";
import { loadModel } from "/static/modelactions.js";

const inWords = (state) => state.replaceAll("_", " ");

/** The remark below the choice; "" for a loaded model. */
export function remark({ state, failure }) {
  if (state === "" || state === "loaded") return "";
  if (state === "loading") return "This model is being loaded.";
  const next = "Your next message loads it.";
  return failure === "" ? `This model is not loaded. ${next}` : `This model could not be loaded: ${failure}`;
}

export class ModelPicker {
  #models;
  #key;
  #failed = { id: "", error: "" }; // why a model could not be loaded, if the server's list does not say it
  #bar = new Bar("Loading the model");

  /** `models`: Models. `key()`: the API key. */
  constructor(models, key) {
    this.#models = models;
    this.#key = key;
    byId("model-choice").addEventListener("change", (event) => models.choose(event.target.value));
    byId("model-load").addEventListener("click", () => this.#load());
    byId("model-progress").append(this.#bar.root);
    models.listen((isOther) => this.#show(isOther));
  }

  async #load() {
    const { id } = this.#models.chosen;
    byId(byId("model-field").hidden ? "prompt" : "model-choice").focus(); // the button is about to be hidden
    const loading = loadModel(id, this.#key());
    this.#models.hurry();
    try {
      await loading;
    } catch (error) {
      this.#failed = { id, error: error.detail || error.message };
    }
    this.#models.hurry();
  }

  #show(isOther) {
    const { all, chosen, problem } = this.#models;
    if (isOther) this.#failed = { id: "", error: "" };
    byId("model").textContent = chosen?.id ?? (problem || "connecting…");
    byId("model").classList.toggle("warn", chosen === null && problem !== "");
    byId("model-field").hidden = all.length < 2;
    document.body.classList.toggle("several", all.length > 1); // then rows of requests name theirs
    if (chosen === null) return;
    this.#showChoice(all, chosen.id);
    setText(byId("model-remark"), chosen.failure === "" && this.#failed.id === chosen.id ? this.#failed.error : remark(chosen));
    byId("model-load").hidden = chosen.state !== "not_loaded";
    this.#showProgress(chosen);
  }

  #showChoice(all, chosen) {
    const choice = byId("model-choice");
    if (choice.options.length !== all.length) choice.replaceChildren(...all.map(() => element("option")));
    all.forEach(({ id, state }, at) => {
      setText(choice.options[at], state === "" ? id : `${id} (${inWords(state)})`);
      choice.options[at].value = id;
    });
    choice.value = chosen;
  }

  #showProgress({ id, state }) {
    byId("model-progress").hidden = state !== "loading";
    const seconds = this.#models.loadingSeconds(id);
    const waits = this.#models.memory?.data?.find((one) => one.id === id)?.waits_for ?? "";
    this.#bar.show(null, [seconds > 0 ? `${count(seconds)} s` : "", waits].filter((part) => part !== "").join(", "));
  }
}
