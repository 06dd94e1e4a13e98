/** The block pool as a map on a canvas: a cell per block or group of blocks. */

import { plural } from "/static/format.js";

/** State number -> name and words. Each has its own pattern, so that the map is readable without colour. */
export const STATES = [
  { name: "free", words: "free" },
  { name: "cached", words: "cached" },
  { name: "used", words: "referenced" },
  { name: "shared", words: "shared" },
  { name: "span", words: "at another position" },
];
const LAST = STATES.length - 1;
const CELL_SIZES = [20, 18, 16, 14, 12, 10];
const GROUP_CELL = 12;
const MAX_HEIGHT = 264;

/** Base64 to bytes; null for null. */
export function decodeBytes(base64) {
  if (base64 === null || base64 === undefined) return null;
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}

/** How `numBlocks` fill a map of `width` px: {cell, columns, rows, perCell}; perCell > 1 groups blocks. */
export function layout(numBlocks, width) {
  for (const cell of CELL_SIZES) {
    const columns = Math.max(1, Math.floor(width / cell));
    const rows = Math.ceil(numBlocks / columns);
    if (rows * cell <= MAX_HEIGHT) return { cell, columns, rows, perCell: 1 };
  }
  const columns = Math.max(1, Math.floor(width / GROUP_CELL));
  const perCell = Math.ceil(numBlocks / (columns * Math.floor(MAX_HEIGHT / GROUP_CELL)));
  return { cell: GROUP_CELL, columns, rows: Math.ceil(Math.ceil(numBlocks / perCell) / columns), perCell };
}

/** Number of blocks in [start, stop) by state. */
export function tally(states, start, stop) {
  const counts = STATES.map(() => 0);
  for (let block = start; block < Math.min(stop, states.length); block += 1) counts[Math.min(states[block], LAST)] += 1;
  return counts;
}

/** Description of the cell with the blocks [start, stop). */
export function describe({ states, refs, tokens }, start, stop) {
  if (stop - start > 1) {
    const counts = tally(states, start, stop);
    const parts = STATES.map(({ words }, state) => [counts[state], words]).filter(([number]) => number > 0);
    return `Blocks ${start}–${stop - 1}: ${parts.map(([number, words]) => `${number} ${words}`).join(", ")}`;
  }
  const parts = [STATES[Math.min(states[start], LAST)].words];
  if (tokens !== null) parts.push(saturating(tokens[start], "token"));
  if (refs !== null) parts.push(saturating(refs[start], "reference"));
  return `Block ${start}: ${parts.join(", ")}`;
}

const saturating = (number, word) => (number === 255 ? `255 or more ${word}s` : plural(number, word));

/** Draws on `canvas`; calls `tell` with the cell under the pointer or cursor and its first block. */
export class PoolMap {
  #canvas;
  #tell;
  #pool = { states: new Uint8Array(), refs: null, tokens: null };
  #plan = layout(0, 1);
  #cursor = -1;
  #said = "";

  constructor(canvas, tell) {
    this.#canvas = canvas;
    this.#tell = tell;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#moveTo(document.activeElement === canvas ? this.#cursor : -1));
    canvas.addEventListener("focus", () => this.#moveTo(Math.max(0, this.#cursor)));
    canvas.addEventListener("blur", () => this.#moveTo(-1));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    document.addEventListener("themechange", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Shows another state of the pool. */
  update(pool) {
    this.#pool = pool;
    this.draw();
  }

  /** Blocks per cell. */
  get perCell() {
    return this.#plan.perCell;
  }

  draw() {
    const width = this.#canvas.parentElement.clientWidth;
    if (width === 0) return; // the view is not shown
    this.#plan = layout(this.#pool.states.length, width);
    this.#cursor = Math.min(this.#cursor, this.#numCells() - 1); // the pool may have become smaller
    const { cell, columns, rows, perCell } = this.#plan;
    const context = this.#resized(Math.min(width, columns * cell), Math.max(1, rows) * cell);
    const inks = inksFor(this.#canvas, context);
    for (let index = 0; index < this.#numCells(); index += 1) {
      const x = (index % columns) * cell;
      const y = Math.floor(index / columns) * cell;
      if (perCell === 1) fillCell(context, inks, Math.min(this.#pool.states[index], LAST), x, y, cell);
      else stackCell(context, inks, tally(this.#pool.states, index * perCell, (index + 1) * perCell), x, y, cell);
    }
    if (this.#cursor >= 0) this.#frame(context, inks.cursor);
    this.#speak();
  }

  #numCells() {
    return Math.ceil(this.#pool.states.length / this.#plan.perCell);
  }

  #resized(width, height) {
    const scale = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.#canvas.width !== w || this.#canvas.height !== h) {
      Object.assign(this.#canvas, { width: w, height: h });
      Object.assign(this.#canvas.style, { width: `${width}px`, height: `${height}px` });
    }
    const context = this.#canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }

  #frame(context, colour) {
    const { cell, columns } = this.#plan;
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.strokeRect((this.#cursor % columns) * cell + 0.5, Math.floor(this.#cursor / columns) * cell + 0.5, cell - 2, cell - 2);
  }

  #point(event) {
    const { cell, columns } = this.#plan;
    const column = Math.floor(event.offsetX / cell);
    const index = Math.floor(event.offsetY / cell) * columns + column;
    this.#moveTo(column < columns && index < this.#numCells() ? index : -1);
  }

  #key(event) {
    const { columns } = this.#plan;
    const last = this.#numCells() - 1;
    const to = { ArrowLeft: this.#cursor - 1, ArrowRight: this.#cursor + 1, ArrowUp: this.#cursor - columns, ArrowDown: this.#cursor + columns, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to <= last) this.#moveTo(to);
  }

  #moveTo(index) {
    if (index === this.#cursor) return;
    this.#cursor = index;
    this.draw();
  }

  #speak() {
    const { perCell } = this.#plan;
    const start = this.#cursor * perCell;
    const text = this.#cursor < 0 ? "" : describe(this.#pool, start, Math.min(start + perCell, this.#pool.states.length));
    if (text === this.#said) return;
    this.#said = text;
    this.#tell(text, start);
  }
}

/** The colours of the theme, and the three patterns, as fills. */
function inksFor(canvas, context) {
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    cursor: colour("text"),
    line: colour("free-line"),
    fills: [
      colour("free"),
      hatch(context, colour("cached-tint"), colour("cached")),
      colour("used"),
      dots(context, colour("shared"), colour("shared-dot")),
      bars(context, colour("span"), colour("span-line")),
    ],
  };
}

function pattern(context, size, paint) {
  const tile = document.createElement("canvas");
  tile.width = size;
  tile.height = size;
  paint(tile.getContext("2d"));
  return context.createPattern(tile, "repeat");
}

const hatch = (context, ground, line) => pattern(context, 6, (tile) => {
  tile.fillStyle = ground;
  tile.fillRect(0, 0, 6, 6);
  tile.strokeStyle = line;
  tile.lineWidth = 1.6;
  for (const shift of [-6, 0, 6]) {
    tile.beginPath();
    tile.moveTo(shift - 1, 7);
    tile.lineTo(shift + 7, -1);
    tile.stroke();
  }
});

const dots = (context, ground, dot) => pattern(context, 4, (tile) => {
  tile.fillStyle = ground;
  tile.fillRect(0, 0, 4, 4);
  tile.fillStyle = dot;
  tile.fillRect(1, 1, 1.6, 1.6);
});

const bars = (context, ground, line) => pattern(context, 4, (tile) => {
  tile.fillStyle = ground;
  tile.fillRect(0, 0, 4, 4);
  tile.fillStyle = line;
  tile.fillRect(1, 0, 1.4, 4);
});

function fillCell(context, inks, state, x, y, cell) {
  const side = cell - 2;
  context.fillStyle = inks.fills[state];
  context.fillRect(x, y, side, side);
  if (state > 1) return;
  context.strokeStyle = inks.line;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
}

/** A cell of many blocks: bands from the bottom up, the last of STATES first, as high as their share. */
function stackCell(context, inks, counts, x, y, cell) {
  const side = cell - 2;
  const total = counts.reduce((sum, number) => sum + number, 0);
  let bottom = y + side;
  for (let state = LAST; state >= 0; state -= 1) {
    const height = (side * counts[state]) / total;
    context.fillStyle = inks.fills[state];
    context.fillRect(x, bottom - height, side, height);
    bottom -= height;
  }
  context.strokeStyle = inks.line;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
}
