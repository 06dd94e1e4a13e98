/** A row of the timeline: cached tokens as a bar, cost and cause; if open, both texts. */

import { causeOf, hasPosition, kindOf, SHAPES, whatHelps } from "/static/causes.js";
import { differenceInWords, marked, parts } from "/static/difference.js";
import { button, element } from "/static/dom.js";
import { count, duration, plural } from "/static/format.js";

const TIERS = ["pool", "disk", "redis"];
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

/** Segments of the bar that are not empty: [[class, tokens, words], …]. Unknown tiers look like redis. */
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

  /** `load()`: promise of the request with its texts. `goTo(id)`: shows another row; returns false if it is not listed. */
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
      element("span", { class: "prompt-cause" }, element("span", { class: "shape", "aria-hidden": "true", text: SHAPES[this.kind] }), causeOf(one)),
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

  /** Opens or closes; resolves once the details are shown. */
  async toggle(open = !this.isOpen) {
    if (open === this.isOpen) return;
    this.opener.setAttribute("aria-expanded", String(open));
    this.#details.hidden = !open;
    if (!open) return;
    this.#details.setAttribute("aria-busy", "true");
    try {
      this.#details.replaceChildren(...this.#told(await this.#load()));
    } catch (error) {
      this.#details.replaceChildren(element("p", { class: "note", text: error.status === 404 ? "This request is no longer kept." : error.message }));
    }
    this.#details.removeAttribute("aria-busy");
  }

  #told(one) {
    const helps = whatHelps(one.cause);
    const list = (names) => (Array.isArray(names) ? names.join(", ") : "");
    const facts = [
      ["Position", hasPosition(one) ? `token ${count(one.position)} of ${count(one.prompt_tokens)}${one.field ? `, in ${one.field}` : ""}` : ""],
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

  /** The id of another request, as a button that opens it if it is listed. */
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

/** The texts of both requests at the position. */
function texts({ cause, field_before: fieldBefore, text, text_before: before }) {
  if (!text && !before) return [];
  const both = before && text && before !== text;
  const captions = [`Earlier request${fieldBefore ? `, in ${fieldBefore}` : ""}`, before === text ? "Both requests" : "This request"];
  const found = both ? parts(before, text) : [["same", before, text]];
  const said = cause === "retokenized" ? "The same text as different tokens." : differenceInWords(found);
  const figures = marked(found).map((children, side) => element("figure", {}, element("figcaption", { text: captions[side] }), element("pre", {}, ...children)));
  return [
    said === "" ? null : element("p", { class: "prompt-said", text: said }),
    element("div", { class: "prompt-texts" }, ...figures.filter((_, side) => both || (text ? side === 1 : side === 0))),
  ].filter((part) => part !== null);
}
