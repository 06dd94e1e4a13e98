/** The figures below an answer: cached tokens, times and speed. */

import { causeInWords, isMiss } from "/static/causes.js";
import { button, element } from "/static/dom.js";
import { count, duration, inWords, percent, plural, rate } from "/static/format.js";

const NOTICEABLE_MS = 100;
const REUSED = "part of the prompt was reused from another position, so a full computation may give a different answer";
const REASONS = {
  first_seen: "new prefix",
  evicted: "evicted",
  tail: "last block not full",
  bypassed: "cache not used",
};

/**
 * All figures in one object. `usage`, `timings` and `kvboost` are the server's or null; `clock` is this page's:
 * {sent, first, last} in ms, first and last are null without text; `pieces` counts the pieces of text.
 */
export function summarize({ usage, timings, kvboost, clock, pieces }) {
  const prompt = usage?.prompt_tokens ?? null;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n ?? null;
  const generated = usage?.completion_tokens ?? timings?.predicted_n ?? null;
  return {
    prompt,
    cached,
    generated,
    pieces,
    firstMs: clock.first === null ? null : clock.first - clock.sent,
    speed: speedOf({ timings, kvboost, generated, clock }),
    queueMs: kvboost?.queue_ms ?? null,
    loadMs: kvboost?.load_ms ?? null,
    tiers: kvboost?.hit_tokens ?? {},
    reason: kvboost?.miss_reason ?? "",
    approximate: kvboost?.approximate === true,
    approximations: inWords(kvboost?.approximations),
    moved: kvboost?.reused_span_tokens ?? 0,
    recomputed: kvboost?.recomputed_tokens ?? 0,
  };
}

/** Tokens per second after the first one, by the server's clock if it is known. */
function speedOf({ timings, kvboost, generated, clock }) {
  if (generated > 1 && kvboost?.decode_ms > 0) return (1000 * (generated - 1)) / kvboost.decode_ms;
  if (timings?.predicted_n > 0 && timings?.predicted_ms > 0) return (1000 * timings.predicted_n) / timings.predicted_ms;
  if (generated > 1 && clock.last > clock.first) return (1000 * (generated - 1)) / (clock.last - clock.first);
  return null;
}

/** A line of figures with a meter of the cached share; it begins with `note`. `why()` opens the report, or null. */
export function figuresLine(figures, note, why = null) {
  const line = element("div", { class: "figures" });
  if (note !== "") line.append(element("span", { class: "flag", text: note }));
  if (figures.approximate) line.append(element("span", { class: "flag approximate", title: whyApproximate(figures), text: "approximate" }));
  if (figures.prompt !== null && figures.cached !== null) line.append(cachedFigure(figures));
  if (figures.moved > 0) line.append(movedFigure(figures));
  for (const [tier, tokens] of Object.entries(figures.tiers)) {
    if (tier !== "pool" && tokens > 0) line.append(figure(`from ${tier}`, loaded(tokens, figures.loadMs), "cached tokens that were not in the pool"));
  }
  if (figures.firstMs !== null) line.append(figure("first token", duration(figures.firstMs), "TTFT: from sending to the first text, measured by this page"));
  if (figures.queueMs > NOTICEABLE_MS) line.append(figure("queued", duration(figures.queueMs), "time in the server's queue"));
  if (figures.speed !== null) line.append(figure("speed", `${rate(figures.speed)} tok/s`, "generated tokens per second after the first one"));
  if (figures.generated !== null) line.append(figure("answer", plural(figures.generated, "token")));
  else if (figures.pieces > 0) line.append(figure("answer", `${plural(figures.pieces, "piece")} received`));
  if (figures.reason !== "") line.append(missFigure(figures.reason, why));
  return line;
}

function whyApproximate({ approximations, moved }) {
  const why = moved > 0 || approximations.length === 0 ? [REUSED] : [];
  return [...why, ...approximations.map((one) => `the server computes with ${one}`)].join("; ");
}

function movedFigure({ moved, recomputed }) {
  const made = figure("at other positions", `${plural(moved, "token")} reused, ${count(recomputed)} recomputed`, "prompt tokens whose KV was cached at other positions");
  made.prepend(element("span", { class: "swatch span", "aria-hidden": "true" }));
  return made;
}

const loaded = (tokens, ms) => plural(tokens, "token") + (ms > 0 ? `, loaded in ${duration(ms)}` : "");

function cachedFigure({ prompt, cached, moved }) {
  const share = prompt > 0 ? cached / prompt : 0;
  const bar = element("span", { class: "meter", "aria-hidden": "true" }, element("span"), element("span", { class: "span" }));
  bar.firstChild.style.width = `${100 * share}%`;
  bar.lastChild.style.width = prompt > 0 && moved > 0 ? `${(100 * moved) / prompt}%` : "0";
  const text = `${count(cached)} of ${count(prompt)} prompt tokens`;
  return element(
    "span",
    { class: "figure", title: "prompt tokens that were not recomputed" },
    element("span", { class: "name", text: "cached" }),
    bar,
    element("span", { class: "value", text: `${text} (${percent(share)})` }),
  );
}

function missFigure(cause, why) {
  const reason = REASONS[cause] ?? causeInWords(cause);
  const made = figure(isMiss(cause) ? "miss" : "computed", why === null ? reason : "", "why the other prompt tokens were computed");
  if (why !== null) made.lastChild.append(button(reason, why, { class: "link", "aria-label": `${reason}: show this request` }));
  return made;
}

function figure(name, value, title = null) {
  return element(
    "span",
    { class: "figure", title },
    element("span", { class: "name", text: name }),
    element("span", { class: "value", text: value }),
  );
}
