/** Why a prompt was read again: what each cause is called, whether it is worth a look, and what helps. */

/** By cause: its words, its kind ("look": something helps; "good": nothing was lost), what helps. */
export const CAUSES = {
  changed_text: ["another text", "look", "Put changing text after stable text."],
  tool_order: ["tools in another order", "look", "Send the tools in the same order every turn."],
  tools: ["other tools", "look", "Send the same tools every turn, and restrict them with tool_choice."],
  template: ["other template variables", "look", "Send the same chat_template_kwargs every turn."],
  thinking: ["reasoning left out", "look", "Send reasoning_content back with the answers."],
  retokenized: ["same text, other tokens", "look", "Send answers back unchanged."],
  evicted: ["evicted", "look", "Give the pool more memory, add a disk tier, or pin the prompt."],
  state: ["recurrent state not kept", "look", "Raise --max-state-bytes."],
  not_kept: ["not kept", "look", "The earlier request still ran, or its mode keeps nothing."],
  first_seen: ["no earlier request with this prefix", "plain", "Warm common prefixes."],
  other_position: ["reused at other positions", "plain", ""],
  bypassed: ["cache not used", "plain", "The mode or prompt_logprobs requires computing."],
  not_started: ["ended while it waited", "plain", ""],
  not_compared: ["not compared", "plain", "The server keeps no requests (--request-history 0)."],
  other_message: ["another last message", "good", ""],
  new_text: ["new text only", "good", ""],
  tail: ["all but the last block", "good", ""],
  none: ["all from the cache", "good", ""],
};

const LITTLE = 0.1; // of a prompt

/** Shapes of the kinds. */
export const SHAPES = { look: "▲", plain: "●", good: "○" };

export const causeInWords = (cause) => known(cause)?.[0] ?? String(cause).replaceAll("_", " ");

/** The kind of a request: little that was computed is not worth a look. */
export function kindOf({ cause, prompt_tokens: prompt, computed_tokens: computed }) {
  const kind = known(cause)?.[1] ?? "plain";
  return kind === "look" && computed <= LITTLE * prompt ? "plain" : kind;
}

export const whatHelps = (cause) => known(cause)?.[2] ?? "";

const known = (cause) => (Object.hasOwn(CAUSES, cause) ? CAUSES[cause] : undefined);
