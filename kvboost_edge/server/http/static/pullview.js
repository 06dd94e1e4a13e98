/** The download of a model: its progress, its end, its error. */

import { Bar } from "/static/bar.js";
import { button, element } from "/static/dom.js";
import { errorBox } from "/static/errorbox.js";
import { pullInWords, shareOf } from "/static/pulls.js";

export class PullView {
  #pulls;
  #actions;
  #root;
  #shown = null; // the shown download and its state
  #state = "";
  #bar = null;

  /** `root`: an empty element. `actions`: {use(name): the model is to be used}. */
  constructor(root, pulls, actions) {
    this.#root = root;
    this.#pulls = pulls;
    this.#actions = actions;
    pulls.listen(() => this.#update());
  }

  #update() {
    const pull = this.#pulls.current;
    if (pull !== this.#shown || pull?.state !== this.#state) this.#build(pull);
    if (this.#bar !== null) this.#bar.show(shareOf(pull), pullInWords(pull, performance.now()));
  }

  #build(pull) {
    this.#shown = pull;
    this.#state = pull?.state ?? "";
    this.#bar = null;
    this.#root.hidden = pull === null;
    this.#root.replaceChildren();
    if (pull === null) return;
    const name = element("b", { class: "name", text: pull.name });
    if (pull.state === "running") {
      this.#bar = new Bar(`Downloading ${pull.name}`);
      this.#root.append(element("p", {}, "Downloading ", name), this.#bar.root, this.#buttons(button("Cancel", () => this.#pulls.stop(), { class: "small" })));
    } else if (pull.state === "done") {
      const use = button("Use in chat", () => {
        this.#pulls.dismiss();
        this.#actions.use(pull.name);
      }, { class: "small" });
      this.#root.append(element("p", {}, name, " was added."), this.#buttons(use, this.#dismiss()));
    } else if (pull.state === "stopped") {
      const text = " was cancelled. The server keeps the downloaded part and continues when you add the model again.";
      this.#root.append(element("p", {}, "The download of ", name, text), this.#buttons(this.#dismiss()));
    } else {
      this.#root.append(element("p", {}, name, " was not added."), errorBox(pull.error), this.#buttons(button("Try again", () => this.#pulls.start(pull.name), { class: "small" }), this.#dismiss()));
    }
  }

  #buttons(...buttons) {
    return element("div", { class: "buttons" }, ...buttons);
  }

  #dismiss() {
    return button("Dismiss", () => this.#pulls.dismiss(), { class: "quiet small" });
  }
}
