/** The pool and the tiers: contents, hits of the last minute, and failures. */

import { byId, element } from "/static/dom.js";
import { bytes, count, plural } from "/static/format.js";

/** "1,234 blocks, 50.1 MB of 16.0 GB"; figures that only a shared server knows are left out. */
export function holdings({ blocks, bytes: held, max_bytes: cap }) {
  const number = typeof blocks === "number" ? plural(blocks, "block") : "shared";
  const size = typeof held === "number" ? `, ${bytes(held)}` : "";
  return number + size + (size !== "" && typeof cap === "number" ? ` of ${bytes(cap)}` : "");
}

/** Description of a tier's failure, or "". */
export function trouble({ writable, state }) {
  if (typeof state === "string" && state !== "") return state;
  return writable === false ? "not storing blocks at the moment" : "";
}

/** Shows the tiers, recurrent state after the pool, replicas' pools, and the origin of the last minute's prompt tokens. */
export function showTiers({ tiers, replicas, memory, state_slots: slots, state_slots_used: used, recent_span_tokens: moved, recent_computed_tokens: computed }) {
  const entries = Object.entries(tiers ?? {});
  const pools = Object.entries(replicas ?? {}).map(([name, one]) => row(`replica ${name}`, one, `${holdings(one)}, ${one.running} running, ${one.waiting} waiting`));
  const rows = entries.map(([name, tier]) => row(name, tier));
  if (slots > 0) rows.splice(1, 0, row("recurrent state", { bytes: used, max_bytes: slots }, `${count(used)} of ${plural(slots, "slot")}, ${bytes(memory.state_bytes)}`));
  byId("tiers").replaceChildren(...rows, ...pools);
  const found = entries.map(([name, tier]) => `${count(tier.recent_hit_tokens)} from ${name}`);
  if (moved > 0) found.push(`${count(moved)} reused at other positions`);
  byId("tier-hits").textContent = `Prompt tokens, last 60 s: ${[...found, `${count(computed)} computed`].join(", ")}`;
}

function row(name, tier, text = holdings(tier)) {
  const bar = element("span", { class: "bar-track", "aria-hidden": "true" }, element("span"));
  bar.firstChild.style.width = tier.max_bytes > 0 ? `${Math.min(100, (100 * tier.bytes) / tier.max_bytes)}%` : "0";
  const wrong = trouble(tier);
  return element(
    "div",
    { "data-tier": name },
    element("dt", { text: name }),
    element("dd", { text }),
    bar,
    wrong === "" ? null : element("dd", { class: "trouble", text: wrong }),
  );
}
