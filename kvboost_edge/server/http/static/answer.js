/** A growing answer: plain text, and fenced code as blocks. Text nodes only. */

import { button, copy, element } from "/static/dom.js";
import { beginning } from "/static/format.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const MAYBE_FENCE = /^ {0,3}(`{1,2}|~{1,2}|(`{3,}|~{3,})[^`]*)$/; // a line that is not complete yet

export class AnswerView {
  #root;
  #tail = document.createTextNode(""); // the line that is not complete yet
  #line = "";
  #fence = ""; // the marks that opened the code block we are in, or ""
  #indent = 0; // spaces before these marks, which its lines have too
  #into = null; // the element that takes the next line; null: none yet after the last block
  #breaks = ""; // held back until a line follows: at the end of a text they would only be a gap

  /** Everything is appended to `root`. */
  constructor(root) {
    this.#root = root;
  }

  append(text) {
    const lines = (this.#line + text).split("\n");
    this.#line = lines.pop();
    this.#tail.remove();
    for (const line of lines) this.#commit(line);
    if (this.#line !== "" && !MAYBE_FENCE.test(this.#line)) {
      this.#tail.data = this.#breaks + this.#unindented(this.#line);
      this.#target().append(this.#tail);
    }
  }

  /** Ends the last line, which has no line break. */
  end() {
    this.#tail.remove();
    if (this.#line !== "") this.#commit(this.#line);
    this.#line = "";
  }

  #commit(line) {
    const match = FENCE.exec(line.trimEnd());
    if (match !== null && this.#fence === "") {
      this.#indent = match[1].length;
      this.#fence = match[2];
      this.#openCode(match[3].trim());
    } else if (match !== null && match[3] === "" && match[2].startsWith(this.#fence)) {
      this.#indent = 0;
      this.#fence = "";
      this.#startBlock(null);
    } else if (line !== "" || this.#fence !== "") {
      this.#target().append(this.#breaks + this.#unindented(line));
      this.#breaks = "\n";
    } else if (this.#into !== null) {
      this.#breaks += "\n";
    }
  }

  #unindented(line) {
    const spaces = /^ */.exec(line)[0].length;
    return line.slice(Math.min(this.#indent, spaces));
  }

  #startBlock(into) {
    this.#into = into;
    this.#breaks = "";
  }

  #target() {
    if (this.#into === null) {
      this.#startBlock(element("div", { class: "text" }));
      this.#root.append(this.#into);
    }
    return this.#into;
  }

  #openCode(language) {
    const code = element("code");
    const head = element("div", { class: "code-head" }, element("span", { text: beginning(language, 40) || "code" }));
    head.append(button("Copy", (event) => copy(code.textContent, event.currentTarget), { class: "quiet small", "aria-label": "Copy code" }));
    this.#root.append(element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, code)));
    this.#startBlock(code);
  }
}
