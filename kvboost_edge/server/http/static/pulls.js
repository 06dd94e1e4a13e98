/** Downloads of models by the server, one at a time. */

import { ApiError, streamLines } from "/static/api.js";
import { bytes } from "/static/format.js";
import { about } from "/static/progress.js";

const SPEED_AFTER_MS = 1000;
const STEPS = {
  "": "Waiting for the server",
  "pulling manifest": "Looking up the model",
  "verifying sha256 digest": "Checking the files",
  "writing manifest": "Saving the model",
};

/** The download `name` before its first event. `file`: number of the current file; `since`, `from`: its start. */
export const newPull = (name) => ({ name, state: "running", status: "", error: null, digest: "", file: 0, completed: 0, total: 0, since: 0, from: 0 });

/** Adds an event of the stream, {status, digest, total, completed}, to `pull`. `now`: time in ms. */
export function takeEvent(pull, { status, digest = "", total = 0, completed = 0 }, now) {
  if (digest !== "" && digest !== pull.digest) Object.assign(pull, { file: pull.file + 1, since: now, from: completed });
  Object.assign(pull, { status: String(status), digest, total, completed });
}

/** The share of the current file, or null. */
export const shareOf = ({ digest, total, completed }) => (digest !== "" && total > 0 ? Math.min(1, completed / total) : null);

/** "file 2, 12.0 MB of 100 MB, 6.00 MB/s, about 15 s" */
export function pullInWords({ status, digest, file, completed, total, since, from }, now) {
  if (digest === "") return STEPS[status] ?? status;
  const ms = now - since;
  const speed = ms > SPEED_AFTER_MS && completed > from ? (completed - from) / ms : null;
  const left = speed === null ? "" : about((total - completed) / speed);
  const number = file > 1 ? `file ${file}` : "";
  return [number, `${bytes(completed)} of ${bytes(total)}`, speed === null ? "" : `${bytes(1000 * speed)}/s`, left].filter((part) => part !== "").join(", ");
}

export class Pulls {
  current = null; // the running download, or the last one; null if it was dismissed
  #key;
  #listeners = [];
  #controller = null;

  /** `key()`: the API key. */
  constructor(key) {
    this.#key = key;
  }

  /** `listener()` is called after each change. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  get isRunning() {
    return this.current?.state === "running";
  }

  /** Downloads a model; resolves when that has ended, well or not. */
  async start(name) {
    const controller = new AbortController();
    this.#controller = controller;
    const pull = newPull(name);
    this.current = pull;
    this.#tell();
    try {
      for await (const event of streamLines("/api/pull", { key: this.#key(), body: { model: name }, signal: controller.signal })) {
        takeEvent(pull, event, performance.now());
        this.#tell();
      }
      if (pull.status !== "success") throw new ApiError("The connection ended before the download was complete.");
      pull.state = "done";
    } catch (error) {
      pull.state = controller.signal.aborted ? "stopped" : "failed";
      pull.error = error;
    }
    this.#tell();
  }

  /** Stops the running download; the server keeps its files for the next one. */
  stop() {
    this.#controller?.abort();
  }

  dismiss() {
    this.current = null;
    this.#tell();
  }

  #tell() {
    for (const listener of this.#listeners) listener();
  }
}
