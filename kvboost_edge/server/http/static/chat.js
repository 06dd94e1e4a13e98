/** The chat: turns, one running answer at a time, stop, edit, regenerate, and stored chats. */

import { streamChat, unlessAborted } from "/static/api.js";
import { asJson, asMarkdown, download, fileName } from "/static/chatexport.js";
import { idOf, keepChat, keptChats, removeChat, titleOf } from "/static/chats.js";
import { beginStep, Conversation, settle, takeCall, textOf } from "/static/conversation.js";
import { isDialogOpen, setUpDialog, showDialog } from "/static/dialog.js";
import { button, byId, copy, element, isComposing, setText } from "/static/dom.js";
import { figuresLine, summarize } from "/static/figures.js";
import { plural } from "/static/format.js";
import { load, save } from "/static/storage.js";
import { TurnView } from "/static/turn.js";

const NOTES = { length: "stopped at max tokens", timeout: "stopped at the time limit", content_filter: "filtered" };

export class Chat {
  #settings;
  #connection;
  #id = ""; // id of the chat in this tab; "" until it has a message
  #conversation = new Conversation();
  #deleted = null; // the stored text of the chat if another tab deleted it; the next message stores it again
  #view = null; // view of the last turn
  #running = null; // the AbortController of the running answer
  #log = byId("log");
  #sticks = true; // the end of the log is in view
  #prompt = byId("prompt");
  #draft = null; // while the last message is edited, the text that the field had before

  /** `settings`: a SettingsForm. `connection`: {model(): promise of its name, modelNow(): its name or "", refreshModels(),
   *  openSettings(name of a field), showRequest(id)}. `confirmation`: a Confirmation. */
  constructor(settings, connection, confirmation) {
    this.#settings = settings;
    this.#connection = connection;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("input", () => this.#write(this.#prompt.value));
    this.#log.addEventListener("scroll", () => {
      this.#sticks = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 40;
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("cancel-edit").addEventListener("click", () => {
      this.#endEdit();
      this.#prompt.focus();
    });
    byId("new-chat").addEventListener("click", () => this.startNew());
    byId("delete-chat").addEventListener("click", () => {
      const title = titleOf(this.#conversation.turns);
      confirmation.ask({ title: "Delete this chat?", text: `This browser will no longer keep “${title}”.`, verb: "Delete" }, () => this.#delete());
    });
    this.#offerExport();
    byId("chats").addEventListener("change", (event) => this.open(event.target.value));
    addEventListener("storage", (event) => this.#changedElsewhere(event));
    // A phone may end a page in the background without another event.
    document.addEventListener("visibilitychange", () => { if (document.visibilityState === "hidden" && this.#running !== null) this.#keep(); });
    addEventListener("pagehide", () => { if (this.#running !== null) this.#keep(); });
    this.open(load("chat"));
    this.#write(load("draft"));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || isComposing(event) || isDialogOpen()) return;
      if (this.#running === null) this.#endEdit();
      else this.stop();
    });
  }

  /** Stops the running answer and keeps the received text. */
  stop() {
    this.#running?.abort();
  }

  get isRunning() {
    return this.#running !== null;
  }

  get isEmpty() {
    return this.#conversation.turns.length === 0;
  }

  /** The other stored chats, latest first: [{id, title}]. */
  get others() {
    return keptChats().filter(({ id }) => id !== this.#id);
  }

  /** Lets the browser save the chat as a file. `kind`: "md" or "json". */
  exportAs(kind) {
    const { turns } = this.#conversation;
    const { system, sampling } = this.#settings;
    const about = { system, sampling, settings: this.#settings.check().values, model: this.#connection.modelNow(), at: new Date() };
    if (kind === "md") download(fileName(turns, kind), "text/markdown", asMarkdown(turns, about));
    else download(fileName(turns, kind), "application/json", asJson(turns, about));
    this.#say("The chat is exported.");
  }

  #offerExport() {
    const dialog = setUpDialog(byId("export"));
    byId("export-chat").addEventListener("click", () => showDialog(dialog));
    for (const kind of ["md", "json"]) {
      byId(`export-${kind}`).addEventListener("click", () => {
        dialog.close();
        this.exportAs(kind);
      });
    }
  }

  #send() {
    const question = this.#prompt.value;
    if (question.trim() === "") return;
    if (this.#running !== null) {
      this.#say("An answer is in progress. Escape stops it.");
      return;
    }
    if (!this.#ready()) return;
    if (this.#draft === null) {
      this.#write("");
    } else {
      this.#endEdit();
      this.#conversation.removeLast();
      this.#view.root.remove();
      this.#view = null; // the turn before it is complete
    }
    this.#ask(question);
  }

  /** Returns whether all settings are valid; announces and shows the first invalid one. */
  #ready() {
    const { errors } = this.#settings.check();
    const [wrong] = Object.keys(errors);
    if (wrong === undefined) return true;
    this.#say(errors[wrong]);
    this.#connection.openSettings(wrong);
    return false;
  }

  #ask(question) {
    byId("empty").hidden = true;
    this.#view?.close();
    this.#view = new TurnView(question);
    this.#log.append(this.#view.root);
    this.#sticks = true;
    const turn = this.#conversation.begin(question);
    this.#deleted = null;
    this.#keep();
    this.#answer(turn);
  }

  /** Generates another answer of the last turn, in place of `earlier` if it is a step. */
  async #answer(turn, earlier = null) {
    this.#log.querySelectorAll(".turn > .actions").forEach((actions) => actions.remove());
    const step = beginStep(turn, earlier);
    const view = this.#view;
    const part = view.begin(step, () => this.#followEnd());
    this.#followEnd();
    const controller = new AbortController();
    this.#setRunning(controller);
    this.#say("");
    const failure = await this.#receive(step, part, controller.signal);
    view.mark(step.state);
    if (this.#running !== controller) return; // another chat was opened meanwhile
    this.#setRunning(null);
    const last = settle(turn);
    this.#keep();
    if (last === step) this.#conclude(turn, step, part);
    else this.#putBack(turn, last, failure);
    this.#followEnd();
  }

  /** Shows an earlier answer again, with the error of the one that was to replace it, or null. */
  #putBack(turn, step, failure) {
    this.#view.takeLast();
    const part = this.#view.begin(step, () => {});
    part.restore(noteOf(step), failure);
    this.#view.mark(step.state);
    this.#conclude(turn, step, part);
  }

  /** Streams an answer into `step`; returns the error, or null. */
  async #receive(step, part, signal) {
    const arrived = { usage: null, timings: null, kvboost: null, finish: "", requestId: "", pieces: 0, clock: startedClock() };
    let failure = null;
    try {
      const options = { key: this.#settings.key, signal, begun: (id) => { arrived.requestId = id; } };
      const body = this.#body(await unlessAborted(signal, this.#connection.model()));
      step.model = body.model;
      for await (const chunk of streamChat(body, options)) {
        if (chunk.prompt_progress) part.read(chunk.prompt_progress, (text) => this.#say(text));
        else take(chunk, step, part, arrived);
      }
      step.state = "done";
    } catch (error) {
      step.state = signal.aborted ? "stopped" : "failed";
      if (step.state === "failed") failure = error;
      if (error.status === 404) this.#connection.refreshModels(); // the server has been started with another model
    }
    step.finish = arrived.finish;
    const why = arrived.requestId === "" ? null : () => this.#connection.showRequest(arrived.requestId);
    part.finish(figuresLine(summarize(arrived), failure === null ? noteOf(step) : "", why), failure);
    this.#say(spoken(step, failure, arrived));
    return failure;
  }

  /** Ends the last turn with its actions. Asks for results of calls, or notes what will not be sent again. */
  #conclude(turn, step, part) {
    if (step.calls.length === 0) {
      const forgotten = turn.steps.length === 1 ? "; this message is not sent again with later ones" : "";
      if (step.answer === "") part.note(`No answer${forgotten}.`);
    } else if (step.state !== "done" || step.finish in NOTES) {
      part.note("An incomplete call is not sent again.");
    } else {
      part.ask({
        ready: () => this.#ready(),
        missing: ({ name }) => this.#say(`The result of ${name} is missing.`),
        send: () => this.#goOn(turn),
      });
    }
    this.#view.root.append(this.#actions(turn, step));
  }

  #goOn(turn, earlier = null) {
    this.#prompt.focus();
    this.#sticks = true;
    this.#answer(turn, earlier);
  }

  #body(model) {
    return {
      model,
      messages: this.#conversation.messages(this.#settings.system),
      ...this.#settings.check().values,
      ...this.#settings.cacheUse,
      stream: true,
      return_progress: true,
      stream_options: { include_usage: true },
    };
  }

  #actions(turn, step) {
    const actions = element("div", { class: "actions" });
    if (step.answer !== "") {
      actions.append(button("Copy", (event) => copy(step.answer, event.currentTarget), { class: "quiet small", "aria-label": "Copy answer" }));
    }
    const again = step.answer === "" && step.calls.length === 0 ? "Try again" : "Regenerate";
    actions.append(button(again, () => this.#again(turn), { class: "quiet small" }));
    actions.append(button("Edit", () => this.#edit(), { class: "quiet small", "aria-label": "Edit the last message" }));
    return actions;
  }

  /** Regenerates the last answer; results of earlier calls are kept, and the answer if there is no new one. */
  #again(turn) {
    if (!this.#ready()) return;
    const earlier = turn.steps.pop();
    this.#view.takeLast();
    this.#goOn(turn, earlier);
  }

  /** Puts the last message into the field; sending it replaces the last turn. */
  #edit() {
    this.#draft ??= this.#prompt.value;
    byId("editing").hidden = false;
    this.#say("Sending replaces the last message. Escape cancels.");
    this.#write(this.#conversation.turns.at(-1).question);
    this.#prompt.focus();
  }

  /** Ends editing, and puts the earlier text back into the field. */
  #endEdit() {
    if (this.#draft === null) return;
    byId("editing").hidden = true;
    this.#write(this.#draft);
    this.#draft = null;
  }

  /** Shows the stored chat `id`, or a new one. Ends a running answer. */
  open(id) {
    if (this.#running !== null) {
      this.stop();
      this.#keep();
      this.#setRunning(null);
    }
    this.#endEdit();
    this.#deleted = null;
    const kept = keptChats().find((chat) => chat.id === id);
    this.#id = kept?.id ?? "";
    save("chat", this.#id);
    this.#list();
    this.#conversation = new Conversation(kept?.turns);
    this.#warn("");
    this.#view = null;
    this.#log.querySelectorAll(".turn").forEach((turn) => turn.remove());
    byId("empty").hidden = this.#conversation.turns.length > 0;
    for (const turn of this.#conversation.turns) this.#restore(turn);
    this.#sticks = true;
    this.#followEnd();
  }

  #restore(turn) {
    this.#view?.close();
    this.#view = new TurnView(turn.question);
    this.#log.append(this.#view.root);
    if (turn.steps.length === 0) beginStep(turn).state = "stopped";
    for (const step of turn.steps) {
      const part = this.#view.begin(step, () => {});
      part.restore(noteOf(step));
      this.#view.mark(step.state);
      if (turn === this.#conversation.turns.at(-1) && step === turn.steps.at(-1)) this.#conclude(turn, step, part);
    }
  }

  /** Stores the chat in the browser, unless another tab deleted it. */
  #keep() {
    if (this.#deleted !== null) return;
    const { turns } = this.#conversation;
    if (turns.length === 0) {
      removeChat(this.#id);
      this.#id = "";
      this.#warn("");
    } else {
      this.#id ||= `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;
      this.#warn(keepChat(this.#id, turns) ? "" : "The browser cannot store this chat. Export it before you close or reload the page.");
    }
    save("chat", this.#id);
    this.#list();
  }

  #delete() {
    removeChat(this.#id);
    this.#conversation = new Conversation(); // otherwise a running answer would be stored
    this.startNew();
  }

  startNew() {
    this.open("");
    this.#prompt.focus();
  }

  /** Another tab stored or deleted a chat. If it continued this one, shows that, or keeps a running answer as another chat. */
  #changedElsewhere({ key, oldValue, newValue }) {
    const isThis = this.#id !== "" && idOf(key) === this.#id;
    if (isThis && newValue === null) {
      this.#deleted = oldValue;
      this.#warn("This browser no longer keeps this chat. Your next message stores it again.");
    } else if (isThis && newValue === this.#deleted) {
      this.#deleted = null; // the other tab put the chat back
      this.#warn("");
    } else if (isThis && this.#running === null) {
      this.#reopen();
    } else if (isThis) {
      this.#id = "";
      this.#keep();
    }
    this.#list();
  }

  /** Shows the chat as it is stored now. An edit ends: its text, if changed, and the draft become a new message. */
  #reopen() {
    const text = this.#prompt.value;
    const isEdited = this.#draft !== null && text !== this.#conversation.turns.at(-1).question;
    this.open(this.#id);
    if (isEdited) this.#write([text, this.#prompt.value].filter((one) => one.trim() !== "").join("\n\n"));
    this.#warn("Another tab changed this chat. Sending adds a new message.");
  }

  /** Lists the stored chats. */
  #list() {
    const options = keptChats().map(({ id, title }) => element("option", { value: id, text: title || "(no title)" }));
    byId("chats").replaceChildren(element("option", { value: "", text: "New chat" }), ...options);
    byId("chats").value = this.#id;
    byId("delete-chat").hidden = this.#id === "";
    byId("export-chat").hidden = this.#id === "";
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

  #warn(text) {
    setText(byId("chat-warning"), text);
  }

  /** Keeps the newest text in view, unless the reader scrolled away from it. */
  #followEnd() {
    if (this.#sticks) this.#log.scrollTop = this.#log.scrollHeight;
  }

  /** Puts `text` into the message field, whose text survives a reload, and fits the field to it. */
  #write(text) {
    if (this.#prompt.value !== text) this.#prompt.value = text;
    save("draft", this.#draft ?? text); // a reload cancels an edit
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${Math.min(this.#prompt.scrollHeight + 2, 240)}px`;
    this.#followEnd(); // a higher field covers the end of the log
  }
}

/** Why an answer is not complete, or "". */
const noteOf = ({ state, finish }) => (["stopped", "failed"].includes(state) ? state : (NOTES[finish] ?? ""));

const startedClock = () => ({ sent: performance.now(), first: null, last: null });

/** Adds a chunk of the stream to `step` and `arrived`. */
function take(chunk, step, part, arrived) {
  arrived.usage = chunk.usage ?? arrived.usage;
  arrived.timings = chunk.timings ?? arrived.timings;
  arrived.kvboost = chunk.kvboost ?? arrived.kvboost;
  const choice = chunk.choices?.[0];
  arrived.finish = choice?.finish_reason ?? arrived.finish;
  const delta = choice?.delta ?? {};
  const thought = textOf(delta.reasoning_content);
  const text = textOf(delta.content);
  const calls = delta.tool_calls ?? [];
  if (thought === "" && text === "" && calls.length === 0) return;
  arrived.clock.last = performance.now();
  arrived.clock.first ??= arrived.clock.last;
  arrived.pieces += 1;
  step.reasoning += thought;
  step.answer += text;
  for (const piece of calls) takeCall(step, piece);
  part.update();
}

function spoken(step, failure, { usage, kvboost, finish }) {
  if (failure !== null) return failure.message;
  if (step.state === "stopped") return "Stopped.";
  const how = kvboost?.approximate === true ? ", approximate" : "";
  const size = usage === null ? "" : `, ${plural(usage.completion_tokens, "token")}`;
  const calls = step.calls.map(({ name }) => name).join(", ");
  if (calls === "") return `Answer complete${how}${size}.`;
  return finish === "length" ? `The call of ${calls} is incomplete.` : `The model calls ${calls} and waits for the result.`;
}
