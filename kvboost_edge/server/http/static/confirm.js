/** The question before an action that cannot be undone. */

import { setUpDialog, showDialog } from "/static/dialog.js";
import { byId } from "/static/dom.js";

export class Confirmation {
  #dialog = setUpDialog(byId("confirm"));
  #action = () => {};

  constructor() {
    byId("confirm-action").addEventListener("click", () => {
      this.#dialog.close();
      this.#action();
    });
  }

  /** Asks; `action()` is called if the answer is `verb`. */
  ask({ title, text, verb }, action) {
    byId("confirm-title").textContent = title;
    byId("confirm-text").textContent = text;
    byId("confirm-action").textContent = verb;
    this.#action = action;
    showDialog(this.#dialog);
  }
}
