/** Tool calls as blocks: name, arguments, and a field for the result. */

import { button, copy, element, isComposing } from "/static/dom.js";
import { pretty } from "/static/jsontext.js";

/** The calls of one answer. */
export class ToolCallsView {
  root = element("div", { class: "calls" });
  #views = new Map();
  #button = null; // set while results are missing

  /** Shows the current state of `call`. */
  grow(call) {
    if (!this.#views.has(call)) {
      this.#views.set(call, new CallView(call));
      this.root.append(this.#views.get(call).root);
    }
    this.#views.get(call).grow();
  }

  /** Ends the calls: formats the arguments, and shows the results of a stored chat. */
  end() {
    for (const view of this.#views.values()) view.end();
  }

  /** Adds a field to each call, and a button. `chat`: {ready(): whether a request can be sent, missing(call), send()}. */
  ask(chat) {
    const views = [...this.#views.values()];
    const complete = () => {
      const empty = views.find((view) => view.typed.trim() === "");
      if (empty !== undefined) {
        empty.focus();
        chat.missing(empty.call);
      } else if (chat.ready()) {
        this.#settle((view) => view.typed);
        chat.send();
      }
    };
    for (const view of views) view.ask(complete);
    this.#button = button(views.length > 1 ? "Send results" : "Send result", complete, { class: "primary" });
    this.root.append(this.#button);
  }

  /** Takes the entered results; calls with an empty field stay without one. */
  close() {
    if (this.#button !== null) this.#settle(({ typed }) => (typed.trim() === "" ? null : typed));
  }

  #settle(resultOf) {
    for (const view of this.#views.values()) view.settle(resultOf(view));
    this.#button.remove();
    this.#button = null;
  }
}

class CallView {
  #name = element("code");
  #code = element("code");
  #field = null; // the label with its text area, while the result is missing
  #shown = 0; // characters shown of the arguments

  constructor(call) {
    this.call = call;
    const head = element("div", { class: "code-head" }, element("span", { text: "Tool call " }), this.#name);
    this.root = element("div", { class: "code call", role: "group" }, head, element("pre", { tabindex: "0" }, this.#code));
  }

  get typed() {
    return this.#area.value;
  }

  get #area() {
    return this.#field.lastElementChild;
  }

  focus() {
    this.#area.setAttribute("aria-invalid", "true");
    this.#area.focus();
  }

  grow() {
    this.#name.textContent = this.call.name;
    this.root.setAttribute("aria-label", `Call of ${this.call.name}`);
    this.#code.append(this.call.arguments.slice(this.#shown));
    this.#shown = this.call.arguments.length;
  }

  end() {
    if (this.call.result !== null) this.root.append(given(this.call.result));
    const text = pretty(this.call.arguments);
    const head = this.root.firstChild;
    if (text === null) {
      head.append(element("span", { class: "flag", text: "incomplete" }));
      return;
    }
    this.#code.textContent = text;
    head.append(button("Copy", (event) => copy(text, event.currentTarget), { class: "quiet small", "aria-label": "Copy arguments" }));
  }

  ask(complete) {
    const area = element("textarea", { rows: "2", placeholder: "What the tool returned", spellcheck: "false", enterkeyhint: "send" });
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
      event.preventDefault();
      complete();
    });
    area.addEventListener("input", () => area.removeAttribute("aria-invalid"));
    this.#field = element("label", { class: "result" }, element("span", { text: `Result of ${this.call.name}` }), area);
    this.root.append(this.#field);
  }

  /** The result to send, or null. */
  settle(result) {
    this.call.result = result;
    this.#field.remove();
    this.root.append(result === null ? element("p", { class: "note", text: "No result was entered, so this call is not sent again." }) : given(result));
  }
}

const given = (result) =>
  element("div", { class: "result" }, element("span", { text: "Result" }), element("pre", { tabindex: "0" }, element("code", { text: result })));
