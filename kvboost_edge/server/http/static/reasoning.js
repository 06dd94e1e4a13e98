/** The reasoning of an answer: folded, plain text, under its time in seconds. */

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
    // The page's log is read out as it grows: neither the count nor the thoughts are.
    this.root = element("details", { class: "reasoning live", "aria-live": "off" }, summary, this.#text);
  }

  append(text) {
    this.#text.append(text);
  }

  /** Nothing follows; the count stands still. To call it again changes nothing. `title`: where no time was taken. */
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
