/** The last requests of this key: what each found in the cache, what it computed, why, and the texts at that place. */

import { ApiError, request } from "/static/api.js";
import { button, byId, element } from "/static/dom.js";
import { count, duration } from "/static/format.js";

const INTERVAL_MS = 2500;
const LONGEST_PAUSE_MS = 16000;
const PATIENCE_MS = 10000;
const SHOWN = 20;

/** The causes whose names say too little. */
const WORDS = {
  none: "all from the cache",
  tail: "all but the last block",
  new_text: "new text only",
  first_seen: "nothing alike before",
  changed_text: "another text",
  tool_order: "tools in another order",
  tools: "other tools",
  thinking: "thinking left out",
  retokenized: "same text, other tokens",
};

export const causeInWords = (cause) => WORDS[cause] ?? String(cause).replaceAll("_", " ");

/** "16 from disk, 412 computed in 1.25 s" */
export function inFigures({ hit_tokens: hits, reused_span_tokens: moved, computed_tokens: computed, seconds }) {
  const found = Object.entries(hits ?? {}).filter(([, tokens]) => tokens > 0).map(([tier, tokens]) => `${count(tokens)} from ${tier}`);
  if (moved > 0) found.push(`${count(moved)} reused at other positions`);
  return [...found, `${count(computed)} computed in ${duration(1000 * seconds)}`].join(", ");
}

export class Prompts {
  #key;
  #timer = 0;
  #pause = INTERVAL_MS;
  #busy = false;
  #refused = false;
  #rows = new Map(); // by request; they stay, with what is open in them

  /** `key()`: the API key. */
  constructor(key) {
    this.#key = key;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  /** Reads now, if the list can be seen; after the key changed nothing of the other one stays. */
  wake({ otherKey = false } = {}) {
    if (otherKey) {
      this.#refused = false;
      this.#show([]);
    }
    this.#pause = INTERVAL_MS;
    this.#schedule(0);
  }

  #schedule(delay) {
    clearTimeout(this.#timer);
    const seen = document.visibilityState === "visible" && byId("prompts").checkVisibility();
    if (seen && !this.#refused) this.#timer = setTimeout(() => this.#poll(), delay);
  }

  async #poll() {
    if (this.#busy) return; // the answer under way schedules the next one
    this.#busy = true;
    const key = this.#key();
    try {
      const response = await request("/v1/requests", { key, signal: AbortSignal.timeout(PATIENCE_MS) });
      const { data, kept_seconds: kept } = await response.json();
      if (key === this.#key()) this.#show(data.slice(0, SHOWN), kept);
      this.#pause = INTERVAL_MS;
    } catch (error) {
      this.#refused = error instanceof ApiError && error.status === 401 && key === this.#key();
      this.#pause = Math.min(2 * this.#pause, LONGEST_PAUSE_MS);
    } finally {
      this.#busy = false;
    }
    this.#schedule(this.#pause);
  }

  #show(requests, kept = 1) {
    const rows = new Map(requests.map((one) => [one.request_id, this.#rows.get(one.request_id) ?? this.#row(one)]));
    const list = byId("prompts");
    for (const [id, row] of this.#rows) if (!rows.has(id)) row.remove();
    // A row that is moved would lose the keyboard.
    [...rows.values()].forEach((row, place) => { if (list.children[place] !== row) list.insertBefore(row, list.children[place] ?? null); });
    this.#rows = rows;
    const none = kept > 0 ? "None yet." : "The server keeps no requests (--request-history 0).";
    byId("prompts-note").textContent = requests.length > 0 ? "" : none;
  }

  #row(one) {
    const details = element("div", { class: "prompt-texts", id: `why-${one.request_id}`, hidden: true });
    const at = new Date(1000 * one.at).toLocaleTimeString("en-GB");
    const bar = element("span", { class: "bar-track", "aria-hidden": "true" }, element("span"));
    bar.firstChild.style.width = `${one.prompt_tokens > 0 ? 100 * (1 - one.computed_tokens / one.prompt_tokens) : 0}%`;
    const opener = button("", () => this.#toggle(one.request_id, opener, details), {
      class: "quiet prompt-row", "aria-expanded": "false", "aria-controls": details.id, "data-cause": one.cause,
    });
    opener.append(element("span", { class: "prompt-head", text: `${at} · ${causeInWords(one.cause)}` }), element("span", { class: "note", text: inFigures(one) }), bar);
    return element("li", {}, opener, details);
  }

  async #toggle(id, opener, details) {
    const open = opener.getAttribute("aria-expanded") !== "true";
    opener.setAttribute("aria-expanded", String(open));
    details.hidden = !open;
    if (!open) return;
    try {
      const response = await request(`/v1/requests/${encodeURIComponent(id)}/cache`, { key: this.#key(), signal: AbortSignal.timeout(PATIENCE_MS) });
      details.replaceChildren(...texts(await response.json()));
    } catch (error) {
      details.replaceChildren(element("p", { class: "note", text: error.status === 404 ? "This request is no longer kept." : "The server does not answer." }));
    }
  }
}

function texts({ position, field, field_before: fieldBefore, text, text_before: before, normalised, request_id: id }) {
  const where = `From token ${count(position)} on${field ? `, in ${field}` : ""}.`;
  const put = normalised?.length > 0 ? ` Put back as it was: ${normalised.join(", ")}.` : "";
  const shown = [["This request", text], [`Before${fieldBefore ? ` (${fieldBefore})` : ""}`, before]].filter(([, said]) => said);
  return [
    element("p", { class: "note", text: `${where}${put} ${id}` }),
    ...shown.map(([name, said]) => element("figure", {}, element("figcaption", { text: name }), element("pre", { text: said }))),
  ];
}
