/** A row of the timeline: the cached tokens of a request as a bar, cost and cause; opened, both texts. */

import { causeInWords, kindOf, SHAPES, whatHelps } from "/static/causes.js";
import { differenceInWords, marked, parts } from "/static/difference.js";
import { button, element } from "/static/dom.js";
import { count, duration, plural } from "/static/format.js";

const TIERS = ["pool", "disk", "redis"];
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

/** Segments of the bar: [[class, tokens, words], …], none empty. Unknown tiers look like redis. */
export function segments({ hit_tokens: hits, reused_span_tokens: moved, computed_tokens: computed }) {
  const found = Object.entries(hits ?? {}).map(([tier, tokens]) => [TIERS.includes(tier) ? tier : "redis", tokens, `from ${tier}`]);
  return [...found, ["span", moved, "reused at other positions"], ["computed", computed, "computed"]].filter(([, tokens]) => tokens > 0);
}

/** "16 from disk, 412 of 428 tokens computed" */
export function inFigures(one) {
  const found = segments(one).filter(([name]) => name !== "computed").map(([, tokens, words]) => `${count(tokens)} ${words}`);
  return [...found, `${count(one.computed_tokens)} of ${plural(one.prompt_tokens, "token")} computed`].join(", ");
}

export class PromptRow {
  #load;
  #goTo;
  #details;

  /** `load()`: promise of the request with its texts. `goTo(id)`: shows another row, if it is there; whether it was. */
  constructor(one, { load, goTo }) {
    this.#load = load;
    this.#goTo = goTo;
    this.cause = String(one.cause);
    this.kind = kindOf(one);
    this.seconds = one.seconds;
    this.#details = element("div", { class: "prompt-details", id: `why-${one.request_id}`, hidden: true });
    this.opener = button("", () => this.toggle(), {
      class: "quiet prompt-row", "aria-expanded": "false", "aria-controls": this.#details.id, "data-cause": this.cause,
    });
    this.opener.append(
      element("span", { class: "prompt-at", text: clock(one.at) }),
      element("span", { class: "prompt-cause" }, element("span", { class: "shape", "aria-hidden": "true", text: SHAPES[this.kind] }), causeInWords(one.cause)),
      element("span", { class: "prompt-cost" }, element("span", { class: "sr", text: "cost " }), duration(1000 * one.seconds)),
      element("span", { class: "note prompt-model" }, element("span", { class: "sr", text: "model " }), String(one.model ?? "")),
      bar(one),
      element("span", { class: "note prompt-figures", text: inFigures(one) }),
    );
    this.root = element("li", { class: `prompt ${this.kind}` }, this.opener, this.#details);
  }

  get isOpen() {
    return this.opener.getAttribute("aria-expanded") === "true";
  }

  /** Opens or closes; resolves once what is kept of the request is shown. */
  async toggle(open = !this.isOpen) {
    if (open === this.isOpen) return;
    this.opener.setAttribute("aria-expanded", String(open));
    this.#details.hidden = !open;
    if (!open) return;
    this.#details.setAttribute("aria-busy", "true");
    try {
      this.#details.replaceChildren(...this.#told(await this.#load()));
    } catch (error) {
      this.#details.replaceChildren(element("p", { class: "note", text: error.status === 404 ? "This request is no longer kept." : "The server does not answer." }));
    }
    this.#details.removeAttribute("aria-busy");
  }

  #told(one) {
    const helps = whatHelps(one.cause);
    const list = (names) => (Array.isArray(names) ? names.join(", ") : "");
    const facts = [
      ["Position", `token ${count(one.position)} of ${count(one.prompt_tokens)}${one.field ? `, in ${one.field}` : ""}`],
      ["Remedy", helps],
      ["Step share", one.step_share > 0 ? `${Math.round(100 * one.step_share)} % of the tokens of its steps` : ""],
      ["Evicted from", list(one.evicted_from)],
      ["Normalized", list(one.normalised)],
      ["Compared with", one.compared_with ? this.#link(one.compared_with) : ""],
      ["Request", element("code", { text: one.request_id })],
    ].filter(([, fact]) => fact !== "");
    return [
      element("dl", { class: "facts" }, ...facts.map(([name, fact]) => element("div", {}, element("dt", { text: name }), element("dd", {}, fact)))),
      ...texts(one),
    ];
  }

  /** The id of another request: a button where that one is in the list. */
  #link(id) {
    const go = button(id, () => { if (!this.#goTo(id)) go.disabled = true; }, { class: "link", title: "Show that request" });
    return go;
  }
}

function bar(one) {
  const shown = segments(one);
  const whole = Math.max(one.prompt_tokens, shown.reduce((sum, [, tokens]) => sum + tokens, 0));
  const made = element("span", { class: "prompt-bar", "aria-hidden": "true" });
  for (const [name, tokens] of shown) {
    const part = element("span", { class: `fill ${name}` });
    part.style.width = `${(100 * tokens) / whole}%`;
    made.append(part);
  }
  return made;
}

/** What stands at the place, and what stood there before. */
function texts({ cause, field_before: fieldBefore, text, text_before: before }) {
  if (!text && !before) return [];
  const both = before && text && before !== text;
  const captions = [`Before${fieldBefore ? `, in ${fieldBefore}` : ""}`, before === text ? "Both requests" : "This request"];
  const found = both ? parts(before, text) : [["same", before, text]];
  const said = cause === "retokenized" ? "The same text in other tokens." : differenceInWords(found);
  const figures = marked(found).map((children, side) => element("figure", {}, element("figcaption", { text: captions[side] }), element("pre", {}, ...children)));
  return [
    said === "" ? null : element("p", { class: "prompt-said", text: said }),
    element("div", { class: "prompt-texts" }, ...figures.filter((_, side) => both || (text ? side === 1 : side === 0))),
  ].filter((part) => part !== null);
}
