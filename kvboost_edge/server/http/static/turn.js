/** A turn on the page: the question and its answers. */

import { AnswerView } from "/static/answer.js";
import { element } from "/static/dom.js";
import { errorBox } from "/static/errorbox.js";
import { ProgressView } from "/static/progress.js";
import { ReasoningView } from "/static/reasoning.js";
import { ToolCallsView } from "/static/toolcalls.js";

export class TurnView {
  #last = null;

  constructor(question) {
    const asked = element("article", { class: "question", "aria-label": "Your message" }, element("div", { class: "text", text: question }));
    this.root = element("div", { class: "turn running" }, asked);
  }

  /** Adds the view of `step`; `shown()` is called when the page has grown. */
  begin(step, shown) {
    this.root.className = "turn running";
    this.#last = new StepView(step, shown);
    this.root.append(this.#last.root);
    return this.#last;
  }

  /** Marks the turn with the state of its last answer. */
  mark(state) {
    this.root.className = `turn ${state}`;
  }

  takeLast() {
    this.#last.root.remove();
  }

  /** Stops waiting for results. */
  close() {
    this.#last.close();
  }
}

/** One answer: reasoning, text, tool calls, figures. Updated at most once per frame. */
class StepView {
  #step;
  #shown;
  #body = element("div", { class: "answer-body" });
  #text = new AnswerView(this.#body);
  #reasoning = null;
  #calls = new ToolCallsView();
  #progress = null; // until the first token
  #lengths = { reasoning: 0, answer: 0 }; // lengths of the shown texts
  #frame = 0;

  constructor(step, shown) {
    this.#step = step;
    this.#shown = shown;
    this.root = element("article", { class: "answer", "aria-label": "Answer", "aria-busy": "true" }, this.#body);
  }

  /** Shows the progress of the prompt, see ProgressView. */
  read(progress, say) {
    if (this.#progress === null) {
      if (progress.processed >= progress.total) return; // computed at once: a bar would only flash
      this.#progress = new ProgressView(say);
      this.root.prepend(this.#progress.root);
      this.#shown();
    }
    this.#progress.update(progress);
  }

  /** Shows new content of the step. */
  update() {
    this.#endProgress();
    const { reasoning, answer, calls } = this.#step;
    if (reasoning !== "" && this.#reasoning === null) this.#beginReasoning();
    if (answer !== "" || calls.length > 0) this.#reasoning?.end();
    if (this.#frame !== 0) return;
    this.#frame = requestAnimationFrame(() => {
      this.#flush();
      this.#shown();
    });
  }

  /** Ends the answer. `failure`: an error to show, or null. */
  finish(figures, failure) {
    this.#endProgress();
    cancelAnimationFrame(this.#frame);
    this.#flush();
    this.#reasoning?.end();
    this.#text.end();
    this.#calls.end();
    this.root.removeAttribute("aria-busy");
    if (figures.childNodes.length > 0) this.root.append(figures);
    if (failure !== null) this.root.append(errorBox(failure));
  }

  /** Shows a whole step that has ended. `note`: why it is not complete, or ""; `failure`: an error to show below it, or null. */
  restore(note, failure = null) {
    if (this.#step.reasoning !== "") {
      this.#beginReasoning();
      this.#reasoning.end("Reasoning");
    }
    this.update();
    this.finish(element("div", { class: "figures" }, note === "" ? null : element("span", { class: "flag", text: note })), failure);
  }

  /** Asks for the results of the calls: see ToolCallsView. */
  ask(chat) {
    this.#calls.ask(chat);
  }

  close() {
    this.#calls.close();
  }

  note(text) {
    this.root.append(element("p", { class: "note", text }));
  }

  #beginReasoning() {
    this.#reasoning = new ReasoningView();
    this.root.prepend(this.#reasoning.root);
  }

  #endProgress() {
    this.#progress?.root.remove();
    this.#progress = null;
  }

  #flush() {
    this.#frame = 0;
    const { calls } = this.#step;
    this.#grow("reasoning", this.#reasoning);
    this.#grow("answer", this.#text);
    if (calls.length > 0 && !this.#calls.root.isConnected) this.#body.after(this.#calls.root);
    for (const call of calls) this.#calls.grow(call);
  }

  #grow(name, view) {
    const text = this.#step[name].slice(this.#lengths[name]);
    if (text !== "") view.append(text);
    this.#lengths[name] += text.length;
  }
}
