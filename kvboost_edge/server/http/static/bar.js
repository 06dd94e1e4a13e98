/** A progress bar with words below it. */

import { element } from "/static/dom.js";

export class Bar {
  #fill = element("span");
  #bar;
  #words = element("p", { class: "note" });

  /** `label`: the bar's name for screen readers, which do not announce its changes. */
  constructor(label) {
    this.#bar = element("div", { class: "progress-bar", role: "progressbar", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100" }, this.#fill);
    this.root = element("div", { class: "bar-with-words", "aria-live": "off" }, this.#bar, this.#words);
  }

  /** `share`: 0 to 1, or null if it is unknown; the bar then moves to and fro. */
  show(share, words) {
    this.#bar.classList.toggle("unknown", share === null);
    this.#fill.style.width = share === null ? "" : `${100 * share}%`;
    if (share === null) this.#bar.removeAttribute("aria-valuenow");
    else this.#bar.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    this.#bar.setAttribute("aria-valuetext", words);
    this.#words.textContent = words;
  }
}
