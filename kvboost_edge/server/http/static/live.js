/** The live view: the figures of GET /v1/blocks, read twice a second while visible. */

import { readJsonFrom } from "/static/api.js";
import { byId, element, setText } from "/static/dom.js";
import { bytes, count, percent, plural, rate } from "/static/format.js";
import { Poller } from "/static/poller.js";
import { PoolMap, STATES, decodeBytes } from "/static/poolmap.js";
import { Sparkline } from "/static/sparkline.js";
import { showTiers } from "/static/tiers.js";

const INTERVAL_MS = 500;
const SPEED_WINDOW_MS = 2000;
const HINT = "Point at a cell, or focus it and use the arrow keys.";

const LEDGER = [
  ["weight_bytes", "Weights"],
  ["pool_bytes", "Block pool"],
  ["draft_weight_bytes", "Draft model weights"],
  ["draft_pool_bytes", "Draft KV pool"],
  ["state_bytes", "Recurrent state"],
  ["process_rss_bytes", "Process, resident"],
  ["process_peak_bytes", "Process, peak"],
];
const DRAFTING = ["draft_weight_bytes", "draft_pool_bytes"]; // rows of an engine with a draft model
const COUNTERS = [
  ["hit_tokens", "Prompt tokens from the cache"],
  ["span_tokens", "Prompt tokens reused at other positions"],
  ["miss_tokens", "Prompt tokens computed"],
  ["generated_tokens_total", "Tokens generated"],
  ["evictions", "Blocks evicted"],
  ["preemptions", "Requests preempted"],
  ["replayed_tokens", "Tokens recomputed for recurrent state"],
];

export class LiveView {
  #key;
  #model;
  #map;
  #spark = new Sparkline(byId("spark"));
  #poller = new Poller(INTERVAL_MS, () => byId("live").checkVisibility() && !this.#refused, () => this.#read());
  #refused = false; // the key is not accepted, so polling stops
  #replicas = {};
  #samples = []; // [time in ms, generated tokens so far]

  /** `key()`: the API key. `model`: Models; the pool of the one in use is shown. */
  constructor(key, model) {
    this.#key = key;
    this.#model = model;
    this.#map = new PoolMap(byId("map"), (text, block) => { byId("map-detail").textContent = text ? text + this.#whose(block) : HINT; });
    for (const { name, words } of STATES) byId("legend").append(legendItem(name, words));
    for (const [name, label] of LEDGER) byId("ledger").append(ledgerItem(name, label));
    for (const [name, label] of COUNTERS) byId("counters").append(pair(label, element("dd", { id: name, text: "–" })));
    this.wake();
  }

  /** Reads now if the view is visible; called when it is shown, or key or model change. */
  wake({ otherKey = false, otherModel = false } = {}) {
    if (otherKey) this.#refused = false;
    if (otherModel) this.#forget();
    this.#poller.wake();
  }

  async #read() {
    if (!this.#model.isLoaded) {
      this.#showState("not loaded", "warn");
      return true;
    }
    const { query } = this.#model;
    const key = this.#key();
    try {
      const pool = await readJsonFrom(`/v1/blocks${query}`, key);
      if (query === this.#model.query) this.#show(pool);
      return true;
    } catch (error) {
      this.#showFailure(error, key);
      return false;
    }
  }

  #show(pool) {
    const states = decodeBytes(pool.states) ?? new Uint8Array();
    this.#map.update({ states, refs: decodeBytes(pool.refs), tokens: decodeBytes(pool.tokens) });
    this.#showState("live", "");
    byId("map-detail").classList.toggle("tall", this.#map.perCell > 1);
    byId("pool-size").textContent = sizeInWords(pool, this.#map.perCell);
    for (const { name } of STATES) byId(`count-${name}`).textContent = count(pool.counts?.[name]);
    byId("map").setAttribute("aria-label", `Map of the block pool: ${STATES.map(({ name, words }) => `${count(pool.counts?.[name])} ${words}`).join(", ")}`);
    this.#replicas = pool.replicas ?? {};
    showTiers(pool);
    byId("running").textContent = count(pool.running);
    byId("waiting").textContent = count(pool.waiting);
    byId("hit-rate").textContent = percent(pool.hit_rate);
    this.#showSpeed(pool.generated_tokens_total);
    this.#showLedger(pool.memory ?? {});
    for (const [name] of COUNTERS) byId(name).textContent = count(pool[name]);
  }

  /** Name of the replica that has the block. */
  #whose(block) {
    for (const [name, pool] of Object.entries(this.#replicas)) if ((block -= pool.num_blocks) < 0) return `, replica ${name}`;
    return "";
  }

  /** Clears the figures of another model. */
  #forget() {
    this.#show({});
    this.#samples = [];
    this.#spark.clear();
    this.#showState("waiting for the server", "");
    byId("pool-size").textContent = "–";
  }

  #showSpeed(total) {
    const now = performance.now();
    const before = this.#samples.at(-1);
    if (before !== undefined && (total < before[1] || now - before[0] > 4 * SPEED_WINDOW_MS)) this.#samples = [];
    if (typeof total === "number") this.#samples.push([now, total]);
    while (this.#samples.length > 2 && now - this.#samples[1][0] >= SPEED_WINDOW_MS) this.#samples.shift();
    const first = this.#samples[0];
    const speed = this.#samples.length > 1 ? (1000 * (total - first[1])) / (now - first[0]) : null;
    byId("speed").textContent = rate(speed);
    const peak = this.#spark.add(now, speed ?? 0);
    byId("spark-peak").textContent = peak > 0 ? `peak ${rate(peak)} tok/s` : "";
  }

  #showLedger(memory) {
    const largest = Math.max(1, ...LEDGER.map(([name]) => memory[name] ?? 0));
    for (const [name] of LEDGER) {
      byId(name).textContent = bytes(memory[name]);
      byId(`${name}-bar`).style.width = `${(100 * (memory[name] ?? 0)) / largest}%`;
      byId(name).parentElement.hidden = DRAFTING.includes(name) && !memory[name];
    }
  }

  #showFailure(error, key) {
    this.#samples = [];
    const isRefused = error.status === 401 || error.status === 403;
    this.#refused = isRefused && key === this.#key(); // a key that was changed meanwhile is tried
    if (isRefused) this.#showState(error.status === 401 ? "API key needed" : "admin key needed", "warn");
    else this.#showState(error.status > 0 ? `status ${error.status}, retrying` : "not reachable, retrying", "warn");
  }

  #showState(text, kind) {
    const state = byId("live-state");
    setText(state, text);
    state.classList.toggle("warn", kind === "warn");
    byId("live").classList.toggle("stale", kind === "warn");
  }
}

function sizeInWords(pool, perCell) {
  const size = `${plural(pool.num_blocks, "block")} of ${plural(pool.block_size, "token")}`;
  return perCell > 1 ? `${size}, ${count(perCell)} per cell, as bands` : size;
}

const pair = (label, value) => element("div", {}, element("dt", { text: label }), value);

function legendItem(name, words) {
  return element(
    "li",
    {},
    element("span", { class: `swatch ${name}`, "aria-hidden": "true" }),
    element("span", { text: words }),
    element("b", { id: `count-${name}`, text: "–" }),
  );
}

function ledgerItem(name, label) {
  const bar = element("span", { class: "bar-track", "aria-hidden": "true" }, element("span", { id: `${name}-bar` }));
  return element("div", {}, element("dt", { text: label }), element("dd", { id: name, text: "–" }), bar);
}
