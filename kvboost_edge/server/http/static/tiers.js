/** The tiers, the pool first: what each holds, what the last minute's prompts found in it, and what is wrong with it. */

import { byId, element } from "/static/dom.js";
import { bytes, count, plural } from "/static/format.js";

/** "1,234 blocks, 50.1 MB of 16.0 GB"; what only a shared server knows is left out. */
export function holdings({ blocks, bytes: held, max_bytes: cap }) {
  const number = typeof blocks === "number" ? plural(blocks, "block") : "shared";
  const size = typeof held === "number" ? `, ${bytes(held)}` : "";
  return number + size + (size !== "" && typeof cap === "number" ? ` of ${bytes(cap)}` : "");
}

/** What stands under a tier: what is wrong with it, else nothing. */
export function trouble({ writable, state }) {
  if (typeof state === "string" && state !== "") return state;
  return writable === false ? "stores nothing at the moment" : "";
}

/** Shows the tiers, the replicas' pools, and where the last minute's prompt tokens came from, of what /v1/blocks tells. */
export function showTiers({ tiers, replicas, recent_span_tokens: moved, recent_computed_tokens: computed }) {
  const entries = Object.entries(tiers ?? {});
  const pools = Object.entries(replicas ?? {}).map(([name, one]) => row(`replica ${name}`, one, `, ${one.running} running, ${one.waiting} waiting`));
  byId("tiers").replaceChildren(...entries.map(([name, tier]) => row(name, tier)), ...pools);
  const found = entries.map(([name, tier]) => `${count(tier.recent_hit_tokens)} from ${name}`);
  if (moved > 0) found.push(`${count(moved)} reused at other positions`);
  byId("tier-hits").textContent = `Prompt tokens, last 60 s: ${[...found, `${count(computed)} computed`].join(", ")}`;
}

function row(name, tier, more = "") {
  const bar = element("span", { class: "bar-track", "aria-hidden": "true" }, element("span"));
  bar.firstChild.style.width = tier.max_bytes > 0 ? `${Math.min(100, (100 * tier.bytes) / tier.max_bytes)}%` : "0";
  const wrong = trouble(tier);
  return element(
    "div",
    { "data-tier": name },
    element("dt", { text: name }),
    element("dd", { text: holdings(tier) + more }),
    bar,
    wrong === "" ? null : element("dd", { class: "trouble", text: wrong }),
  );
}
