/** The chat: turns on the page, one running answer at a time, stop, edit, regenerate. */

import { AnswerView } from "/static/answer.js";
import { ApiError, streamChat } from "/static/api.js";
import { Conversation } from "/static/conversation.js";
import { button, byId, copy, element } from "/static/dom.js";
import { figuresLine, summarize } from "/static/figures.js";
import { plural } from "/static/format.js";

const NOTES = { length: "cut at max tokens", timeout: "cut at the time limit", content_filter: "filtered" };

export class Chat {
  #settings;
  #connection;
  #conversation = new Conversation();
  #running = null; // the AbortController of the answer under way
  #log = byId("log");
  #sticks = true; // whether the end of the log is in view
  #prompt = byId("prompt");

  /** `settings`: a SettingsForm. `connection`: {model(): promise of its name, openSettings(name of a field)}. */
  constructor(settings, connection) {
    this.#settings = settings;
    this.#connection = connection;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("input", () => this.#fitPrompt());
    this.#log.addEventListener("scroll", () => {
      this.#sticks = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 40;
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.#startOver());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
  }

  /** Ends the answer under way; what arrived stays. */
  stop() {
    this.#running?.abort();
  }

  #send() {
    const question = this.#prompt.value;
    if (question.trim() === "") return;
    if (this.#running !== null) {
      this.#say("An answer is under way. Escape stops it.");
      return;
    }
    const { errors } = this.#settings.check();
    const [wrong] = Object.keys(errors);
    if (wrong !== undefined) {
      this.#say(errors[wrong]);
      this.#connection.openSettings(wrong);
      return;
    }
    this.#prompt.value = "";
    this.#fitPrompt();
    this.#ask(question);
  }

  async #ask(question) {
    byId("empty").hidden = true;
    const turn = this.#conversation.begin(question);
    const view = new TurnView(question);
    this.#log.querySelectorAll(".turn > .actions").forEach((actions) => actions.remove());
    this.#log.append(view.root);
    this.#sticks = true;
    this.#followEnd();
    const controller = new AbortController();
    this.#setRunning(controller);
    this.#say("");
    await this.#receive(turn, view, controller.signal);
    if (this.#running !== controller) return; // a new chat began meanwhile
    this.#setRunning(null);
    view.root.append(this.#actions(turn));
    this.#followEnd();
  }

  async #receive(turn, view, signal) {
    const arrived = { usage: null, timings: null, kvboost: null, finish: "", pieces: 0, clock: startedClock() };
    let failure = null;
    try {
      const options = { key: this.#settings.key, signal };
      for await (const chunk of streamChat(await this.#body(), options)) this.#take(chunk, turn, view, arrived);
      turn.state = "done";
    } catch (error) {
      turn.state = signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") failure = error;
    }
    const note = turn.state === "stopped" ? "stopped" : (NOTES[arrived.finish] ?? "");
    view.finish(figuresLine(summarize(arrived), note), failure, turn);
    this.#say(spoken(turn, failure, arrived));
  }

  #take(chunk, turn, view, arrived) {
    arrived.usage = chunk.usage ?? arrived.usage;
    arrived.timings = chunk.timings ?? arrived.timings;
    arrived.kvboost = chunk.kvboost ?? arrived.kvboost;
    const choice = chunk.choices?.[0];
    arrived.finish = choice?.finish_reason ?? arrived.finish;
    const text = choice?.delta?.content ?? "";
    if (text === "") return;
    arrived.clock.last = performance.now();
    arrived.clock.first ??= arrived.clock.last;
    arrived.pieces += 1;
    turn.answer += text;
    view.append(text, () => this.#followEnd());
  }

  async #body() {
    return {
      model: await this.#connection.model(),
      messages: this.#conversation.messages(this.#settings.system),
      ...this.#settings.check().values,
      ...this.#settings.cacheUse,
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  #actions(turn) {
    const actions = element("div", { class: "actions" });
    if (turn.answer !== "") {
      actions.append(button("Copy", (event) => copy(turn.answer, event.currentTarget), { class: "quiet small", "aria-label": "Copy answer" }));
    }
    const again = turn.answer === "" ? "Try again" : "Regenerate";
    actions.append(button(again, () => this.#again(), { class: "quiet small" }));
    actions.append(button("Edit", () => this.#edit(), { class: "quiet small", "aria-label": "Edit the last message" }));
    return actions;
  }

  #again() {
    const { question } = this.#dropLast();
    this.#prompt.focus();
    this.#ask(question);
  }

  #edit() {
    this.#prompt.value = this.#dropLast().question;
    this.#fitPrompt();
    this.#prompt.focus();
  }

  #dropLast() {
    this.#log.lastElementChild.remove();
    const turn = this.#conversation.takeLast();
    byId("empty").hidden = this.#conversation.turns.length > 0;
    return turn;
  }

  #startOver() {
    this.stop();
    this.#setRunning(null);
    this.#conversation = new Conversation();
    this.#log.querySelectorAll(".turn").forEach((turn) => turn.remove());
    byId("empty").hidden = false;
    this.#prompt.focus();
  }

  #setRunning(controller) {
    this.#running = controller;
    const leaving = document.activeElement;
    byId("send").hidden = controller !== null;
    byId("stop").hidden = controller === null;
    if (leaving === byId("send") || leaving === byId("stop")) this.#prompt.focus();
  }

  #say(text) {
    byId("status").textContent = text;
  }

  /** Keeps the newest text in view, unless the reader scrolled away from it. */
  #followEnd() {
    if (this.#sticks) this.#log.scrollTop = this.#log.scrollHeight;
  }

  #fitPrompt() {
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${Math.min(this.#prompt.scrollHeight + 2, 240)}px`;
  }
}

const startedClock = () => ({ sent: performance.now(), first: null, last: null });

/** A turn on the page. Text is shown once per frame however fast it comes. */
class TurnView {
  #body = element("div", { class: "answer-body" });
  #answer = element("article", { class: "answer", "aria-label": "Answer", "aria-busy": "true" }, this.#body);
  #text = new AnswerView(this.#body);
  #pending = "";
  #frame = 0;

  constructor(question) {
    const asked = element("article", { class: "question", "aria-label": "Your message" }, element("div", { class: "text", text: question }));
    this.root = element("div", { class: "turn running" }, asked, this.#answer);
  }

  append(text, shown) {
    this.#pending += text;
    if (this.#frame === 0) {
      this.#frame = requestAnimationFrame(() => {
        this.#flush();
        shown();
      });
    }
  }

  finish(figures, failure, turn) {
    cancelAnimationFrame(this.#frame);
    this.#flush();
    this.#text.end();
    this.root.classList.replace("running", turn.state);
    this.#answer.removeAttribute("aria-busy");
    if (figures.childNodes.length > 0) this.#answer.append(figures);
    if (failure !== null) this.#answer.append(errorBox(failure));
    if (turn.answer === "") {
      this.#answer.append(element("p", { class: "note", text: "Nothing was answered; this message is not sent again with later ones." }));
    }
  }

  #flush() {
    this.#frame = 0;
    if (this.#pending !== "") this.#text.append(this.#pending);
    this.#pending = "";
  }
}

function errorBox(error) {
  const known = error instanceof ApiError;
  const box = element("div", { class: "error", role: "alert" });
  box.append(element("p", { text: known ? error.message : "The page itself failed." }));
  const detail = known ? error.detail : String(error);
  if (detail !== "") box.append(element("p", { class: "said", text: detail }));
  if (known && error.requestId !== "") {
    box.append(element("p", { class: "note", text: "Request " }, element("code", { text: error.requestId })));
  }
  return box;
}

function spoken(turn, failure, { usage, kvboost }) {
  if (failure !== null) return failure.message;
  if (turn.state === "stopped") return "Stopped.";
  const how = kvboost?.approximate === true ? ", approximate" : "";
  const size = usage === null ? "" : `, ${plural(usage.completion_tokens, "token")}`;
  return `Answer complete${how}${size}.`;
}
