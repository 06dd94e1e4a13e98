/** Parser of server-sent events: pieces of text in, the data of whole events out. */

export class EventParser {
  #buffer = "";
  #data = [];
  #first = true;

  /** Takes the next piece of the stream; returns the data of the events it completed, in order. */
  push(piece) {
    this.#buffer += piece;
    if (this.#first && this.#buffer !== "") {
      this.#first = false;
      if (this.#buffer.startsWith("\ufeff")) this.#buffer = this.#buffer.slice(1);
    }
    const events = [];
    let start = 0;
    for (;;) {
      const end = this.#lineEnd(start);
      if (end === -1) break;
      this.#line(this.#buffer.slice(start, end), events);
      start = end + (this.#buffer.startsWith("\r\n", end) ? 2 : 1);
    }
    this.#buffer = this.#buffer.slice(start);
    return events;
  }

  /** End of the line from `start`, or -1. A CR at the end may be half of a CR LF, which the next piece decides. */
  #lineEnd(start) {
    for (let i = start; i < this.#buffer.length; i += 1) {
      const char = this.#buffer[i];
      if (char === "\n") return i;
      if (char === "\r") return i + 1 < this.#buffer.length ? i : -1;
    }
    return -1;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length > 0) events.push(this.#data.join("\n"));
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    const name = colon === -1 ? line : line.slice(0, colon);
    if (name !== "data") return; // comments, event names, ids and retry times are not used
    const value = colon === -1 ? "" : line.slice(colon + 1);
    this.#data.push(value.startsWith(" ") ? value.slice(1) : value);
  }
}
