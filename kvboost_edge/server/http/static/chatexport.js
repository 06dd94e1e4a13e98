/** A chat as Markdown or JSON, and its download. */

import { titleOf } from "/static/chats.js";
import { messagesOf } from "/static/conversation.js";
import { element } from "/static/dom.js";
import { pretty } from "/static/jsontext.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const NOTES = { stopped: "This answer was stopped.", failed: "This answer failed.", running: "This answer is not complete." };
const URL_SECONDS = 60; // how long the browser may take to read the file

/**
 * The chat as Markdown. `turns`: those of a Conversation. `about`: {system, model, sampling, settings, at}, `sampling` and
 * `settings` being fields of a request and `at` a Date.
 */
export function asMarkdown(turns, about) {
  const { system, sampling, at } = about;
  const used = Object.entries(sampling).map(([name, value]) => `${name} ${value}`);
  const facts = [`- Exported: ${at.toISOString()}`, `- Model: ${modelsOf(turns, about).join(", ")}`];
  if (used.length > 0) facts.push(`- Sampling: ${used.join(", ")}`);
  const parts = [`# ${titleOf(turns) || "Chat"}`, facts.join("\n")];
  if (system.trim() !== "") parts.push("## System", closed(system));
  for (const { question, steps } of turns) parts.push("## User", closed(question), ...steps.flatMap(stepParts));
  return `${parts.join("\n\n")}\n`;
}

/** The chat as JSON: facts about it, and `messages` in OpenAI's format. */
export function asJson(turns, about) {
  const { system, settings, at } = about;
  const messages = system.trim() === "" ? [] : [{ role: "system", content: system }];
  for (const { question, steps } of turns) messages.push({ role: "user", content: question }, ...steps.flatMap(messagesOf));
  const chat = { format: "kvboost-edge-chat", version: 1, title: titleOf(turns), exported_at: at.toISOString(), models: modelsOf(turns, about), settings, messages };
  return `${JSON.stringify(chat, null, 2)}\n`;
}

/** The models that answered; of chats from before they were noted, the present one. */
function modelsOf(turns, { model }) {
  const named = turns.flatMap(({ steps }) => steps.map((step) => step.model ?? "")).filter((name) => name !== "");
  return named.length > 0 ? [...new Set(named)] : [model].filter((name) => name !== "");
}

function stepParts({ reasoning, answer, calls, state, model = "" }) {
  const parts = [model === "" ? "## Assistant" : `## Assistant (${model})`];
  if (reasoning !== "") parts.push(`> **Reasoning**\n>\n${closed(reasoning).split("\n").map((line) => `> ${line}`.trimEnd()).join("\n")}`);
  if (answer !== "") parts.push(closed(answer));
  for (const call of calls) {
    parts.push(`**Tool call:** ${inCode(call.name)}`, fenced(pretty(call.arguments) ?? call.arguments, "json"));
    if (call.result !== null) parts.push("**Result:**", fenced(call.result, ""));
  }
  if (state in NOTES) parts.push(`*${NOTES[state]}*`);
  return parts;
}

/** The text, with the end of a block of code that it leaves open. */
function closed(text) {
  let fence = "";
  for (const line of text.split("\n")) {
    const [, marks = "", rest = ""] = FENCE.exec(line.trimEnd()) ?? [];
    if (fence === "") fence = marks;
    else if (rest === "" && marks.startsWith(fence)) fence = "";
  }
  const trimmed = text.replace(/^\n+|\n+$/g, "");
  return fence === "" ? trimmed : `${trimmed}\n${fence}`;
}

/** A block of code, whose fence is longer than those in the text. */
function fenced(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** A text in a line as code, whatever marks it contains. */
function inCode(text) {
  const longest = Math.max(0, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length));
  const marks = "`".repeat(longest + 1);
  return longest > 0 ? `${marks} ${text} ${marks}` : `${marks}${text}${marks}`;
}

/** The name of the file: letters and digits of the chat's title. */
export function fileName(turns, ending) {
  const name = titleOf(turns).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${name || "chat"}.${ending}`;
}

/** Lets the browser save `text` as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000 * URL_SECONDS);
}
