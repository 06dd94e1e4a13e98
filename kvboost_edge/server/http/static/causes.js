/** Causes of cache misses: their names, importance and remedies. */

import { count } from "/static/format.js";

/** By cause: its name, its kind ("look": there is a remedy; "good": nothing was lost), the remedy. */
export const CAUSES = {
  changed_text: ["text changed", "look", "Put changing text after stable text."],
  tool_order: ["tool order changed", "look", "Send the tools in the same order every turn."],
  tools: ["tools changed", "look", "Send the same tools every turn, and restrict them with tool_choice."],
  template: ["template variables changed", "look", "Send the same chat_template_kwargs every turn."],
  thinking: ["reasoning left out", "look", "Send reasoning_content back with the answers."],
  retokenized: ["same text, different tokens", "look", "Send answers back unchanged."],
  evicted: ["evicted", "look", "Give the pool more memory, add a disk tier, or pin the prompt."],
  state: ["recurrent state not cached", "look", "Raise --max-state-bytes."],
  not_kept: ["not cached", "look", "The earlier request was still running, or its mode does not write the cache."],
  first_seen: ["no earlier request with this prefix", "plain", "Warm common prefixes."],
  private_tail: ["end of an earlier prompt not shared", "plain", "Approximate options of the model do not share it."],
  other_position: ["reused at other positions", "plain", ""],
  bypassed: ["cache not used", "plain", "The mode or prompt_logprobs does not read the cache."],
  not_started: ["waited until its time limit", "plain", "Raise --request-timeout, or send fewer requests at a time."],
  not_compared: ["not compared", "plain", "The server does not record requests (--request-history 0)."],
  other_message: ["last message changed", "good", ""],
  new_text: ["new text only", "good", ""],
  tail: ["only the last block", "good", ""],
  none: ["fully cached", "good", ""],
};

const LITTLE = 0.1; // share of a prompt

/** Causes at a token where the prompt differs from an earlier one. */
const DIFFERENCES = ["changed_text", "tool_order", "tools", "template", "thinking", "retokenized", "other_message"];

/** Causes without a meaningful position: no earlier prompt was compared, or nothing was computed. */
const NO_POSITION = ["first_seen", "not_compared", "bypassed", "not_started", "other_position", "none"];

/** Symbols of the kinds. */
export const SHAPES = { look: "▲", plain: "●", good: "○" };

export const causeInWords = (cause) => known(cause)?.[0] ?? String(cause).replaceAll("_", " ");

/** "text changed at token 58" */
export function causeOf({ cause, position }) {
  const words = causeInWords(cause);
  return DIFFERENCES.includes(cause) && typeof position === "number" ? `${words} at token ${count(position)}` : words;
}

/** False if only new text or the last block was computed. */
export const isMiss = (cause) => known(cause)?.[1] !== "good";

export const hasPosition = ({ cause }) => !NO_POSITION.includes(cause);

/** The kind of a request; if few tokens were computed, no remedy is needed. */
export function kindOf({ cause, prompt_tokens: prompt, computed_tokens: computed }) {
  const kind = known(cause)?.[1] ?? "plain";
  return kind === "look" && computed <= LITTLE * prompt ? "plain" : kind;
}

export const whatHelps = (cause) => known(cause)?.[2] ?? "";

const known = (cause) => (Object.hasOwn(CAUSES, cause) ? CAUSES[cause] : undefined);
