/** Prefill progress of a prompt: a bar, the figures and the time left. */

import { element } from "/static/dom.js";
import { count, plural, rate } from "/static/format.js";

const SAID_EVERY_MS = 10000; // interval of announcements to screen readers

/** "about 12 s", "about 3 min"; "" if unknown. */
export function about(ms) {
  if (typeof ms !== "number" || !Number.isFinite(ms)) return "";
  if (ms < 1000) return "less than a second";
  return ms < 90000 ? `about ${count(ms / 1000)} s` : `about ${count(ms / 60000)} min`;
}

/** "reading 3,200 of 10,000 tokens, 550 tok/s, about 12 s" */
export function progressInWords({ total, cache, processed, time_ms: taken, estimated_ms: left }) {
  const waits = taken === 0 && processed === 0;
  const size = plural(total, "token");
  const read = waits ? `waiting to read ${size}` : `reading ${count(processed)} of ${size}`;
  const speed = processed > cache && taken > 0 ? `${rate((1000 * (processed - cache)) / taken)} tok/s` : "";
  return [read, cache > 0 ? `${count(cache)} from the cache` : "", speed, about(left)].filter((part) => part !== "").join(", ");
}

export class ProgressView {
  #read = element("span", { class: "read" });
  #cached = element("span", { class: "cached" });
  #bar = element("div", { class: "progress-bar", role: "progressbar", "aria-label": "Reading the prompt", "aria-valuemin": "0" }, this.#cached, this.#read);
  #words = element("p", { class: "note" });
  #say;
  #saidAt = null;

  /** `say(text)` announces to screen readers; changes of the figures themselves are not announced. */
  constructor(say) {
    this.#say = say;
    this.root = element("div", { class: "progress", "aria-live": "off" }, this.#bar, this.#words);
  }

  /** `progress`: {total, cache, processed, time_ms, estimated_ms}. */
  update(progress) {
    const { total, cache, processed } = progress;
    const share = (tokens) => `${total > 0 ? Math.min(100, (100 * tokens) / total) : 0}%`;
    const words = progressInWords(progress);
    this.#cached.style.width = share(cache);
    this.#read.style.width = share(processed - cache);
    this.#words.textContent = words;
    for (const [name, value] of Object.entries({ valuemax: total, valuenow: processed, valuetext: words })) this.#bar.setAttribute(`aria-${name}`, String(value));
    const now = performance.now();
    if (processed >= total || (this.#saidAt !== null && now - this.#saidAt < SAID_EVERY_MS)) return;
    this.#saidAt = now;
    this.#say(words);
  }
}
