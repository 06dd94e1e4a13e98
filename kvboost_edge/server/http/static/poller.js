/** Repeated reads while the page is visible, with longer pauses after failures. */

const LONGEST_PAUSE_MS = 16000;

export class Poller {
  #interval;
  #isWanted;
  #read;
  #timer = 0;
  #pause = 0;
  #busy = false;

  /** `interval`: ms between reads. `isWanted()`: whether to read now. `read()`: promise of whether the read succeeded. */
  constructor(interval, isWanted, read) {
    this.#interval = interval;
    this.#isWanted = isWanted;
    this.#read = read;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  /** Reads now if it is wanted. */
  wake() {
    this.#pause = this.#interval;
    this.#schedule(0);
  }

  #schedule(delay) {
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible" && this.#isWanted()) this.#timer = setTimeout(() => this.#poll(), delay);
  }

  async #poll() {
    if (this.#busy) return; // the read in progress schedules the next one
    this.#busy = true;
    let succeeded = false;
    try {
      succeeded = await this.#read();
    } finally {
      this.#busy = false;
    }
    this.#pause = succeeded ? this.#interval : Math.min(2 * this.#pause, LONGEST_PAUSE_MS);
    this.#schedule(this.#pause);
  }
}
