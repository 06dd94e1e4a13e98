/** The reasoning of an answer: plain text, folded, with its time in seconds as title. */

import { element } from "/static/dom.js";
import { count } from "/static/format.js";

export class ReasoningView {
  #title = element("span", { text: "Thinking…" });
  #clock = element("span", { class: "seconds" });
  #text = element("div", { class: "text" });
  #started = performance.now();
  #timer = setInterval(() => this.#tick(), 250);

  constructor() {
    const summary = element("summary", {}, this.#title, this.#clock);
    // Screen readers announce the log as it grows, but neither the time nor the reasoning.
    this.root = element("details", { class: "reasoning live", "aria-live": "off" }, summary, this.#text);
  }

  append(text) {
    this.#text.append(text);
  }

  /** Stops the clock; further calls have no effect. `title`: title if there is no time. */
  end(title = "") {
    if (!this.root.classList.contains("live")) return;
    clearInterval(this.#timer);
    this.root.classList.remove("live");
    const seconds = Math.round(this.#seconds());
    this.#title.textContent = title || `Thought for ${seconds === 0 ? "less than 1" : count(seconds)} s`;
    this.#clock.remove();
  }

  #seconds() {
    return (performance.now() - this.#started) / 1000;
  }

  #tick() {
    const seconds = Math.floor(this.#seconds());
    this.#clock.textContent = seconds === 0 ? "" : `${count(seconds)} s`;
  }
}
