/** The recent requests of an API key as a timeline. */

import { readJsonFrom } from "/static/api.js";
import { CAUSES, causeInWords, SHAPES } from "/static/causes.js";
import { button, byId, element, keepRows, setText } from "/static/dom.js";
import { count, duration, percent } from "/static/format.js";
import { Poller } from "/static/poller.js";
import { PromptRow } from "/static/promptrow.js";

const INTERVAL_MS = 2500;
const NEIGHBOURS = { ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity };

const sum = (values) => values.reduce((total, value) => total + value, 0);

export class Prompts {
  #key;
  #poller = new Poller(INTERVAL_MS, () => byId("prompts").checkVisibility() && !this.#refused, () => this.#read());
  #refused = false;
  #rows = new Map(); // by request; kept, so that open rows stay open
  #chips = new Map(); // by cause, in the order of CAUSES
  #only = ""; // the selected cause, "" for all
  #wanted = { id: "", lists: 0 }; // a request to open if one of the next lists has it

  /** `key()`: the API key. */
  constructor(key) {
    this.#key = key;
    for (const cause of Object.keys(CAUSES)) this.#chip(cause);
    byId("prompts").addEventListener("keydown", (event) => this.#move(event));
  }

  /** Reads now if the list is visible; a new key clears the list. */
  wake({ otherKey = false } = {}) {
    if (otherKey) {
      this.#refused = false;
      this.#only = "";
      this.#show([]);
    }
    this.#poller.wake();
  }

  /** Opens a request, now or when the server lists it. */
  open(id) {
    this.#wanted = { id, lists: 2 };
    this.#only = "";
    this.#filter();
    this.#goTo(id);
    this.wake();
  }

  async #read() {
    const key = this.#key();
    try {
      const { data, kept_seconds: kept } = await readJsonFrom("/v1/requests", key);
      if (key === this.#key()) this.#show(data, kept);
      this.#say("live", false);
      return true;
    } catch (error) {
      this.#refused = error.status === 401 && key === this.#key();
      this.#say(this.#refused ? "API key needed" : error.status > 0 ? `status ${error.status}, retrying` : "not reachable, retrying", true);
      return false;
    }
  }

  #say(text, wrong) {
    const state = byId("prompts-state");
    setText(state, text);
    state.classList.toggle("warn", wrong);
  }

  #show(requests, kept = 1) {
    const rows = new Map(requests.map((one) => [one.request_id, this.#rows.get(one.request_id) ?? this.#row(one)]));
    keepRows(byId("prompts"), rows.values());
    this.#rows = rows;
    const none = kept > 0 ? "None yet." : "The server does not record requests (--request-history 0).";
    byId("prompts-note").textContent = requests.length > 0 ? overall(requests) : none;
    byId("prompts-legend").hidden = requests.length === 0;
    this.#filter();
    this.#draw();
    if (this.#wanted.lists-- > 0) this.#goTo(this.#wanted.id);
  }

  #row(one) {
    const id = one.request_id;
    return new PromptRow(one, {
      load: () => readJsonFrom(`/v1/requests/${encodeURIComponent(id)}/cache`, this.#key()),
      goTo: (other) => this.#goTo(other),
    });
  }

  /** Opens and focuses the row of a request; returns false if it is not listed. */
  #goTo(id) {
    const row = this.#rows.get(id);
    if (row === undefined) return false;
    this.#wanted.lists = 0;
    this.#only = row.root.hidden ? "" : this.#only;
    this.#filter();
    row.toggle(true);
    row.opener.focus();
    row.root.scrollIntoView({ block: "nearest" });
    return true;
  }

  /** Up, Down, Home and End move between rows; Escape closes the focused row. */
  #move(event) {
    const rows = [...this.#rows.values()].filter(({ root }) => !root.hidden);
    const at = rows.findIndex(({ root }) => root.contains(event.target));
    if (at === -1 || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape" && rows[at].isOpen) {
      event.stopPropagation();
      rows[at].toggle(false);
      rows[at].opener.focus();
    } else if (event.key in NEIGHBOURS && event.target === rows[at].opener) {
      event.preventDefault();
      rows[Math.max(0, Math.min(rows.length - 1, at + NEIGHBOURS[event.key]))].opener.focus();
    }
  }

  /** Columns of seconds, oldest first; the rows have the same figures as text. */
  #draw() {
    const rows = [...this.#rows.values()].reverse();
    const most = Math.max(...rows.map(({ seconds }) => seconds), 1e-9);
    byId("prompts-chart").hidden = rows.length < 2;
    byId("prompts-most").textContent = `highest ${duration(1000 * most)}`;
    byId("prompts-columns").replaceChildren(...rows.map((row) => {
      const column = element("span", { class: `column ${row.kind}` }, element("span"));
      column.firstChild.style.height = `${(100 * row.seconds) / most}%`;
      column.classList.toggle("out", row.root.hidden);
      return column;
    }));
  }

  #chip(cause) {
    const made = button("", () => {
      this.#only = this.#only === cause ? "" : cause;
      this.#filter();
      this.#draw();
    }, { class: "chip", "aria-pressed": "false", "data-cause": cause, hidden: true });
    this.#chips.set(cause, made);
    byId("prompts-causes").append(made);
  }

  /** Shows the rows of the selected cause, and count and cost of each cause. */
  #filter() {
    const rows = [...this.#rows.values()];
    for (const { cause, root } of rows) {
      if (!this.#chips.has(cause)) this.#chip(cause);
      root.hidden = this.#only !== "" && cause !== this.#only;
    }
    for (const [cause, chip] of this.#chips) {
      const found = rows.filter((row) => row.cause === cause);
      const kind = Object.keys(SHAPES).find((one) => found.some((row) => row.kind === one)) ?? "plain"; // the most important one
      chip.classList.toggle("look", kind === "look");
      const text = `${SHAPES[kind]} ${count(found.length)} × ${causeInWords(cause)}, ${duration(1000 * sum(found.map(({ seconds }) => seconds)))}`;
      setText(chip, text);
      chip.setAttribute("aria-pressed", String(cause === this.#only));
      chip.hidden = found.length === 0 && cause !== this.#only;
    }
  }
}

/** "12 requests: 90 % of 10,000 prompt tokens from the cache, the rest computed in 1.25 s." */
function overall(requests) {
  const whole = sum(requests.map((one) => one.prompt_tokens));
  const computed = sum(requests.map((one) => one.computed_tokens));
  const seconds = sum(requests.map((one) => one.seconds));
  const number = requests.length === 1 ? "One request" : `${count(requests.length)} requests`;
  return `${number}: ${percent(whole > 0 ? 1 - computed / whole : 0)} of ${count(whole)} prompt tokens from the cache, the rest computed in ${duration(1000 * seconds)}.`;
}
