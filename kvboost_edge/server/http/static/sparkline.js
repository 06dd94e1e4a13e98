/** A small curve of the last minute. */

const SPAN_MS = 60000;

export class Sparkline {
  #canvas;
  #points = []; // [time in ms, value]

  constructor(canvas) {
    this.#canvas = canvas;
    document.addEventListener("themechange", () => this.#draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  /** Adds a value, draws, and returns the highest value of the last minute. */
  add(now, value) {
    this.#points.push([now, value]);
    while (this.#points[0][0] < now - SPAN_MS) this.#points.shift();
    this.#draw();
    return this.#highest();
  }

  /** Removes all values. */
  clear() {
    this.#points = [];
    this.#canvas.width = 0;
  }

  #highest() {
    return Math.max(0, ...this.#points.map(([, value]) => value));
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (width === 0 || this.#points.length === 0) return;
    const scale = window.devicePixelRatio || 1;
    Object.assign(this.#canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    const context = this.#canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(this.#canvas);
    if (this.#highest() === 0) return; // nothing was generated
    const end = this.#points.at(-1)[0];
    const top = Math.max(1, this.#highest());
    const at = ([time, value]) => [width * (1 - (end - time) / SPAN_MS), height - 1.5 - (height - 4) * (value / top)];
    const path = new Path2D();
    this.#points.forEach((point, index) => (index === 0 ? path.moveTo(...at(point)) : path.lineTo(...at(point))));
    context.strokeStyle = style.getPropertyValue("--accent");
    context.lineWidth = 1.5;
    context.stroke(path);
    path.lineTo(width, height);
    path.lineTo(at(this.#points[0])[0], height);
    context.globalAlpha = 0.14;
    context.fillStyle = style.getPropertyValue("--accent");
    context.fill(path);
  }
}
