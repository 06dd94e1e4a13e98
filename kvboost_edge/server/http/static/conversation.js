/**
 * A conversation. A turn is a question with its steps; a step is an answer of the model: reasoning, text, tool calls.
 * A step whose calls have results is followed by another one. A call is {index, id, name, arguments, result}, its
 * arguments a text, its result null until it is entered.
 */

export class Conversation {
  /** `turns`: the turns of a stored chat. */
  constructor(turns = []) {
    this.turns = turns;
  }

  /** Appends a turn and returns it. */
  begin(question) {
    const turn = { question, steps: [] };
    this.turns.push(turn);
    return turn;
  }

  /** Removes the last turn. */
  removeLast() {
    this.turns.pop();
  }

  /** The messages of a request for the running step of the last turn. Turns without an answer are left out. */
  messages(system) {
    const sent = system.trim() === "" ? [] : [{ role: "system", content: system }];
    const last = this.turns.at(-1);
    for (const turn of this.turns) {
      const said = turn.steps.flatMap(messagesOf);
      if (turn === last || said.length > 0) sent.push({ role: "user", content: turn.question }, ...said);
    }
    return sent;
  }
}

/**
 * Appends a step to `turn` and returns it. `state`: "running", "done", "stopped" or "failed"; `finish`: the server's
 * reason for the end, "" without one; `model`: the model that answers; `earlier`: the step that it replaces, or null.
 */
export function beginStep(turn, earlier = null) {
  const step = { reasoning: "", answer: "", calls: [], state: "running", finish: "", model: "", earlier };
  turn.steps.push(step);
  return step;
}

/** Puts the earlier step back if the last one, which has ended, failed or was stopped without text. Returns the last step. */
export function settle(turn) {
  const step = turn.steps.at(-1);
  const earlier = step?.earlier ?? null;
  if (earlier === null) return step;
  step.earlier = null;
  if (step.state !== "done" && step.answer === "" && step.calls.length === 0) turn.steps.splice(-1, 1, earlier);
  return turn.steps.at(-1);
}

/** Adds a piece of a streamed call, in OpenAI's format, to `step`; returns the call. */
export function takeCall(step, { index, id, function: made }) {
  let call = step.calls.find((known) => known.index === index);
  if (call === undefined) {
    call = { index, id: "", name: "", arguments: "", result: null };
    step.calls.push(call);
  }
  if (typeof id === "string") call.id = id;
  call.name += textOf(made?.name);
  call.arguments += textOf(made?.arguments);
  return call;
}

/** `value` if it is a string, else "". */
export const textOf = (value) => (typeof value === "string" ? value : "");

/** An answer with the results of its calls, without unanswered calls and empty reasoning. */
export function messagesOf({ reasoning, answer, calls, state }) {
  const answered = calls.filter((call) => call.result !== null);
  if (state === "running" || (answer === "" && answered.length === 0)) return [];
  const message = { role: "assistant", content: answer };
  if (reasoning !== "") message.reasoning_content = reasoning;
  if (answered.length > 0) {
    message.tool_calls = answered.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return [message, ...answered.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }))];
}
