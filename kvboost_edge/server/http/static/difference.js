/** Two texts side by side with their difference marked: text nodes in <del> and <ins>. */

import { element } from "/static/dom.js";
import { beginning } from "/static/format.js";

const PIECES = /\s+|[\p{L}\p{N}_]+|[^]/gu;
const MAX_PAIRS = 250_000; // limit of pairs of pieces to compare
const LONGEST_SAID = 60;

/** Invisible characters, and those that change the reading direction. */
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const numbered = (text) => text.replace(UNSEEN, (char) => `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
const drawn = (text) => text.replaceAll(" ", "␣").replaceAll("\t", "⇥").replaceAll("\n", "⏎\n");

/**
 * Parts of both texts in order: [[kind, before, now], …]; kind "same" (before equals now) or "other" (either may be "").
 * Both texts are excerpts: if one ends earlier, the rest of the other is "beyond" and no difference. If `now` begins
 * with the whole of `before`, the rest was added.
 */
export function parts(before, now) {
  const [was, is] = [before, now].map((text) => text.match(PIECES) ?? []);
  let start = 0;
  while (start < was.length && start < is.length && was[start] === is[start]) start += 1;
  if (start === was.length && was.length > 0) return merged([["same", before, before], ["other", "", is.slice(start).join("")]]);
  const found = merged([["same", was.slice(0, start).join(""), was.slice(0, start).join("")], ...compared(was.slice(start), is.slice(start))]);
  const last = found.at(-1);
  if (found.length > 2 && last?.[0] === "other" && (last[1] === "" || last[2] === "")) last[0] = "beyond";
  return found;
}

/** Parts by the longest common subsequence of pieces. */
function compared(was, is) {
  if (was.length * is.length > MAX_PAIRS) return [["other", was.join(""), is.join("")]];
  const width = is.length + 1;
  const common = new Uint16Array((was.length + 1) * width); // of the rests from [i] and [j]
  for (let i = was.length - 1; i >= 0; i -= 1) {
    for (let j = is.length - 1; j >= 0; j -= 1) {
      const at = i * width + j;
      common[at] = was[i] === is[j] ? common[at + width + 1] + 1 : Math.max(common[at + width], common[at + 1]);
    }
  }
  const found = [];
  for (let i = 0, j = 0; i < was.length || j < is.length; ) {
    if (i < was.length && j < is.length && was[i] === is[j]) found.push(["same", was[i++], is[j++]]);
    else if (j === is.length || (i < was.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) found.push(["other", was[i++], ""]);
    else found.push(["other", "", is[j++]]);
  }
  return found;
}

function merged(found) {
  const joined = [];
  for (const [kind, before, now] of found) {
    if (before === "" && now === "") continue;
    const last = joined.at(-1);
    if (last?.[0] !== kind) joined.push([kind, before, now]);
    else joined[joined.length - 1] = [kind, last[1] + before, last[2] + now];
  }
  return joined;
}

/** The first difference as a sentence, for screen readers; "" if there is none. */
export function differenceInWords(found) {
  const first = found.find(([kind]) => kind === "other");
  if (first === undefined) return "";
  const [before, now] = first.slice(1).map((text) => (text.length > LONGEST_SAID ? `${beginning(text, LONGEST_SAID)}…` : text)).map(quoted);
  if (before === "") return `${now} was added.`;
  if (now === "") return `${before} was removed.`;
  return `${before} changed to ${now}.`;
}

const quoted = (text) => (text === "" ? "" : `“${shown(text)}”`);
const shown = (text) => (text.trim() === "" ? drawn(text) : numbered(text));

/** The children of two <pre>: [of the earlier text, of this one]. */
export function marked(found) {
  const side = (tag, which) =>
    found
      .filter((part) => part[which] !== "")
      .map((part) => (part[0] === "other" ? element(tag, { text: shown(part[which]) }) : document.createTextNode(numbered(part[which]))));
  return [side("del", 1), side("ins", 2)];
}
