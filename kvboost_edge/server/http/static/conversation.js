/** What was said. A turn is a question with its answer; a turn without any answer is shown, but not sent again. */

export class Conversation {
  turns = [];

  /** Appends a turn and returns it. `state`: "running", "done", "stopped" or "failed". */
  begin(question) {
    const turn = { question, answer: "", state: "running" };
    this.turns.push(turn);
    return turn;
  }

  /** Takes the last turn away and returns it, or null. */
  takeLast() {
    return this.turns.pop() ?? null;
  }

  /** The messages of a request that asks for the answer of the last turn. */
  messages(system) {
    const sent = system.trim() === "" ? [] : [{ role: "system", content: system }];
    const last = this.turns.length - 1;
    for (const [index, { question, answer }] of this.turns.entries()) {
      if (index < last && answer === "") continue;
      sent.push({ role: "user", content: question });
      if (index < last) sent.push({ role: "assistant", content: answer });
    }
    return sent;
  }
}
